"""Hints and solutions, folded: whoever wants one opens it."""

import ast
import html
import re
from functools import cache

import nbformat
from nbformat.v4 import new_markdown_cell

from tests.tools.book import ROOT
from tests.tools.notebooks.progress import CHECK

CODE = re.compile(r"`([^`]+)`")
HEADING = re.compile(r"\A(?:#+ [^\n]+\n*|From \[[^\]]+\]\([^)]+\)\.\s+)+")


@cache
def hints() -> dict[str, tuple[str, ...]]:
    """Return the hints of each exercise, read from utils/checks without importing it."""
    found = {}
    for path in sorted((ROOT / "utils" / "checks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values):
                if (
                    key
                    and isinstance(value, ast.Call)
                    and "Exercise" in ast.unparse(value.func)
                ):
                    named = {each.arg: each.value for each in value.keywords}
                    hint = named["hint"] if "hint" in named else value.args[1]
                    text = ast.literal_eval(hint)
                    name = ast.literal_eval(key)
                    found[name] = (text,) if isinstance(text, str) else text
    return found


def anchor(name: str) -> str:
    """Return what stands behind `#` in a link to the solution of an exercise."""
    return "solution-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def opening(kind: str, summary: str, name: str = "") -> str:
    """Return the HTML that folds away what follows, up to `</details>`."""
    label = f' id="{name}"' if name else ""
    summary = html.escape(summary)
    return f'<details class="{kind}"{label}><summary>{summary}</summary>'


def folded_hints(name: str) -> str:
    """Return the hints of an exercise, one below the other, and a link to its solution.

    As HTML: a hint is plain text, in which `*` and `__init__` stand for themselves.
    """
    steps = [html.escape(hint, quote=False) for hint in hints()[name]]
    steps = [CODE.sub(r"<code>\1</code>", step) for step in steps]
    listed = "".join(f"<li>{step}</li>" for step in steps)
    solution = f'<p><a href="solutions.html#{anchor(name)}">The solution</a></p>'
    start = opening("hints", f"Hints: {name}")
    return f"{start}<ol>{listed}</ol>{solution}</details>"


def with_hints(cells: list) -> list:
    """Return the cells of a lesson, with folded hints below each exercise."""
    found = []
    for cell in cells:
        found.append(cell)
        for name in CHECK.findall(cell.source) if cell.cell_type == "code" else ():
            found.append(new_markdown_cell(folded_hints(name)))
    return found


def with_folds(cells: list) -> list:
    """Return the cells of a page of solutions, each solution folded.

    A solution is what stands between two calls of `check`, the second one included, but
    for a heading.
    """
    found, group, inside = [], [], False
    for cell in cells:
        if cell.cell_type == "markdown" and (head := HEADING.match(cell.source)):
            found += group
            group, inside = [], cell.source.startswith("## ")
            found.append(new_markdown_cell(head[0].strip()))
            cell = nbformat.from_dict(cell | {"source": cell.source[head.end() :]})
        group.append(cell)
        names = CHECK.findall(cell.source) if cell.cell_type == "code" else []
        if names and inside:
            start = opening("solution", names[0], anchor(names[0]))
            found += [new_markdown_cell(start), *group, new_markdown_cell("</details>")]
            group = []
    return [cell for cell in found + group if cell.source.strip()]
