"""The book is whole, is read without a network, and is not built with a dead link.

`make book` needs an environment of its own, so all of this runs weekly.
"""

import html
import json
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests import browser
from tests.tools import notebooks
from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S

LESSONS = [*notebooks.all_notebooks(), *notebooks.electives()]


@pytest.fixture(scope="module")
def book() -> Path:
    """Return the folder of the book, written by the command that makes it."""
    done = subprocess.run(
        ["make", "book"], cwd=ROOT, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "book"


@pytest.mark.weekly
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_a_page_with_its_outputs_figures_and_diagrams(book, path):
    page = (book / path.relative_to(ROOT)).with_suffix(".html").read_text()
    recorded = nbformat.read(path, as_version=4)
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    for proof in notebooks.proofs(recorded):
        assert f"{notebooks.PROOF}{proof}" in shown
    text = path.read_text()
    assert page.count('<pre class="mermaid">') == text.count("```mermaid")
    figures = re.findall(r'<img alt="[^"]+" src="\.\./', page)
    assert len(figures) >= text.count('"image/png"')
    assert "navigation" not in shown  # the book has its own


@pytest.mark.weekly
def test_the_build_names_dead_links_and_figures_without_a_text(book, tmp_path):
    """`book` comes first, as it makes the environment."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Start\n")
    links = "[b](../README.md#gone) [c](lost.md) ![d](lost.png)"
    (tmp_path / "docs" / "a.md").write_text(f"# A\n\n{links}\n")
    shown = nbformat.v4.new_output("display_data", {"image/png": ""})
    cell = nbformat.v4.new_code_cell("plt.plot(x)", outputs=[shown])
    (tmp_path / "0").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "0" / "b.ipynb")
    python = ROOT / ".venv-book" / "bin" / "python"
    command = [python, "-m", "sphinx", "--quiet", "-W", "--keep-going"]
    command += ["-c", ROOT / "docs", tmp_path, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode
    for warning in (
        "local id not found in doc 'README': 'gone'",
        "cross-reference target not found: 'lost.md'",
        "image file not readable: docs/lost.png",
        "b.ipynb: WARNING: document isn't included in any toctree",
        "b.ipynb: WARNING: cell 0: the figure has no text",
    ):
        assert warning in done.stderr


# A page of each kind: what Markdown, figures, diagrams, tables and folded code become.
KINDS = ["README", "docs/teaching", "docs/glossary", "01-ddp-pytorch-only/solutions"]
KINDS += ["01-ddp-pytorch-only/01_data_parallelism_by_hand", "search"]
KINDS += ["docs/teaching/handout", "docs/four_ways"]
KINDS += [
    "03-fsdp-deepspeed/06_choosing_a_strategy",
    "02-ddp-pytorch-ray/cluster/README",
]


@pytest.mark.weekly
def test_no_page_breaks_a_rule_of_axe_or_asks_a_network(book):
    pages = [book / f"{kind}.html" for kind in KINDS]
    script = Path(browser.__file__).with_name("book.py")
    pictures = ROOT / "build" / "screenshots" / "book"
    done = subprocess.run(
        [browser.python(), script, pictures, *pages],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    views = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(views) == 2 * len(pages)  # on a wide page and on a phone
    for view in views:
        where = [view["page"], view["theme"]]
        assert view["axe"] == view["network"] == view["errors"] == [], where
        assert view["sideways"] == view["unfolded"] == 0, where
        assert all(view["pictures"]), where
    assert len({view["background"] for view in views}) == 2  # light and dark
    assert sum(view["diagrams"] for view in views) > 0
