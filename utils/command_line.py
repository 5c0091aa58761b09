"""Do what scripts share around the training: parse, and end with a sentence."""

import argparse
import contextlib
import faulthandler
import io
import os
import signal
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable
from pathlib import Path

from utils import settings
from utils.errors import BadInput, sentence

BF16 = "compute in bfloat16 (default: on GPUs)"


class Parser(argparse.ArgumentParser):
    """Parse the options that all scripts share, and those that a script adds.

    What is wrong with a command line is BadInput, as anything else that is wrong with an
    input, and not the end of the process: see `run`.

    Args:
        doc: the script's docstring, whose first line the help shows.
        batch_size: what it is by default, per worker.
        lr: the learning rate by default.
        place: the `type` of --checkpoint-dir.
    """

    def __init__(
        self,
        doc: str,
        batch_size: int | None = 32,
        lr: float | None = 3e-4,
        place: Callable = settings.local_path,
    ):
        super().__init__(description=doc.splitlines()[0])
        add = self.add_argument
        add("--batch-size", type=count, default=batch_size, help="per worker")
        add("--lr", type=positive, default=lr, help="of AdamW")
        add(
            "--seed",
            type=from_zero,
            default=0,
            help="of weights, order and random numbers",
        )
        folder = "save there, and go on from the newest checkpoint in it"
        add("--checkpoint-dir", type=place, help=folder)
        add("--keep", type=count, default=2, help="checkpoints that are kept")
        add("--smoke-test", action="store_true", help="on CPU, even if there are GPUs")

    def error(self, message: str):
        raise BadInput(message)


def parse_images(doc: str, ray: bool = False) -> argparse.Namespace:
    """Parse and check the command line of a script that trains on a dataset of images.

    With `ray`, Ray Train is to start `num_workers`; else torchrun has started this process.

    Raises:
        BadInput: an argument is wrong, or there are fewer images than workers need; or as
            `check_torchrun`.
    """
    # here, not above: it imports torch and torchvision, which takes 4 s
    from utils import datasets

    place = settings.path_or_address if ray else settings.local_path
    parser = Parser(doc, place=place)
    parser.add_argument("--epochs", type=count, default=3)
    names = ", ".join(datasets.DATASETS)
    parser.add_argument("--dataset", default="digits", help=names)
    parser.add_argument("--bf16", action=BooleanOptionalAction, help=BF16)
    args = parse_workers(parser) if ray else parser.parse_args()
    workers = args.num_workers if ray else check_torchrun(args.smoke_test)
    num_images = len(datasets.load(args.dataset))  # type: ignore[arg-type]
    datasets.check_batch_size(args.batch_size, num_images, workers)
    return args


def parse_stream(doc: str) -> argparse.Namespace:
    """Parse the command line of a script that trains on a stream of images, with Ray Train.

    Raises:
        BadInput: an argument is wrong.
    """
    parser, most = Parser(doc, place=settings.path_or_address), 0.01  # GB, smoke test
    add = parser.add_argument
    add("--data-size-gb", type=positive, default=1.0, help="GB to generate")
    add("--data-path", help="Parquet files: one, or a folder; local, s3://, gs://")
    add("--num-epochs", dest="epochs", type=count, default=2)
    add("--on-corrupt", choices=("fail", "skip"), default="fail")
    add("--bf16", action=BooleanOptionalAction, help=BF16)
    args = parse_workers(parser)
    if args.smoke_test:
        args.data_size_gb = min(args.data_size_gb, most)
    return args


def parse_workers(parser: Parser) -> argparse.Namespace:
    """Add --num-workers to `parser`, and parse; the default follows from the run mode."""
    parser.add_argument(
        "--num-workers", type=count, help="default: 2, or all GPUs here"
    )
    args = parser.parse_args()
    args.num_workers = args.num_workers or settings.num_workers(args.smoke_test)
    return args


def chosen(args: argparse.Namespace, *names: str) -> dict[str, object]:
    """Return some options with their values, as they are typed."""
    return {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}


def from_zero(text: str) -> int:
    """Return a whole number from 0 on, with at most nine digits; a `type` for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none; argparse shows it.
    """
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(
            f"it is {text}, but has to be a whole number from 0 to 999999999."
        )
    return int(text)


def count(text: str) -> int:
    """Return a whole number from 1 on; a `type` for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none; argparse shows it.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"it is {text}, but has to be a whole number, and at least 1."
        )
    return int(text)


def positive(text: str) -> float:
    """Return a number above 0; a `type` for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none; argparse shows it.
    """
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"it is {text}, but has to be a number above 0.")


def check_torchrun(smoke_test: bool = False, or_else: str = "") -> int:
    """Check that torchrun has started this process; returns how many it has started.

    Args:
        smoke_test: whether they stay on the CPU.
        or_else: options with which the script starts workers by itself.

    Raises:
        BadInput: it has not, or it has started more of them than there are GPUs.
    """
    if "RANK" not in os.environ:
        script = Path(sys.argv[0]).name
        other = f", or with Ray Train: {script} {or_else}" if or_else else ""
        raise BadInput(
            f"start me with torchrun: torchrun --nproc_per_node=2 {script}{other}"
        )
    if settings.device(smoke_test).type == "cuda":
        import torch

        num_gpus = torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > num_gpus:  # on all ranks alike
            raise BadInput(
                f"There are more workers than GPUs ({num_gpus}): lower "
                "--nproc_per_node, or add --smoke-test to run on the CPU."
            )
    return int(os.environ["WORLD_SIZE"])


def run(main: Callable[[], None]) -> None:
    """Call a script's `main`; BadInput ends it with its sentence alone, and status 1.

    Any other exception is a mistake of a program, and keeps its traceback. Under torchrun,
    sentence or traceback go into the file from which torchrun's summary, the last thing
    that it prints, takes the reason. So ranks need not agree on which of them speaks.
    Each line that is printed reaches a log file at once, also before a wait or a kill.
    `kill -USR1` makes this process write its call stack to stderr, and go on.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if summary := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # here, not above: without torchrun, a wrong command line need not wait for torch
        from utils import torchrun_summary

        torchrun_summary.run(main, Path(summary))
        return
    try:
        main()
    except BadInput as problem:
        sys.exit(sentence(problem))
