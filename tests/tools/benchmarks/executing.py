"""How much of executing a notebook is start-up: the kernel, the imports, starting Ray."""

import re
import subprocess
import sys

from tests.tools.benchmarks.rows import Row
from tests.tools.notebooks import ROOT, all_notebooks
from tests.tools.seconds import noted_cells

FIRST = "01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb"


def is_start_up(source: str) -> bool:
    """Return whether a cell only imports, or starts Ray and trains nothing yet."""
    if re.search(r"^start_ray\(", source, re.MULTILINE):  # what is beside it is quick
        return not re.search(r"\bfit\(", source)
    lines = [line for line in source.splitlines() if line and line[0] not in " #)%"]
    starts = re.compile(r"(import|from|warnings\.|os\.environ)")
    return bool(lines) and all(starts.match(line) for line in lines)


def rows() -> list[Row]:
    """Return row 10: what runs under nbval noted of notebooks as they are now."""
    if FIRST not in noted_cells():
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", FIRST]
        subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=600
        )
    lessons = [
        str(p.relative_to(ROOT)) for p in all_notebooks() if p.stem != "solutions"
    ]
    noted = noted_cells()
    found = [row(name, noted[name]) for name in lessons if name in noted]
    missing = len(lessons) - len(found)
    if missing:
        what = "notebooks that were not executed under nbval since they changed"
        note = "run `pytest --nbval` on them, then "
        note += "`python -m tests.tools.benchmarks executing`"
        found.append(Row(10, what, "", str(missing), note=note))
    return found


def row(name: str, cells: list[tuple[str, float]]) -> Row:
    """Return the row of a notebook, from the source and the seconds of each cell."""
    total = sum(seconds for _, seconds in cells)
    start_up = sum(seconds for source, seconds in cells if is_start_up(source))
    return Row(
        10,
        f"executing {name} over its cells that do not start anything",
        "printed, falling",
        f"{total / (total - start_up):.2f}",
        note=f"{total:.0f} s under nbval, {start_up / total:.0%} of it start-up",
        data={"seconds": total, "start_up": start_up},
    )
