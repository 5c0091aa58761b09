"""Make a page of the book from a notebook, as it was recorded."""

import re
from pathlib import Path

import nbformat

from tests.tools.book import exercises, figures
from tests.tools.notebooks.navigation import NAVIGATION
from utils.errors import BadInput

PICTURES = ("image/png", "image/jpeg", "image/svg+xml")


def page(path: Path) -> nbformat.NotebookNode:
    """Return the notebook as the book shows it.

    Its links to its neighbours go, as each page of the book has its own; figures get a
    text, exercises their hints, and solutions fold.

    Raises:
        BadInput: a figure has no text.
    """
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = NAVIGATION.sub("", cell.source).replace("<!-- time -->", "")
        elif has_figure(cell) and not describe(cell):
            where = f"{path.parent.name}/{path.name}, cell {number}"
            raise BadInput(
                f"{where}: the figure has no text. Draw it with utils.plots, or put its "
                'words into the metadata of the cell: {"mystnb": {"image": {"alt": ...}}}.'
            )
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = readable(output.data["text/html"])
    # `!` and `%` are IPython's, and no Python
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    fold = exercises.with_folds if path.stem == "solutions" else exercises.with_hints
    notebook.cells = fold(notebook.cells)
    return notebook


def has_figure(cell) -> bool:
    """Return whether a cell shows a picture."""
    shown = (output.get("data", {}) for output in cell.get("outputs", []))
    return any(kind in data for data in shown for kind in PICTURES)


def describe(cell) -> str:
    """Put a text for its figure into a cell's metadata, unless it is there; return it."""
    image = cell.metadata.setdefault("mystnb", {}).setdefault("image", {})
    image.setdefault("alt", figures.alt_text(cell.source))
    return image["alt"]


def readable(table: str) -> str:
    """Return a table of pandas without its style, and without headers that are empty."""
    table = re.sub(r"<style scoped>.*?</style>\s*", "", table, flags=re.DOTALL)
    table = re.sub(r"<th></th>", "<td></td>", table)
    return table.replace(' border="1"', "")
