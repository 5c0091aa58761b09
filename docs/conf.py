"""Configure Sphinx for the book: `make book` collects its pages, then calls Sphinx."""

import html
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

project = "Distributed PyTorch, from torchrun to ZeRO"
html_title = project
html_last_updated_fmt = None
language = "en"
root_doc = "index"
extensions = ["myst_nb"]
nitpicky = True

# Outputs are those of `make record`: a book is printed, and executes nothing.
nb_execution_mode = "off"
nb_render_markdown_format = "gfm"  # outputs have tables, too
nb_merge_streams = True
myst_enable_extensions = ["html_image"]  # no TeX: what draws it comes from elsewhere
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
html_static_path = ["../build/book-pages/_static"]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False


class Diagrams(SphinxTransform):
    """Turn blocks of Mermaid into what mermaid.min.js draws, here and without a network."""

    default_priority = 200  # before Pygments would look for a language of this name

    def apply(self, **kwargs) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                text = html.escape(block.astext())
                drawn = f'<div class="diagram"><pre class="mermaid">{text}</pre></div>'
                block.replace_self(nodes.raw("", drawn, format="html"))
                self.env.metadata[self.env.docname]["diagrams"] = "yes"


def finish(app: Sphinx, pagename: str, template, context, doctree) -> None:
    """Load what draws diagrams where there is one, and make empty headers plain cells.

    Mermaid is 5 MB. A header without text is read aloud as a header of nothing.
    """
    if "diagrams" in app.env.metadata.get(pagename, {}):
        app.add_js_file("mermaid/mermaid.min.js", priority=400)
    if "body" in context:
        empty = r'<th class="head">\s*(<p></p>)?\s*</th>'
        context["body"] = re.sub(empty, "<td></td>", context["body"])


def setup(app: Sphinx) -> None:
    app.add_transform(Diagrams)
    app.connect("html-page-context", finish)
