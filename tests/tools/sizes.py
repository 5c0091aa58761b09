"""Print what no test limits: sizes of notebooks and scripts, and what is only covered.

    python -m tests.tools.sizes

To look at, not to write up to: a number that stands out is a question, not a fault.
"""

import ast
import itertools
import statistics
from pathlib import Path

import nbformat

from tests import readme, scripts
from tests.tools import notebooks
from tests.tools.notebooks.outline import lines, main_line, minutes_to_read

COUNTS = ["cells", "main line", "median", "longest", "in a row", "pictures"]
COUNTS += ["diagrams", "not compared", "to read", "main line"]
CAPTION = """\
Cells: all, and the main line. Lines of a code cell: median, longest. Most code cells in a
row. Not compared: cells. Minutes to read: of all and of the main line."""


def notebook_row(path: Path) -> list:
    """Return the counts of a notebook, in the order of COUNTS."""
    cells = nbformat.read(path, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code" and c.source.strip()]
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    lengths = [lines(cell) for cell in code]
    runs = itertools.groupby(cells, key=lambda cell: cell.cell_type)
    outputs = [output for cell in code for output in cell.outputs]
    tags = [cell.metadata.get("tags", []) for cell in code]
    return [
        len(cells),
        len(main_line(cells)),
        f"{statistics.median(lengths):g}",
        max(lengths),
        max(len([*run]) for kind, run in runs if kind == "code"),
        sum("image/png" in output.get("data", {}) for output in outputs),
        sum("```mermaid" in source for source in text),
        sum("nbval-ignore-output" in each for each in tags),
        minutes_to_read(cells),
        minutes_to_read(main_line(cells)),
    ]


def script_row(path: Path) -> list:
    """Return a script's lines, those of its longest function, and that one's name."""
    text = path.read_text()
    functions = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    longest, name = max(((f.end_lineno or 0) - f.lineno + 1, f.name) for f in functions)
    return [len(text.splitlines()), longest, name]


def table(head: list[str], rows: list[list]) -> str:
    """Return rows as aligned text; the first column is a name, None is "-"."""
    shown = [["-" if each is None else str(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *shown)]

    def line(row: list[str]) -> str:
        others = (each.rjust(width) for each, width in zip(row[1:], widths[1:]))
        return "  ".join([row[0].ljust(widths[0]), *others])

    return "\n".join(map(line, [head, *shown]))


def notebook_table(paths: list[Path]) -> str:
    """Return a line per notebook: cells, lines of code cells, minutes to read."""
    rows = [[f"{p.parent.name[:2]}/{p.stem}", *notebook_row(p)] for p in paths]
    return f"{table(['notebook', *COUNTS], rows)}\n{CAPTION}"


def main() -> None:
    """Print the three tables."""
    print(notebook_table(notebooks.all_notebooks()))
    paths = sorted(scripts.ROOT.glob("0*/train_*.py"))
    print()
    head = ["script", "lines", "longest function", ""]
    print(table(head, [[path.name, *script_row(path)] for path in paths]))
    print("\nREADME commands that tests cover, but none types as they stand:")
    for command, tests in readme.only_covered().items():
        print(f"{command}\n    {', '.join(tests)}")


if __name__ == "__main__":
    main()
