"""Start a script's `train(args)` under torchrun or with Ray Train, and check --resume.

This is what all scripts that run under both share. The training stays in the script.
"""

import gc
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from utils import checkpoint_files, command_line, models, settings
from utils.errors import BadInput


class Parser(command_line.Parser):
    """Parse the options that all scripts share, and those of a run that `start` starts."""

    def __init__(self, doc: str, batch_size: int | None):
        super().__init__(doc, batch_size, lr=None)
        add, count = self.add_argument, command_line.count
        add("--num-workers", type=count, help="start with Ray Train")
        add("--steps", type=count, default=200)
        add("--save-every", type=count, default=50, help="steps")
        sizes = "default: by run mode, as the learning rate"
        add("--model", choices=models.SIZES, help=sizes)
        add("--text", type=settings.local_path, help="a file (default: Python's help)")
        add("--export", type=settings.local_path, help="write the whole model there")

    def parse_args(self, *args, **kwargs) -> Namespace:
        """Parse; model and learning rate follow from the run mode if they are not given."""
        found = super().parse_args(*args, **kwargs)
        found.model = found.model or settings.pick(smoke="smoke", full="gpt2-124m")
        found.lr = found.lr or settings.pick(smoke=3e-3, full=3e-4)
        return found


def world_size(args: Namespace) -> int:
    """Return how many ranks `start` will train on: torchrun says it, or `args`."""
    if "RANK" in os.environ:
        return int(os.environ.get("WORLD_SIZE", 1))
    return args.num_workers or 1


def start(
    train: Callable[[Namespace], dict],
    args: Namespace,
    found: Path | None,
    backend: str | None = None,
) -> None:
    """Call `train(args)` in every process of torchrun, or of Ray Train; say how it ended.

    Args:
        train: runs in a process group, and returns a dict of "first_step", "losses" (one
            for each further step) and "test_loss".
        args: what `Parser` has parsed; with `num_workers`, Ray Train starts as many.
        found: the checkpoint that `train` will find, a folder named step-NNNNNN.
        backend: of torch.distributed (default: by the device).

    Raises:
        BadInput: there is no launcher, `args` do not fit `found`, or a folder cannot be
            written to; or as `train` does.
    """
    under_torchrun = "RANK" in os.environ
    if not under_torchrun and not args.num_workers:
        raise BadInput(
            "start me with torchrun (torchrun --nproc_per_node=2 ...), or with Ray Train "
            "(--num-workers 2)."
        )
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        check_resume(args, found)
    run = _under_torchrun if under_torchrun else _with_ray
    report = run(train, args, backend)
    if os.environ.get("RANK", "0") == "0":
        # a run that restarted after its last step has no losses
        last = "".join(f"last loss {loss:.3f}, " for loss in report["losses"][-1:])
        steps = f"steps {report['first_step'] + 1} to {args.steps}"
        print(f"{steps}: {last}test loss {report['test_loss']:.3f}")


def check_resume(args: Namespace, found: Path | None) -> None:
    """Check what the command line says against `found`, the last complete checkpoint.

    Raises:
        BadInput: there is nothing to resume from, a run that is not to be resumed, or
            one that has all its steps; or --checkpoint-dir, or the folder of --export,
            cannot be written to.
    """
    folder = args.checkpoint_dir
    if args.resume and not found:
        raise BadInput(
            f"There is no complete checkpoint in {folder}: leave out --resume, or name "
            "another folder."
        )
    if found and not args.resume:
        raise BadInput(
            f"{folder} holds checkpoints of an earlier run: add --resume to go on from "
            "them, or name another folder."
        )
    done = found and re.match(r"step-(\d+)", found.name)
    if done and int(done[1]) >= args.steps:
        raise BadInput(
            f"The checkpoint {found.name} has all {args.steps} steps, so nothing is left "
            "to train: raise --steps."
        )
    for path in filter(None, [folder, args.export and args.export.parent]):
        checkpoint_files.check_writable(path)


def _under_torchrun(train: Callable, args: Namespace, backend: str | None) -> dict:
    import torch.distributed as dist

    dist.init_process_group(backend or settings.backend())
    report = train(args)
    # What is sharded holds on to the process group: free it first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()
    return report


def _with_ray(train: Callable, args: Namespace, backend: str | None) -> dict:
    from utils.cluster import start_ray  # isort: split

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from utils.failures import NoRestartOnBadInput, in_a_sentence
    from utils.preflight import check_shared, use_gpu

    start_ray(args.num_workers)
    exported = args.export and args.export.parent
    for path in (settings.storage_path(), args.checkpoint_dir, args.text, exported):
        if path:
            check_shared(path)
    trainer = TorchTrainer(
        lambda config: train(Namespace(**config)),
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu()),
        # left alone, Ray takes NCCL for GPUs and gloo for CPUs
        torch_config=TorchConfig(backend=backend),
        run_config=RunConfig(
            name=f"run-{time.time_ns()}",  # a name used before would resume that run
            storage_path=str(settings.storage_path()),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[NoRestartOnBadInput()],
        ),
    )
    with in_a_sentence():
        return trainer.fit().return_value
