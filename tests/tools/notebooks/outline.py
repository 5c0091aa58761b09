"""A lesson's main line and its side trips, with their minutes: in cells and in READMEs."""

import itertools
import math
import re
from pathlib import Path

import nbformat

from tests.tools.notebooks import ROOT, all_notebooks, electives, title

WORDS_PER_MINUTE, LINES_PER_MINUTE = 200, 10
# Above this heading is a lesson's main line, below it are its side trips.
SIDE_TRIPS = re.compile(r"^## Going deeper", re.MULTILINE)
TRIP = re.compile(r"^### (.+)$", re.MULTILINE)
END = re.compile(r"^## ", re.MULTILINE)
TIME = re.compile(r"^.*<!-- time -->.*\n?", re.MULTILINE)


def lines(cell) -> int:
    """Count the lines of a cell that are not empty."""
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def lines_shown(cell) -> int:
    """Count the lines of code that a cell shows of a script, by `utils.show`."""
    shown = (output.get("data", {}) for output in cell.get("outputs", []))
    blocks = [data.get("text/markdown", "") for data in shown]
    return sum(
        bool(line.strip())
        for block in blocks
        if block.startswith("```")
        for line in block.splitlines()[1:-1]
    )


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


def minutes_to_read(cells: list) -> int:
    """Return the minutes for words and lines of code, also of scripts that it shows."""
    texts = [TIME.sub("", c.source) for c in cells if c.cell_type == "markdown"]
    words = sum(len(text.split()) for text in texts)
    code = [cell for cell in cells if cell.cell_type == "code"]
    code_lines = sum(lines(cell) + lines_shown(cell) for cell in code)
    return round(words / WORDS_PER_MINUTE + code_lines / LINES_PER_MINUTE)


def anchor(heading: str) -> str:
    """Return what stands behind `#` in a link to a heading, as GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def minutes_to_run(notebook) -> int:
    """Return the minutes to run that a notebook's line of times says; 0 without one."""
    said = re.search(r"(\d+) minutes? to run.*<!-- time -->", notebook.cells[0].source)
    return int(said[1]) if said else 0


def minutes(number: int) -> str:
    """Return "1 minute" or "2 minutes"."""
    return f"{number} minute{'s' * (number != 1)}"


def trips_with_minutes(cells: list, file: str = "") -> str:
    """Return links to the side trips, each with its minutes to read."""
    return ", ".join(
        f"[{heading}]({file}#{anchor(heading)}) {max(1, minutes_to_read(trip))}"
        for heading, trip in side_trips(cells).items()
    )


def time_line(notebook, to_run: int) -> str:
    """Return a notebook's line of times."""
    cells = [c for c in notebook.cells if not TIME.search(c.source)]
    first = nbformat.from_dict(notebook.cells[0])
    first.source = TIME.sub("", first.source)
    cells = [first, *notebook.cells[1:]]
    read = minutes_to_read(main_line(cells))
    said = f"**Time:** {minutes(to_run)} to run on two CPU cores; "
    said += f"the main line takes {minutes(read)} to read."
    if trips := trips_with_minutes(cells):
        said += f" Going deeper, in minutes: {trips}."
    return f"{said} <!-- time -->"


def with_times(notebook, seconds: float | None = None) -> None:
    """Write the line of times into the first cell anew, at its place or at the end.

    Args:
        notebook: is changed.
        seconds: that its run took; None keeps the minutes that are there.
    """
    if not side_trips(notebook.cells) and not TIME.search(notebook.cells[0].source):
        return  # of solutions
    to_run = math.ceil(seconds / 60) if seconds else minutes_to_run(notebook) or 1
    line, first = time_line(notebook, to_run), notebook.cells[0]
    if TIME.search(first.source):
        first.source = TIME.sub(lambda _: f"{line}\n", first.source).rstrip("\n")
    else:
        first.source = f"{first.source.rstrip()}\n\n{line}"


def row(path: Path, readme: Path) -> str:
    """Return a lesson's row in the table of a README, of its part or of all."""
    notebook = nbformat.read(path, as_version=4)
    cells, file = notebook.cells, path.relative_to(readme.parent).as_posix()
    run, read = minutes_to_run(notebook), minutes_to_read(main_line(cells))
    if readme.parent == ROOT:
        more = sum(max(1, minutes_to_read(t)) for t in side_trips(cells).values())
        name = f"{path.parent.name[:2]}/{path.stem[:2]}"
        return f"| {name} | [{title(path)}]({file}) | {run} | {read} | {more} |"
    trips = trips_with_minutes(cells, file)
    return f"| [{path.stem}]({file}) | {title(path)} | {run} | {read} | {trips} |"


def rows_of(readme: Path) -> dict[Path, str]:
    """Return the rows that a README has, by the lesson that they are about."""
    here = readme.parent
    lessons = [p for p in all_notebooks() if here in p.parents]
    lessons += [p for p in electives() if here == p.parent]
    found = {}
    for path in lessons:
        if path.stem != "solutions":
            file = path.relative_to(here)
            link = re.escape(f"]({file.as_posix()})")
            pattern = rf"^\|(?: \d\d/\d\d \|)? \[[^\]]+{link} \|.*\|$"
            lines_ = re.findall(pattern, readme.read_text(), re.MULTILINE)
            found[path] = lines_[0] if len(lines_) == 1 else ""
    return found


def readmes() -> list[Path]:
    """Return the READMEs with a table of lessons."""
    parts = sorted(ROOT.glob("0[123]-*/README.md"))
    return [ROOT / "README.md", *parts, *sorted(ROOT.glob("0*/electives/README.md"))]


def write_rows() -> None:
    """Write the rows of lessons in all READMEs anew."""
    for readme in readmes():
        text = readme.read_text()
        for path, there in rows_of(readme).items():
            if there:
                text = text.replace(there, row(path, readme))
        readme.write_text(text)
