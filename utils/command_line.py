"""Do what scripts share around the training: parse, find a run, end with a sentence."""

import argparse
import contextlib
import io
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from utils import runs
from utils.errors import BadInput, sentence
from utils.settings import device, local_path, num_workers, storage_path

BF16 = "train with autocast to bfloat16"


class Parser(argparse.ArgumentParser):
    """Parse the options that all scripts share, and those that a script adds.

    What is wrong with a command line is BadInput, as anything else that is wrong with an
    input, and not the end of the process: see `run`.

    Args:
        doc: the script's docstring, whose first line the help shows.
        batch_size: what it is by default, per worker.
        lr: the learning rate by default.
    """

    def __init__(self, doc: str, batch_size: int | None = 32, lr: float | None = 3e-4):
        super().__init__(description=doc.splitlines()[0])
        add = self.add_argument
        add("--batch-size", type=count, default=batch_size, help="per worker")
        add("--lr", type=positive, default=lr, help="of AdamW")
        add("--seed", type=int, default=0, help="of weights, order and random numbers")
        folder = "save there, and go on from the newest checkpoint in it"
        add("--checkpoint-dir", type=local_path, help=folder)
        add("--fresh", action="store_true", help="refuse a folder that holds something")
        add("--keep", type=count, default=2, help="checkpoints that are kept")
        add("--smoke-test", action="store_true", help="on CPU, even if there are GPUs")

    # any arguments; argparse's own types tell three kinds of calls apart
    def parse_args(self, *args, **kwargs) -> argparse.Namespace:  # type: ignore[override]
        """Parse as argparse does; `--smoke-test` sets the run mode.

        Raises:
            BadInput: an argument is wrong, or does not go together with another.
        """
        found = super().parse_args(*args, **kwargs)
        if found.smoke_test:
            os.environ["WORKSHOP_MODE"] = "smoke"
        if found.fresh and not found.checkpoint_dir:
            self.error("--fresh needs --checkpoint-dir: name the folder to start in.")
        return found

    def error(self, message: str):
        raise BadInput(message)


def parse_images(doc: str, ray: bool = False) -> argparse.Namespace:
    """Parse and check the command line of a script that trains on a dataset of images.

    The namespace also has `run`, the settings that define the training, and with `ray`
    `num_workers` for Ray Train to start; without it, torchrun has to have started this
    process.

    Raises:
        BadInput: an argument is wrong, or there are fewer images than workers
            need; or as `check_torchrun` and `prepare_folder` do.
    """
    # here, not above: it imports torch and torchvision, which takes 4 s
    from utils import datasets

    parser = Parser(doc)
    parser.add_argument("--epochs", type=count, default=3)
    names = ", ".join(datasets.DATASETS)
    parser.add_argument("--dataset", default="digits", help=names)
    parser.add_argument("--bf16", action="store_true", help=BF16)
    args = parse_workers(parser) if ray else parser.parse_args()
    workers = args.num_workers if ray else check_torchrun()
    num_images = len(datasets.load(args.dataset))  # type: ignore[arg-type]
    datasets.check_batch_size(args.batch_size, num_images, workers)
    args.run = runs.defining(args, "dataset", "batch_size", "lr", "seed", "bf16")
    if not ray:
        prepare_folder(args)
    return args


def parse_stream(doc: str) -> argparse.Namespace:
    """Parse the command line of a script that trains on a stream of images, with Ray Train.

    Raises:
        BadInput: an argument is wrong.
    """
    parser, most = Parser(doc), 0.01  # GB that a smoke test writes
    add = parser.add_argument
    add("--data-size-gb", type=positive, default=1.0, help="GB to generate")
    add("--data-path", help="Parquet files: one, or a folder; local, s3://, gs://")
    add("--num-epochs", dest="epochs", type=count, default=2)
    add("--on-corrupt", choices=("fail", "skip"), default="fail")
    add("--bf16", action="store_true", help=BF16)
    args = parse_workers(parser)
    if args.smoke_test:
        args.data_size_gb = min(args.data_size_gb, most)
    data = "data_path" if args.data_path else "data_size_gb"
    args.run = runs.defining(args, data, "batch_size", "lr", "seed", "bf16")
    return args


def parse_workers(parser: Parser) -> argparse.Namespace:
    """Add --num-workers to `parser`, and parse; the default follows from the run mode."""
    parser.add_argument(
        "--num-workers", type=count, help="default: 2, or all GPUs here"
    )
    args = parser.parse_args()
    args.num_workers = args.num_workers or num_workers()
    return args


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


def find_run(args: argparse.Namespace) -> tuple[str, Path]:
    """Return the name and the folder of a run: Ray goes on with one that has both.

    With --checkpoint-dir the name is that of the script; else it is a new run. Notes in
    `args.run_folder` where it keeps its files, and in `args.stop_file` where its workers
    look whether they are to stop.

    Raises:
        BadInput: --fresh, and the folder holds something; or it cannot be written to.
    """
    if not args.checkpoint_dir:
        return new_run(args)
    runs.prepare(args.checkpoint_dir, args.fresh)
    from utils.failures import remove_cut_off  # here: it imports Ray, for part 02 alone

    name, folder = Path(sys.argv[0]).stem, args.checkpoint_dir
    remove_cut_off(folder / name)
    args.run_folder = folder / name
    args.stop_file = args.run_folder / "stop"
    return name, folder


def new_run(args: argparse.Namespace) -> tuple[str, Path]:
    """Return a name that no other run has, and the folder of results; as `find_run`."""
    folder = storage_path()
    started = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{Path(sys.argv[0]).stem}_{started}_{secrets.token_hex(4)}"
    args.run_folder = folder / name
    args.run_folder.mkdir()  # raises if somebody has it
    args.stop_file = args.run_folder / "stop"
    return name, folder


def end_run(result, epochs: int, folder: Path | None) -> None:
    """Say how a run of Ray Train ended; one that was stopped ends the program.

    Args:
        result: what `fit` returned; the training function returned where it stands.
        epochs: how many were to be trained.
        folder: --checkpoint-dir.

    Raises:
        SystemExit: it was stopped; its status tells a scheduler to start it again.
    """
    from utils import stopping  # here: it imports torch, which takes 2 s

    at = result.return_value
    if at["epoch"] < epochs:
        then = stopping.what_next(folder)
        if not folder and result.checkpoint:  # Ray Train saves in any case
            then = f"the last checkpoint is in {result.checkpoint.path}, but the same "
            then += "command starts anew, as --checkpoint-dir names no folder"
        if folder and "trained_again" in at:  # of a stream, which has no middle
            again = at["trained_again"]
            then = f"the same command begins it anew, and trains {again} rows again"
        print(f"stopped in epoch {at['epoch'] + 1}: {then}")
        sys.exit(stopping.EXIT_STATUS)
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


def prepare_folder(args: argparse.Namespace) -> None:
    """Check --checkpoint-dir on rank 0, or in the process that Ray is started from.

    Raises:
        BadInput: as `runs.prepare`.
    """
    if args.checkpoint_dir and os.environ.get("RANK", "0") == "0":
        # what is there after a restart that torchrun counts is of the start before
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        script = Path(sys.argv[0]).name
        runs.prepare(args.checkpoint_dir, args.fresh and first, script)


def check_torchrun() -> int:
    """Check that torchrun has started this process; returns how many it has started.

    Raises:
        BadInput: it has not, or it has started more of them than there are GPUs.
    """
    if "RANK" not in os.environ:
        script = Path(sys.argv[0]).name
        raise BadInput(f"start me with torchrun: torchrun --nproc_per_node=2 {script}")
    if device().type == "cuda":
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

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
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
