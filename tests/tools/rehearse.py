"""Run each lesson in each seat, the evening before, and print a table.

    python -m tests.tools.rehearse seats.txt
    python -m tests.tools.rehearse seats.txt --lessons 02/01 02/02

Each line of the file is a seat: the folder of its clone, and in front of it, behind `::`,
the command that reaches it, if it is not on this machine. `#` begins a comment.

    /home/ann/workshop
    ssh seat07 :: workshop
    kubectl exec -i --namespace seats jupyter-seat-07 -- :: /home/ray/workshop-COMMIT

Seats run side by side, as people will; in each, the doctor first and then one lesson after
the other. Copies are executed: nobody's notebook is changed.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.tools import notebooks
from utils.errors import BadInput

DOCTOR = "doctor"
SAYS = {0: "ready", 1: "mend it", 2: "ask an administrator"}
# What a seat's shell reads: with its own environment, if it has one.
SCRIPT = """cd {folder} || exit 90
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
export PATH OMP_NUM_THREADS=1 PYTHONPATH="$PWD"
exec "$(command -v python || echo python3)" -m {module} </dev/null
"""


class Seat(NamedTuple):
    """Say where a clone is, and the command that reaches it (empty: this machine)."""

    folder: str
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((*self.command, self.folder))


class Outcome(NamedTuple):
    """Hold what became of one lesson, or of the doctor, in one seat."""

    well: bool
    seconds: float
    said: str


def seats(text: str) -> list[Seat]:
    """Read the seats that a file lists.

    Raises:
        BadInput: it lists none, or a line names no folder.
    """
    found = []
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        command, _, folder = line.rpartition("::")
        if not folder.strip():
            raise BadInput(f"The line {line!r} ends without the folder of a clone.")
        found.append(Seat(folder.strip(), tuple(shlex.split(command))))
    if not found:
        raise BadInput("No seat is listed: write the folder of a clone into each line.")
    return found


def call(seat: Seat, module: str, seconds: float) -> tuple[int, str, float]:
    """Run a module of Python in a seat; returns its status, its output, and seconds."""
    script = SCRIPT.format(folder=quoted(seat.folder), module=module)
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*seat.command, "sh", "-s"],
            input=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {seconds / 60:.0f} minutes", seconds
    except OSError as error:
        return 127, str(error), 0.0
    return done.returncode, done.stdout, time.monotonic() - start


def quoted(folder: str) -> str:
    """Return a folder for a shell, in which `~/` stays what it is."""
    if folder.startswith("~/"):
        return "~/" + shlex.quote(folder[2:])
    return shlex.quote(folder)


def why(output: str) -> str:
    """Return the line of an output that says what failed: its last one otherwise."""
    output = re.sub(r"\x1b\[[\d;]*m", "", output)  # colours
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("Failed: ")]
    return (failed or lines or ["no output"])[-1].removeprefix("Failed: ")


def rehearse(seat: Seat, lessons: list[str], minutes: float) -> dict[str, Outcome]:
    """Run the doctor and each lesson in one seat, and say so as it goes on."""
    found = {}
    for lesson in (DOCTOR, *lessons):
        module = "utils.doctor"
        if lesson != DOCTOR:
            module = f"tests.tools.notebooks tour {shlex.quote(lesson)}"
        status, output, seconds = call(seat, module, 60 * minutes)
        well = status == 0
        said = "" if well else why(output)
        if lesson == DOCTOR:
            lines = [line for line in output.splitlines() if line.startswith("FAIL")]
            said = "; ".join(map(str.strip, lines)) or said
            said = SAYS.get(status, "failed") + (f": {said}" if said else "")
        found[lesson] = Outcome(well, seconds, said)
        verdict = "ok" if well else f"FAILED: {said}"
        print(f"{seat.name}: {short(lesson)} {seconds:.0f} s, {verdict}", flush=True)
    return found


def short(lesson: str) -> str:
    """Return 02/01 for the path of a lesson."""
    part = re.match(r"(\d\d)-.*/(\d\d|solutions)", lesson)
    return f"{part[1]}/{part[2]}" if part else lesson


def table(found: dict[Seat, dict[str, Outcome]]) -> str:
    """Return a table: a row per seat, the seconds of each lesson or what failed."""
    columns = list(next(iter(found.values())))
    lines = ["| seat | " + " | ".join(map(short, columns)) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for seat, outcomes in found.items():
        cells = []
        for column in columns:
            outcome = outcomes[column]
            well = f"{outcome.seconds:.0f} s"
            cells.append(well if outcome.well else "**FAILED**")
        lines.append(f"| {seat.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chosen(names: list[str]) -> list[str]:
    """Return the paths of lessons named like 02/01; all of the route without names.

    Raises:
        BadInput: there is no such lesson.
    """
    route = [
        p.relative_to(notebooks.ROOT).as_posix() for p in notebooks.all_notebooks()
    ]
    known = {short(path): path for path in route}
    for name in names:
        if name not in known:
            raise BadInput(
                f"There is no lesson {name}: name some of {', '.join(known)}."
            )
    return [known[name] for name in names] or route


def main() -> int:
    """Rehearse; returns 1 if anything failed in any seat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seats", type=Path, help="a file with a seat in each line")
    parser.add_argument("--lessons", nargs="*", default=[], help="such as 02/01; all")
    parser.add_argument(
        "--minutes", type=float, default=30, help="for a lesson at most"
    )
    args = parser.parse_args()
    try:
        listed, lessons = seats(args.seats.read_text()), chosen(args.lessons)
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    with ThreadPoolExecutor(len(listed)) as threads:
        outcomes = threads.map(
            lambda seat: rehearse(seat, lessons, args.minutes), listed
        )
        found = dict(zip(listed, outcomes))
    print(f"\n{table(found)}\n")
    failed = [
        f"{seat.name}, {short(lesson)}: {outcome.said}"
        for seat, each in found.items()
        for lesson, outcome in each.items()
        if not outcome.well
    ]
    print("\n".join(failed) or "Every lesson ran in every seat.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
