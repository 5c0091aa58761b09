"""The command: judge the training in a file, and print what was found."""

import argparse
import sys

from .checking import check
from .ranks import CONTEXT
from .training import FUNCTIONS, OPTIONAL, BadInput

EPILOG = (
    "The file defines "
    + "; ".join(c + " (optional)" * (n in OPTIONAL) for n, c in FUNCTIONS.items())
    + ". Status: 0 equal, 1 a mistake, 2 the file cannot be used, 3 cannot be judged."
)


def main(arguments: list[str] | None = None) -> int:
    """Judge the file on the command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.parity" if __name__.startswith("utils.") else "parity",
        description="Prove that N workers train like one process, or name the mistake.",
        epilog=EPILOG,
    )
    parser.add_argument("file", help="your training; see the top of the package")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=20, help="updates, at most, of an epoch"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds of one step"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(arguments)
    # one process imports torch, and all ranks are forked from it
    CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "torch.nn.parallel"])
    if sys.stderr.isatty():  # else nothing would be seen for half a minute
        sizes = ", ".join(map(str, (1, *args.world_sizes)))
        print(f"Trains in {sizes} processes ...", file=sys.stderr)
    try:
        report = check(
            args.file, args.world_sizes, args.epochs, args.steps, args.timeout,
            args.device,
        )  # fmt: skip
    except BadInput as problem:
        print(f"parity: {problem}", file=sys.stderr)
        return 2
    print(report.as_json() if args.json else report)
    return report.status


def run() -> None:
    """End the process with the status: what `python -m zipapp` is given."""
    sys.exit(main())
