"""The instructor's guide: its minutes are those of the notebooks, as in the READMEs."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

from tests.tools.notebooks import ROOT, all_notebooks, outline

GUIDE = ROOT / "docs" / "teaching.md"
HEADING = re.compile(r"^#{1,4} (.+)$", re.MULTILINE)
# The line below the heading of a lesson, and a row about one of its sections.
TIMES = re.compile(
    r"^(\[Notebook\]\(\.\./(?P<file>[^)#]+)\)\. Machine: )\d+( min\. Reading: )\d+( min\.)",
    re.MULTILINE,
)
ROW = re.compile(
    r"^(\| \[(?P<heading>.+?)\]\(\.\./(?P<file>[^)#]+)#[^)]+\) \| )\d+( \|)",
    re.MULTILINE,
)


def sections(cells: list) -> Iterator[tuple[str, list]]:
    """Yield the headings of second level, each with what stands below it, as cells.

    A cell of text may hold the end of one section and the beginning of the next.
    """
    heading, below = "", []
    for cell in cells:
        pieces = [cell.source]
        if cell.cell_type == "markdown":
            pieces = re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)
        for piece in pieces:
            if cell.cell_type == "markdown" and piece.startswith("## "):
                if heading:
                    yield heading, below
                heading, below = piece.partition("\n")[0].removeprefix("## "), []
            below.append(nbformat.from_dict({**cell, "source": piece}))
    if heading:
        yield heading, below


def with_minutes(text: str) -> str:
    """Return the guide with the minutes of today's notebooks."""

    def lesson(match: re.Match) -> str:
        notebook = nbformat.read(ROOT / match["file"], as_version=4)
        run = outline.minutes_to_run(notebook)
        read = outline.minutes_to_read(outline.main_line(notebook.cells))
        return f"{match[1]}{run}{match[3]}{read}{match[4]}"

    def row(match: re.Match) -> str:
        notebook = nbformat.read(ROOT / match["file"], as_version=4)
        found = dict(sections(notebook.cells))
        if match["heading"] not in found:
            return match[0]  # a test says that it is gone
        minutes = max(1, outline.minutes_to_read(found[match["heading"]]))
        return f"{match[1]}{minutes}{match[4]}"

    return ROW.sub(row, TIMES.sub(lesson, text))


def write() -> None:
    """Write the minutes of the guide anew."""
    GUIDE.write_text(with_minutes(GUIDE.read_text()))


def by_number() -> dict[str, Path]:
    """Return the lessons of the route by their numbers, such as 02/01."""
    return {f"{p.parent.name[:2]}/{p.stem[:2]}": p for p in all_notebooks()}
