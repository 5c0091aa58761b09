"""The main line and the side trips of a lesson, and how long they are."""

import itertools
import re
from pathlib import Path

import nbformat

WORDS_PER_MINUTE, LINES_PER_MINUTE = 200, 10
# Above this heading is a lesson's main line, below it are its side trips.
SIDE_TRIPS = re.compile(r"^## Going deeper", re.MULTILINE)
TRIP = re.compile(r"^### (.+)$", re.MULTILINE)
END = re.compile(r"^## ", re.MULTILINE)


def begins(pattern: re.Pattern, cell) -> re.Match | None:
    """Return the match of a heading in a cell of text."""
    return pattern.search(cell.source) if cell.cell_type == "markdown" else None


def main_line(cells: list) -> list:
    """Return the cells before the heading "Going deeper"; all where there is none."""
    return list(itertools.takewhile(lambda c: not begins(SIDE_TRIPS, c), cells))


def going_deeper(cells: list) -> list:
    """Return the cells between the heading "Going deeper" and the next one like it."""
    below = cells[len(main_line(cells)) + 1 :]
    return list(itertools.takewhile(lambda c: not begins(END, c), below))


def side_trips(cells: list) -> dict[str, list]:
    """Return the cells of each side trip, by its heading."""
    found: dict[str, list] = {}
    for cell in going_deeper(cells):
        if heading := begins(TRIP, cell):
            found[heading[1]] = []
        found[next(reversed(found))].append(cell)
    return found


def anchor(heading: str) -> str:
    """Return what stands behind `#` in a link to a heading, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def lines(cell) -> int:
    """Count the lines of a cell that are not empty."""
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def minutes_to_read(cells: list) -> int:
    """Return the minutes for the words and the lines of code of some cells."""
    words = sum(len(c.source.split()) for c in cells if c.cell_type == "markdown")
    code = sum(lines(cell) for cell in cells if cell.cell_type == "code")
    return round(words / WORDS_PER_MINUTE + code / LINES_PER_MINUTE)


def report(paths: list[Path]) -> str:
    """Return a table of the notebooks' sizes: to look at, as no test limits them."""
    head = ["", "main line", "longest code", "minutes to read,", "minutes to read,"]
    rows = [head, ["cells", "cells", "cell, lines", "main line", "side trips"]]
    for path in paths:
        cells = nbformat.read(path, as_version=4).cells
        main, trips = main_line(cells), going_deeper(cells)
        longest = max((lines(c) for c in cells if c.cell_type == "code"), default=0)
        counts = [len(cells), len(main), longest]
        counts += [minutes_to_read(main), minutes_to_read(trips)]
        rows.append(list(map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    names = ["", "notebook", *(f"{p.parent.name[:2]}/{p.stem}" for p in paths)]
    first = max(map(len, names))
    return "\n".join(
        "  ".join([name.ljust(first), *(n.rjust(w) for n, w in zip(row, widths))])
        for name, row in zip(names, rows)
    )
