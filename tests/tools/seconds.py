"""What a run of tests cost (a plugin of pytest): printed, and noted for `make bench`.

Notes are in build/; one of them counts until what it was measured of changes.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.patience import PATIENCE
from tests.tools import notebooks
from tests.tools.notebooks import all_notebooks, code, electives

CELLS = notebooks.ROOT / "build" / "seconds_per_cell.json"
RUNS = notebooks.ROOT / "build" / "seconds_per_run.json"


def pytest_addoption(parser):
    parser.addoption(
        "--note-run",
        metavar="NAME",
        help="time a warm fit of Ray too, and note what this run of `make NAME` took",
    )


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Say where the time went: seconds per file, and of the run in warm fits."""
    took = time.time() - psutil.Process().create_time()  # with all imports
    by_test, by_file = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                by_test[report.nodeid] += report.duration
                by_file[report.nodeid.split("::")[0]] += report.duration
    if any(".ipynb" in name for name in by_file):
        failed = {r.nodeid for r in terminalreporter.stats.get("failed", [])}
        note_cells({n: s for n, s in by_test.items() if n not in failed})
    if len(by_file) > 1:
        terminalreporter.section("seconds per file")
        for name, total in by_file.most_common():
            terminalreporter.write_line(f"{total:7.1f}  {name}")
        terminalreporter.write_line(f"{by_file.total():7.1f}  together")
    if name := config.getoption("--note-run"):
        said = f"make {name}: {took:.0f} s"
        if exitstatus == 0:
            try:
                fit = warm_fit()
            except subprocess.SubprocessError as error:  # no test has failed by it
                said += f"; no warm fit was measured: {error}"
            else:
                note_run(name, seconds=took, fit=fit, tests=len(by_test))
                said += (
                    f" = {took / fit:.0f} warm fits of two workers ({fit:.1f} s each)"
                )
        terminalreporter.write_line(said)


def warm_fit() -> float:
    """Return the seconds of a fit that trains nothing, in a Ray of its own."""
    command = [sys.executable, "-m", "tests.tools.warm_fit"]
    done = subprocess.run(
        command,
        cwd=notebooks.ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def note_run(name: str, **measured: float) -> None:
    """Keep what a whole run of `make NAME` took, in which nothing failed."""
    noted = _read(RUNS) | {name: {"sources": _digest(all_sources()), **measured}}
    _write(RUNS, noted)


def noted_runs() -> dict[str, dict[str, float]]:
    """Return what the last whole run took of each command ("test", "test-all").

    Each has "seconds" (from the start of Python to the last test), "fit" (seconds of a
    warm fit with two workers, measured after it) and "tests" (how many, with cells of
    notebooks). A command is missing if no run passed since code last changed.
    """
    now = _digest(all_sources())
    return {
        name: {key: value for key, value in run.items() if key != "sources"}
        for name, run in _read(RUNS).items()
        if run["sources"] == now
    }


def all_sources() -> list[str]:
    """Return the code of this repository: modules, scripts, and cells of notebooks."""
    root = notebooks.ROOT
    modules = [*root.glob("*.py"), *root.glob("utils/**/*.py")]
    modules += [*root.glob("tests/**/*.py"), *root.glob("0*/*.py")]
    books = all_notebooks() + electives()
    cells = [source for path in books for source in code(path)]
    return [path.read_text() for path in sorted(modules)] + cells


def note_cells(by_test: dict[str, float]) -> None:
    """Keep the seconds per cell of all notebooks that a run under nbval has executed whole.

    Of the others stays what an earlier run noted; `noted_cells` drops what is stale.
    """
    noted = _read(CELLS)
    for path in all_notebooks() + electives():
        sources = code(path)
        name = path.relative_to(notebooks.ROOT).as_posix()
        cells = [f"{name}::Cell {number}" for number in range(len(sources))]
        if all(cell in by_test for cell in cells):
            seconds = [by_test[cell] for cell in cells]
            noted[name] = {"sources": _digest(sources), "seconds": seconds}
            _write(CELLS, noted)


def noted_cells() -> dict[str, list[tuple[str, float]]]:
    """Return source and seconds of each cell, of notebooks that have not changed since."""
    noted = _read(CELLS)
    found = {}
    for path in all_notebooks() + electives():
        name, sources = path.relative_to(notebooks.ROOT).as_posix(), code(path)
        if noted.get(name, {}).get("sources") == _digest(sources):
            found[name] = list(zip(sources, noted[name]["seconds"]))
    return found


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, noted: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(noted, indent=1))


def _digest(sources: list[str]) -> str:
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()
