"""What the scripts share that torchrun starts, or Ray Train: their options and checks."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from utils import command_line, models, settings
from utils.checkpoint_files import check_writable
from utils.errors import BadInput


class Parser(command_line.Parser):
    """Parse the options that all scripts share, and those of a run of steps on text."""

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

    # any arguments, as in its base
    def parse_args(self, *args, **kwargs) -> Namespace:  # type: ignore[override]
        """Parse; model and learning rate follow from the run mode if they are not given."""
        found = super().parse_args(*args, **kwargs)
        found.model = found.model or settings.pick(smoke="smoke", full="gpt2-124m")
        found.lr = found.lr or settings.pick(smoke=3e-3, full=3e-4)
        found.stop_file = None
        return found


def world_size(args: Namespace) -> int:
    """Return the number of ranks: torchrun has said it, or `args` do."""
    if "RANK" in os.environ:
        return int(os.environ.get("WORLD_SIZE", 1))
    return args.num_workers or 1


def check_launch(args: Namespace) -> None:
    """Check that one launcher is there, and that the folders can be written to.

    Raises:
        BadInput: no launcher is there, or two, or a folder is not as it should be.
    """
    under_torchrun = "RANK" in os.environ
    if under_torchrun and args.num_workers:
        raise BadInput(
            "torchrun has started this process, and --num-workers asks Ray Train to start "
            "some: leave out one of them."
        )
    if not under_torchrun and not args.num_workers:
        raise BadInput(
            "start me with torchrun (torchrun --nproc_per_node=2 ...), or with Ray Train "
            "(--num-workers 2)."
        )
    command_line.prepare_folder(args)
    if args.export and os.environ.get("RANK", "0") == "0":
        check_writable(args.export.parent)


def check_shared(args: Namespace, folder: Path) -> None:
    """Check that all nodes of the Ray cluster see the folders that a run reads and writes.

    Raises:
        BadInput: as `preflight.check_shared`.
    """
    from utils import preflight

    exported = args.export and args.export.parent
    for path in (folder, args.checkpoint_dir, args.text, exported):
        if path:
            preflight.check_shared(path)


def end(args: Namespace, report: dict) -> None:
    """Say on rank 0 how a run ended; one that was stopped ends the program.

    Raises:
        SystemExit: it was stopped; its status tells a scheduler to start it again.
    """
    from utils import stopping  # here: it imports torch, which takes 2 s

    first, losses = report["first_step"], report["losses"]
    speaks = os.environ.get("RANK", "0") == "0"
    if first + len(losses) < args.steps:
        if speaks:
            after = f"stopped after step {first + len(losses)} of {args.steps}"
            print(f"{after}: {stopping.what_next(args.checkpoint_dir)}")
        sys.exit(stopping.EXIT_STATUS)
    if speaks:
        steps = ""  # a run that starts again after its last step has none
        if losses:
            steps = f"steps {first + 1} to {args.steps}: last loss {losses[-1]:.3f}, "
        print(f"{steps}test loss {report['test_loss']:.3f}")
