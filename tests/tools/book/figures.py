"""What a figure shows, in words, for those who do not see it.

A figure is drawn by one call of `utils.plots`; its title and axes say what it shows. The
words go to the cell's metadata `mystnb.image.alt`, the one place that myst-nb reads.
Words that a notebook has there itself count.
"""

import ast
from functools import cache

from tests.tools.book import ROOT

KINDS = {
    "bars": "Bar chart",
    "curves": "Line chart",
    "fits": "Measured points and fitted lines",
    "images": "Pictures in a grid, each with its label",
    "ranges": "Bars from a low to a high end, with a dot each",
    "stacked_bars": "Bar chart with stacked parts",
    "timeline": "Timeline",
}


@cache
def parameters() -> dict[str, list[str]]:
    """Return the parameters of each function of utils.plots, without importing it."""
    tree = ast.parse((ROOT / "utils" / "plots.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {each.name: [a.arg for a in each.args.args] for each in functions}


def words(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """Return the text of an argument; a value that it inserts is named, not computed."""
    if isinstance(node, ast.Name) and node.id in known:
        return words(known[node.id], known)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "N" if ast.unparse(node.value) == "num_workers" else "..."
    return ""


def alt_text(source: str) -> str:
    """Return what the figure of a cell shows; "" where no call of utils.plots draws it."""
    tree = ast.parse(source)
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        kind = call.func.attr
        if ast.unparse(call.func.value) != "plots" or kind not in KINDS:
            continue
        given = dict(zip(parameters()[kind], call.args))
        given |= {each.arg: each.value for each in call.keywords if each.arg}
        said = {name: words(node, known) for name, node in given.items()}
        alt = (
            f"{KINDS[kind]}: {said['title']}." if "title" in said else f"{KINDS[kind]}."
        )
        axes = {"Horizontal": said.get("xlabel"), "Vertical": said.get("ylabel")}
        return alt + "".join(
            f" {a} axis: {label}." for a, label in axes.items() if label
        )
    return ""
