"""What the scripts share that torchrun starts, or Ray Train: options and the launch."""

import gc
import math
import os
from argparse import Namespace
from collections.abc import Callable

import torch.distributed as dist

from utils import command_line, models, runs, settings
from utils.checkpoint_files import check_writable


class Parser(command_line.Parser):
    """Parse the options that all scripts share, and those of a run of steps on text."""

    def __init__(self, doc: str, batch_size: int | None):
        super().__init__(doc, batch_size, lr=None)
        add, count = self.add_argument, command_line.count
        add("--num-workers", type=count, help="start with Ray Train")
        add("--steps", type=count, default=200)
        add("--save-every", type=count, default=50, help="steps")
        add("--warmup-steps", type=command_line.from_zero, default=0, help="of --lr")
        add("--decay-steps", type=count, help="then lower it to a tenth in so many")
        sizes = "default: by run mode, as the learning rate"
        add("--model", choices=models.SIZES, help=sizes)
        add("--text", type=settings.local_path, help="a file (default: Python's help)")
        add("--export", type=settings.local_path, help="write the whole model there")

    # any arguments; argparse's own types tell three kinds of calls apart
    def parse_args(self, *args, **kwargs) -> Namespace:  # type: ignore[override]
        """Parse; model and learning rate follow from the run mode if they are not given.

        Raises:
            BadInput: an argument is wrong; no launcher is there, or two; what `--export`
                names cannot be written.
        """
        found = super().parse_args(*args, **kwargs)
        is_small = settings.mode(found.smoke_test) == "smoke"
        found.model = found.model or ("smoke" if is_small else "gpt2-124m")
        found.lr = found.lr or (3e-3 if is_small else 3e-4)
        if not found.num_workers:
            command_line.check_torchrun(found.smoke_test, "--num-workers 2")
        elif "RANK" in os.environ:
            self.error(
                "torchrun has started this process, and --num-workers asks Ray Train to "
                "start some: leave out one of them."
            )
        if found.export and os.environ.get("RANK", "0") == "0":
            if found.export.is_dir():
                self.error(f"--export: {found.export} is a folder: name a file in it.")
            check_writable(found.export.parent)
        return found


def launch(train: Callable, args: Namespace, name: str, offload: bool = False) -> None:
    """Call `train(args, stop_file)` on every rank, and end as its summary says.

    Args:
        train: returns `Run.summary()`.
        args: of the command line: with `num_workers`, Ray Train starts that many ranks;
            else torchrun has started this process as one of several.
        name: of the script.
        offload: whether CPUs send, too, beside GPUs.
    """
    how = with_ray if args.num_workers else under_torchrun
    runs.exit_with(how(train, args, name, offload))


def under_torchrun(train: Callable, args: Namespace, name: str, offload: bool) -> dict:
    """Train in this process; returns its summary."""
    device = settings.set_device(args.smoke_test)
    own_gpu = device if device.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if offload else settings.backend(device)
    dist.init_process_group(backend, device_id=own_gpu)  # NEW
    summary = train(args, None)
    # What is sharded holds on to the process group: free it first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()  # NEW
    return summary


def with_ray(train: Callable, args: Namespace, name: str, offload: bool) -> dict:
    """Let Ray Train start the workers, and once more if one dies; returns its summary."""
    from utils.cluster import start_ray  # isort: split

    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from utils import preflight, ray_runs

    folder = ray_runs.folder_of(name, None)  # Ray's own files: `train` saves by itself
    if args.checkpoint_dir:
        check_writable(args.checkpoint_dir)  # made, so that all nodes are asked for it
    resources = {"CPU": 1.0} if args.smoke_test else None
    start_ray(args.num_workers, resources, log_to_driver=True)
    exported = args.export and args.export.parent
    for path in (folder, args.checkpoint_dir, args.text, exported):
        if path:
            preflight.check_shared(path)
    use_gpu = preflight.use_gpu(args.smoke_test)
    trainer = TorchTrainer(  # NEW
        lambda config: train(
            Namespace(**config["args"]), ray_runs.StopFile(config["folder"])
        ),
        train_loop_config={"args": vars(args), "folder": folder},
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        # None: Ray takes NCCL where workers have GPUs, else gloo
        torch_config=TorchConfig("cpu:gloo,cuda:nccl" if offload else None),
        run_config=ray_runs.run_config(folder),
    )
    return ray_runs.fit(trainer, folder).return_value


def set_lr(optimizer, step: int, args: Namespace) -> None:
    """Set the learning rate of a step: by nothing but its number, so none has to be saved.

    It rises to `lr` over the first `warmup_steps`; with `decay_steps`, it falls to a tenth
    by then, along a cosine.

    Source: https://arxiv.org/abs/1608.03983
    """
    lr = args.lr * min(1, (step + 1) / (args.warmup_steps + 1))
    if args.decay_steps and step >= args.warmup_steps:
        gone = min(1, (step - args.warmup_steps) / args.decay_steps)
        lr *= 0.55 + 0.45 * math.cos(math.pi * gone)
    for group in optimizer.param_groups:
        group["lr"] = lr
