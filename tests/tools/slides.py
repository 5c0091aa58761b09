"""Write slides of the lessons' main lines to build/slides, to project without a network.

A lesson is one page of HTML that needs nothing else. Its slides are the question, and then,
in the order of the notebook, each "Predict first", each figure and each proof, as recorded.
The arrow keys turn the pages.
"""

import ast
import re
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.tools import notebooks
from tests.tools.notebooks.outline import main_line

# What a link leads to is not beside the slides.
LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
STYLE = """
html { scroll-snap-type: y mandatory; font: 1.6rem/1.4 sans-serif; }
body { margin: 0; }
section { box-sizing: border-box; min-height: 100vh; padding: 4vh 8vw;
  display: flex; flex-direction: column; justify-content: center;
  break-after: page; scroll-snap-align: start; }
h2 { color: #555; font-size: 1.6rem; }
img { display: block; height: 70vh; max-width: 100%; object-fit: contain; }
pre { font-size: 1.1rem; white-space: pre-wrap; }
"""
TURN = """
addEventListener("keydown", (event) => {
  const step = ["ArrowRight", "ArrowDown", "PageDown", " "].includes(event.key)
    - ["ArrowLeft", "ArrowUp", "PageUp"].includes(event.key);
  if (!step) return;
  event.preventDefault();
  const slides = [...document.querySelectorAll("section")];
  const seen = (slide) => slide.getBoundingClientRect().bottom > innerHeight / 2;
  slides[slides.findIndex(seen) + step]?.scrollIntoView();
});
"""


def asserted(source: str) -> str:
    """Return the asserts of a cell, as they are written; none if it is not all Python."""
    try:
        found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assert)]
    except SyntaxError:  # a line for the shell
        return ""
    return "\n".join(ast.get_source_segment(source, each) or "" for each in found)


def slides(path: Path) -> list[list[NotebookNode]]:
    """Return the slides of a lesson's main line, each as the cells to show."""
    first, *cells = main_line(nbformat.read(path, as_version=4).cells)
    opening = LINK.sub(r"\1", first.source)
    opening = opening[opening.index("# ") : opening.find("\n**Needs:**")]
    made, heading = [[new_markdown_cell(opening)]], ""
    for cell in cells:
        if cell.cell_type == "markdown":
            for part in LINK.sub(r"\1", cell.source).split("\n\n"):
                if title := re.match(r"##+ (.+)", part):
                    heading = f"## {title[1]}"
                elif "**Predict first" in part:
                    made.append([new_markdown_cell(f"{heading}\n\n{part}")])
            continue
        for figure in cell.outputs:
            if "image/png" in figure.get("data", {}):
                figure.metadata = {"image/png": {"alt": heading.lstrip("# ")}}
                shown = new_code_cell(outputs=[figure])
                made.append([new_markdown_cell(heading), shown])
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if notebooks.PROOF in printed:
            code = asserted(cell.source)
            text = f"{heading}\n\n```python\n{code}\n```" if code else heading
            proof = printed[printed.index(notebooks.PROOF) :]
            shown = new_code_cell(outputs=[new_output("stream", text=proof)])
            made.append([new_markdown_cell(text), shown])
    return made


def page(path: Path) -> str:
    """Return the slides of a lesson as one page of HTML."""
    options = {"exclude_input": True, "exclude_anchor_links": True}
    write = HTMLExporter(template_name="basic", **options)
    bodies = (write.from_notebook_node(new_notebook(cells=s))[0] for s in slides(path))
    sections = "".join(f"<section>\n{body}</section>\n" for body in bodies)
    head = f'<meta charset="utf-8"><title>{notebooks.title(path)}</title>'
    head += f"<style>{STYLE}</style>"
    body = f"<body>\n{sections}<script>{TURN}</script></body>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n{body}</html>\n'


if __name__ == "__main__":
    folder = notebooks.ROOT / "build" / "slides"
    folder.mkdir(parents=True, exist_ok=True)
    for path in notebooks.all_notebooks():
        if path.stem != "solutions":
            name = f"{path.parent.name[:2]}-{path.stem[:2]}.html"
            (folder / name).write_text(page(path))
    print("The slides are in build/slides, one page for each lesson.")
