"""The notebooks of the workshop: which there are, and what one of them contains.

`execution` runs and records them, `navigation` links them with each other, `outline` tells
their main lines from their side trips, and `python -m tests.tools.notebooks` is their
command line.
"""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[3]
PROOF = "Proved: "
CHECK = re.compile(r'^check\(\s*"([^"]+)"', re.MULTILINE)


def all_notebooks() -> list[Path]:
    """Return the notebooks in reading order; a part's solutions come last."""
    return sorted(ROOT.glob("0[123]-*/*.ipynb"))


def electives() -> list[Path]:
    """Return the notebooks beside the route: each needs packages of its own."""
    return sorted(ROOT.glob("0[123]-*/electives/*.ipynb"))


def needed(path: Path) -> list[str]:
    """Return the packages that an elective names in its first cell of code."""
    call = re.search(r"^needs\(([^)]*)\)", code(path)[0], re.MULTILINE)
    return re.findall(r'"([^"]+)"', call[1]) if call else []


def code(path: Path) -> list[str]:
    """Return the source of every cell of code."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def exercises(path: Path) -> list[str]:
    """Return the names of the exercises that a notebook checks, in order."""
    return [name for source in code(path) for name in CHECK.findall(source)]


def proofs(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what the notebook printed in lines that begin with "Proved: "."""
    outputs = (o for c in notebook.cells for o in c.get("outputs", []))
    lines = (line for o in outputs for line in o.get("text", "").splitlines())
    return [line.removeprefix(PROOF) for line in lines if line.startswith(PROOF)]


def title(path: Path) -> str:
    """Return the first heading of a notebook."""
    for cell in nbformat.read(path, as_version=4).cells:
        heading = re.search(r"^# (.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return heading[1]
    raise ValueError(f"{path} has no heading: give its first cell a line '# Title'.")
