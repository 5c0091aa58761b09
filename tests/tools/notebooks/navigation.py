"""The line that links each notebook to its neighbours, at its top and at its end."""

import re
from pathlib import Path

import nbformat

from tests.tools.notebooks import all_notebooks, electives, title

NAVIGATION = re.compile(r"^.*<!-- navigation -->.*\n*", re.MULTILINE)


def navigation(path: Path) -> str:
    """Return the line that links a notebook to its neighbours."""
    notebooks = electives() if path in electives() else all_notebooks()
    here = notebooks.index(path)
    # Of an elective these are the electives' own.
    readme = "README.md" if path in electives() else "../README.md"
    links = [f"[Contents]({readme})"]
    if here > 0:
        before = notebooks[here - 1]
        links.insert(0, f"[← {title(before)}]({_link(before)})")
    if here + 1 < len(notebooks):
        after = notebooks[here + 1]
        links.append(f"[{title(after)} →]({_link(after)})")
    # Not in front: Markdown takes a line that begins with a comment as HTML, links and all.
    return " | ".join(links) + " <!-- navigation -->"


def with_navigation(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Put the navigation line on top of the first cell and at the end of the last."""
    line = navigation(path)
    if notebook.cells[-1].cell_type != "markdown":
        notebook.cells.append(nbformat.v4.new_markdown_cell(id="navigation"))
    first, last = notebook.cells[0], notebook.cells[-1]
    first.source = line + "\n\n" + NAVIGATION.sub("", first.source).strip()
    last.source = (NAVIGATION.sub("", last.source).strip() + "\n\n" + line).strip()


def link(paths: list[Path]) -> None:
    """Write the links anew, without executing the notebooks."""
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        with_navigation(path, notebook)
        nbformat.write(notebook, path)


def _link(path: Path) -> str:
    return f"../{path.parent.name}/{path.name}"
