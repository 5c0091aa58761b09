"""Run tests again and again beside busy loops, and print a table of how often they passed.

python -m tests.tools.repeat                    # each file and notebook that starts Ray
python -m tests.tools.repeat tests/test_faults.py 02-ddp-pytorch-ray/01_ray_core.ipynb -n 20
python -m tests.tools.repeat --gate -n 3 --loaded 1   # .ci/run in fresh clones, as in CI

A failure that comes and goes is a bug with a cause; this finds it. The table is Markdown.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.tools import notebooks
from tests.tools.notebooks.execution import end_left_over
from utils.electives import missing, pins

# It ends with the process that started it, whose id it is given: that may be gone by now.
LOOP = "import os\nwhile os.getppid() == {}: sum(range(100_000))"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
PASSED = r"\d+ passed"  # in pytest's last line; where all is skipped, nothing was seen


class Run(NamedTuple):
    """One run of `what`, and the first line of each of its failures: none if it passed."""

    what: str
    seconds: float
    failures: list[str]


def main(argv: list[str] | None = None) -> int:
    """Do it, and print the table, also of what was done before Ctrl-C; 1 if one failed."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C, clean up
    runs: list[Run] = []
    try:
        for what in ["the gate"] if args.gate else args.what or with_ray():
            for number in range(args.n):
                loaded = args.n - number <= args.loaded
                with busy(args.loops if loaded else 0):
                    run = (
                        run_gate(args.limit)
                        if args.gate
                        else run_tests(what, args.limit)
                    )
                runs.append(run)
                state = "failed" if run.failures else "passed"
                where = f"{what}, {number + 1} of {args.n}"
                print(f"{where}: {state} in {run.seconds:.0f} s", file=sys.stderr)
    finally:
        print(table(runs))
    return int(any(run.failures for run in runs))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.repeat", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("what", nargs="*", help="files of tests, or notebooks (default: all with Ray)")
    add(
        "-n",
        type=int,
        default=5,
        choices=range(1, 101),
        metavar="N",
        help="runs of each",
    )
    add("--loops", type=int, default=os.cpu_count(), help="(default: one per core)")
    add("--loaded", type=int, help="how many runs, the last ones, are beside loops")
    add(
        "--limit",
        type=float,
        help="seconds per run (default: an hour; of a gate, four)",
    )
    add("--gate", action="store_true", help="run .ci/run on HEAD, in fresh clones")
    args = parser.parse_args(argv)
    if args.gate and args.what:
        parser.error("--gate runs everything: name no files")
    for what in args.what:  # else each run would fail by it
        if not (notebooks.ROOT / what.partition("::")[0]).exists():
            parser.error(f"there is no {what} in this repository")
    args.loaded = args.n if args.loaded is None else args.loaded
    args.limit = args.limit or (4 * 3600 if args.gate else 3600)
    return args


def with_ray() -> list[str]:
    """Return the files and notebooks of the gate that start Ray: those with the mark.

    The electives among them only where their packages are installed (`make electives`).
    """
    gated = "not weekly and not elective" if missing(*pins()) else "not weekly"
    marked = ["-m", f"xdist_group and {gated}", "--collect-only", "--nbval"]
    done = subprocess.run(
        [*PYTEST, *marked],
        cwd=notebooks.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    found = re.findall(r"^(\S+)::", done.stdout, re.M)
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def busy(loops: int) -> Iterator[list[subprocess.Popen]]:
    """Let so many processes take all the CPU that they get, while inside."""
    started = []
    try:
        for _ in range(loops):
            command = [sys.executable, "-c", LOOP.format(os.getpid())]
            started.append(subprocess.Popen(command))
        yield started
    finally:
        for loop in started:
            loop.kill()
            loop.wait(60)


def run_tests(what: str, limit: float) -> Run:
    """Run a file of tests or a notebook once."""
    command = [*PYTEST, "--nbval", "-m", "not weekly", what]
    return timed(what, command, notebooks.ROOT, limit, PASSED)


def run_gate(limit: float) -> Run:
    """Run .ci/run once, in a clone of HEAD with an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="a gate ") as folder:
        clone = Path(folder) / "workshop"
        command = ["git", "clone", "--quiet", str(notebooks.ROOT), str(clone)]
        subprocess.run(command, check=True, timeout=600)
        setup = timed("the gate", ["make", "setup"], clone, limit)
        return setup if setup.failures else timed("the gate", [".ci/run"], clone, limit)


def timed(
    what: str, command: list[str], folder: Path, limit: float, proof: str = ""
) -> Run:
    """Run a command to its end or its limit, and end all that it leaves behind.

    proof: a pattern; a run whose output lacks it has failed.
    """
    marker = {"WORKSHOP_REPEAT": uuid.uuid4().hex}
    start, late = time.monotonic(), []
    with tempfile.TemporaryFile("w+") as file:  # a pipe stays open in what is left
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | marker,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            job.wait(limit)
        except subprocess.TimeoutExpired:
            late = [f"it took more than {limit:g} s"]
        finally:
            job.kill()
            end_left_over(marker)
            job.wait(60)
        seconds = time.monotonic() - start
        file.seek(0)
        said = re.sub(r"\x1b\[[\d;]*m", "", file.read())
    failures = late + re.findall(r"^(?:FAILED|ERROR) .*", said, re.M)
    if not failures and (job.returncode or not re.search(proof, said)):
        failures = (said.strip().splitlines() or ["it said nothing"])[-1:]
    return Run(what, seconds, failures)


def table(runs: list[Run]) -> str:
    """Return the table, and below it what failed."""
    lines = ["| what | runs | green | median, s | worst, s |", "|---|---|---|---|---|"]
    for what in dict.fromkeys(run.what for run in runs):
        its = [run for run in runs if run.what == what]
        green, seconds = sum(not r.failures for r in its), [run.seconds for run in its]
        middle, worst = statistics.median(seconds), max(seconds)
        lines.append(f"| {what} | {len(its)} | {green} | {middle:.0f} | {worst:.0f} |")
    for run in runs:
        number = [r for r in runs if r.what == run.what].index(run) + 1
        lines += [f"\n{run.what}, run {number}:"] if run.failures else []
        lines += [f"- {line[:300]}" for line in run.failures]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
