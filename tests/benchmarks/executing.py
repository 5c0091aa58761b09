"""How much of executing a notebook is start-up: the kernel, the imports, starting Ray."""

import json
import re
import subprocess
import sys

import nbformat

from tests.benchmarks.rows import Row
from tests.notebooks import ROOT

SECONDS = ROOT / "build" / "seconds.json"  # conftest.py writes it after every run
FIRST = "01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb"


def is_start_up(source: str) -> bool:
    """Whether a cell only imports, or starts Ray."""
    lines = [line for line in source.splitlines() if line and line[0] not in " #)%"]
    starts = re.compile(r"(import|from|start_ray\(|warnings\.|os\.environ)")
    return bool(lines) and all(starts.match(line) for line in lines)


def rows() -> list[Row]:
    """Row 10 of the table: of the last `make test`, or of the first notebook now."""
    if not notebooks():
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", FIRST]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = json.loads(SECONDS.read_text())
    return [row(name, seconds) for name in notebooks() if "solutions" not in name]


def notebooks() -> list[str]:
    """The notebooks of which the last run under nbval noted the seconds."""
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    names = {node.split("::")[0] for node in seconds if ".ipynb::" in node}
    return sorted(name for name in names if (ROOT / name).exists())


def row(name: str, seconds: dict[str, float]) -> Row:
    cells = nbformat.read(ROOT / name, as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    by_cell = [seconds.get(f"{name}::Cell {i}", 0.0) for i in range(len(sources))]
    total = sum(
        value for node, value in seconds.items() if node.startswith(f"{name}::")
    )
    start_up = total - sum(
        spent for spent, source in zip(by_cell, sources) if not is_start_up(source)
    )
    return Row(
        10,
        f"executing {name} over its cells that do not start anything",
        "printed, falling",
        f"{total / (total - start_up):.2f}",
        note=f"{total:.0f} s under nbval, {start_up / total:.0%} of it start-up",
        data={"seconds": total, "start_up": start_up},
    )
