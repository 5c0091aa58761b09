"""Hints and solutions, folded: whoever wants one opens it."""

import ast
import html
import re
from functools import cache

import nbformat
from nbformat.v4 import new_markdown_cell

from tests.tools.book import ROOT

CHECK = re.compile(r'^check\(\s*"([^"]+)"', re.MULTILINE)
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


def fold(kind: str, summary: str, body: str, name: str = "") -> str:
    """Return Markdown that is folded away below a summary."""
    label = f' id="{name}"' if name else ""
    summary = html.escape(summary)
    opened = f'<details class="{kind}"{label}><summary>{summary}</summary>'
    return f"{opened}\n\n{body}\n\n</details>"


def with_hints(cells: list) -> list:
    """Return the cells of a lesson, with folded hints below each exercise."""
    found = []
    for cell in cells:
        found.append(cell)
        for name in CHECK.findall(cell.source) if cell.cell_type == "code" else ():
            steps = [html.escape(hint, quote=False) for hint in hints()[name]]
            body = "\n".join(
                f"{number}. {step}" for number, step in enumerate(steps, 1)
            )
            body = body if len(steps) > 1 else steps[0]
            body += (
                f'\n\n<p><a href="solutions.html#{anchor(name)}">Its solution</a></p>'
            )
            found.append(new_markdown_cell(fold("hints", f"Hints: {name}", body)))
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
            found.append(new_markdown_cell(head[0]))
            cell = nbformat.from_dict(cell | {"source": cell.source[head.end() :]})
        group.append(cell)
        names = CHECK.findall(cell.source) if cell.cell_type == "code" else []
        if names and inside:
            opened, closed = fold("solution", names[0], "|", anchor(names[0])).split(
                "|"
            )
            found += [new_markdown_cell(opened), *group, new_markdown_cell(closed)]
            group = []
    return [cell for cell in found + group if cell.source.strip()]
