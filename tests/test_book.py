"""The book: no page or text is missing, all folds, and it is read without a network.

What needs no build is quick. `make book` itself runs weekly, and so does what is looked at
in headless Chromium: light and dark, as wide as a screen and as narrow as a phone.
"""

import html
import inspect
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from packaging.requirements import Requirement

from tests import browser, site
from tests.patience import PATIENCE
from tests.readme import typed
from tests.tools import notebooks
from tests.tools.book import ROOT, SITE, exercises, figures, lessons, pages
from tests.tools.book.__main__ import collect, fetched, sphinx
from utils import plots
from utils.checks import EXERCISES
from utils.errors import BadInput

DOCS = ROOT / "docs"
AXE = ("axe-core", "4.14.1")
AXE_SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASy"
    "FNNtuFooJpZe37OgudVGtQ=="
)
GLOSSARY = re.compile(
    r"^## (?P<term>.+)\n\n(?P<said>.+) \[\d\d/\d\d\]\((?P<lesson>[^)]+)\)$",
    re.MULTILINE,
)
LESSONS = [*notebooks.all_notebooks(), *notebooks.electives()]


def names(found):
    return [path.relative_to(ROOT).as_posix() for path in found]


def figure(source, **metadata):
    """Return a cell that shows a picture."""
    shown = new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})
    return new_code_cell(source, outputs=[shown], metadata=metadata)


def test_every_lesson_and_text_is_in_the_contents_once():
    listed = [page for _, found in pages.contents() for page in found]
    assert len(listed) == len(set(listed))
    there = {p for p in ROOT.glob("*.md")} | {*ROOT.glob("docs/**/*.md")}
    for folder in ("0*", "utils", "tests"):
        for suffix in ("md", "ipynb"):
            there |= {*ROOT.glob(f"{folder}/**/*.{suffix}")}
    there = {page for page in there if ".ipynb_checkpoints" not in page.parts}
    assert names(sorted(there - {ROOT / "README.md"})) == names(sorted(listed))


def test_lessons_follow_each_other_as_their_own_links_do():
    listed = [page for _, found in pages.contents() for page in found]
    for route in (notebooks.all_notebooks(), notebooks.electives()):
        assert [page for page in listed if page in route] == route


@pytest.mark.parametrize("path", LESSONS, ids=names(LESSONS))
def test_every_figure_has_a_text(path):
    page = lessons.page(path)
    shown = [cell for cell in page.cells if lessons.has_figure(cell)]
    for cell in shown:
        assert cell.metadata["mystnb"]["image"]["alt"].strip()
    recorded = nbformat.read(path, as_version=4).cells
    assert len(shown) == sum(map(lessons.has_figure, recorded))


def test_a_figure_is_named_by_its_title_and_axes():
    alt = figures.alt_text('plots.bars(peaks, "Peak per rank", "MB", log)')
    assert alt == "Bar chart: Peak per rank. Horizontal axis: MB."
    source = 'title = f"A GPT, {num_workers} workers"\nplots.curves(rows, title)'
    assert figures.alt_text(source) == "Line chart: A GPT, N workers."
    source = 'plots.curves(rows, title="Loss", ylabel="loss", xlabel="step")'
    both = "Line chart: Loss. Horizontal axis: step. Vertical axis: loss."
    assert figures.alt_text(source) == both


def test_every_function_that_draws_has_a_name():
    drawn = {
        name: [*inspect.signature(function).parameters]
        for name, function in inspect.getmembers(plots, inspect.isfunction)
        if "plt.show()" in inspect.getsource(function)
    }
    assert drawn.keys() == figures.KINDS.keys()
    assert {name: figures.parameters()[name] for name in drawn} == drawn


def test_a_figure_without_a_text_is_refused_and_ones_own_text_counts(tmp_path):
    path = tmp_path / "lesson.ipynb"
    nbformat.write(new_notebook(cells=[figure("plt.plot(x)")]), path)
    with pytest.raises(
        BadInput, match=r"lesson\.ipynb, cell 0: the figure has no text"
    ):
        lessons.page(path)
    own = figure('plots.bars(x, "a", "b")', mystnb={"image": {"alt": "Two bars."}})
    nbformat.write(new_notebook(cells=[own]), path)
    assert lessons.page(path).cells[0].metadata["mystnb"]["image"]["alt"] == "Two bars."


def test_hints_are_those_that_check_gives():
    given = {
        name: (each.hint,) if isinstance(each.hint, str) else tuple(each.hint)
        for name, each in EXERCISES.items()
    }
    assert exercises.hints() == given


@pytest.mark.parametrize("path", LESSONS, ids=names(LESSONS))
def test_hints_and_solutions_are_folded(path):
    """Each exercise of a lesson has its hints below, and leads to a solution."""
    cells = lessons.page(path).cells
    checked = [n for c in cells if c.cell_type == "code" for n in checks(c)]
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    assert text.count("<details") == text.count("</details>")
    kind = "solution" if path.stem == "solutions" else "hints"
    assert text.count(f'<details class="{kind}"') == len(checked)
    if path.stem == "solutions":
        folded = re.findall(r'<details class="solution" id="([^"]+)">', text)
        assert folded == [exercises.anchor(name) for name in checked]
        inside = 0
        for cell in cells:  # none stands outside
            inside += cell.source.count("<details") - cell.source.count("</details>")
            assert inside == 1 or not (cell.cell_type == "code" and checks(cell))
    else:
        solutions = lessons.page(path.parent / "solutions.ipynb").cells
        solved = {n for c in solutions if c.cell_type == "code" for n in checks(c)}
        assert solved >= set(checked)
        for name in checked:
            assert f'href="solutions.html#{exercises.anchor(name)}"' in text


def test_a_hint_is_plain_text_but_for_its_code(monkeypatch):
    told = {"a b": ("`x < y` in __init__", "2 * 3 * 4")}
    monkeypatch.setattr(exercises, "hints", lambda: told)
    listed = "<ol><li><code>x &lt; y</code> in __init__</li><li>2 * 3 * 4</li></ol>"
    assert listed in exercises.folded_hints("a b")


def checks(cell):
    return exercises.CHECK.findall(cell.source)


def test_headings_of_solutions_are_not_folded():
    cells = [
        new_markdown_cell("# Solutions"),
        new_code_cell("from utils.checks import check"),
        new_markdown_cell("## Ray\n\nFrom [01](01.ipynb). **1.** Because."),
        new_code_cell('check("a", 1)'),
        new_markdown_cell("**2.** First this,"),
        new_code_cell("x = 1"),
        new_markdown_cell("then that:"),
        new_code_cell('check("b c", x)'),
        new_markdown_cell("The end."),
    ]
    folded = [cell.source for cell in exercises.with_folds(cells)]
    assert folded[2].strip() == "## Ray\n\nFrom [01](01.ipynb)."
    opened = '<details class="solution" id="solution-b-c"><summary>b c</summary>'
    assert folded[3].startswith('<details class="solution" id="solution-a">')
    assert folded[4:6] == ["**1.** Because.", 'check("a", 1)']
    assert [text.strip() for text in folded[6:8]] == ["</details>", opened]
    assert folded[8:12] == [cell.source for cell in cells[4:8]]
    assert [text.strip() for text in folded[12:]] == ["</details>", "The end."]


def test_a_table_has_no_header_without_text():
    table = '<style scoped>\n.a {}\n</style>\n<table border="1"><th></th><th>MB</th>'
    assert lessons.readable(table) == "<table><td></td><th>MB</th>"


def test_what_a_page_links_to_is_there():
    page = ROOT / "docs" / "page.md"
    text = "[a](../LICENSE#x) ![b](../utils/show.py) [c](https://d.org) `[e](f)`\n"
    assert names(pages.linked(text, page)) == ["LICENSE", "utils/show.py"]
    with pytest.raises(
        BadInput, match=r"docs/page\.md links to gone\.md, which is not"
    ):
        pages.linked("[a](gone.md)", page)
    with pytest.raises(BadInput, match="outside of the book"):
        pages.linked("[a](../..)", page)
    text = "[a](../README.md#start) [b](../01-ddp-pytorch-only/README.md)"
    kept = "[b](../01-ddp-pytorch-only/README.md)"
    assert pages.links_to_index(text, page) == f"[a](../index.md#start) {kept}"


def test_pages_are_copies_without_the_links_to_neighbours(tmp_path):
    collect(tmp_path)
    index = (tmp_path / "index.md").read_text()
    for caption in pages.CAPTIONS:
        assert f":caption: {caption}\n" in index
    for path in LESSONS:
        copy = (tmp_path / path.relative_to(ROOT)).read_text()
        assert "<!-- navigation -->" in path.read_text()
        assert "<!-- " not in copy
    script = "01-ddp-pytorch-only/train_ddp.py"  # a README links to it
    assert (tmp_path / script).read_text() == (ROOT / script).read_text()


def test_the_glossary_says_what_its_lesson_explains():
    text = (DOCS / "glossary.md").read_text()
    entries = [*GLOSSARY.finditer(text)]
    terms = [entry["term"].lower() for entry in entries]
    assert terms and len(terms) == text.count("\n## ")
    assert terms == sorted(set(terms))
    for entry in entries:
        cells = nbformat.read(DOCS / entry["lesson"], as_version=4).cells
        told = " ".join(c.source for c in cells if c.cell_type == "markdown")
        assert plain(entry["term"]) in plain(told), entry["term"]


def plain(text):
    return re.sub(r"[\s-]+", " ", text.lower())


def test_a_package_that_is_not_the_pinned_one_is_refused(tmp_path):
    (tmp_path / "mermaid-1.0.0.tgz").write_text("something else")
    with pytest.raises(BadInput, match=r"mermaid-1\.0\.0\.tgz has another checksum"):
        fetched("mermaid", "1.0.0", "AAAA", tmp_path)
    assert not any(tmp_path.iterdir())  # the next try downloads it


def test_all_packages_of_the_book_are_pinned():
    pinned = (DOCS / "constraints.txt").read_text()
    lines = (DOCS / "requirements.txt").read_text().splitlines()
    for line in lines:
        if re.match(r"\w", line):
            package = Requirement(line.partition("#")[0].strip())
            assert re.search(rf"^{re.escape(str(package))}$", pinned, re.MULTILINE)
    for line in pinned.splitlines():
        assert re.match(r"#|[\w.-]+==[\w.]+( ;|$)", line), line


def test_the_book_is_published_from_main_by_the_command_of_the_readme():
    workflow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text())
    assert workflow[True]["push"]["branches"] == ["main"]  # YAML takes `on` for it
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert [s["run"] for s in build["steps"] if "run" in s] == ["make book"]
    (upload,) = [s for s in build["steps"] if "pages-artifact" in s.get("uses", "")]
    assert ROOT / upload["with"]["path"] == SITE
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert publish["needs"] == "build"
    for job in (build, publish):
        assert job["timeout-minutes"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.search(r"@[0-9a-f]{40}$", step["uses"])
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


BAD_PAGE = """
<link rel="stylesheet" href="https://cdn.org/a.css"><link rel="next" href="b.html">
<script src="//cdn.org/b.js"></script><img src="c.png"><a href="#d">d</a>
<style>@import url(https://cdn.org/e.css);</style><a href="https://f.org">f</a>
<script type="module">import "https://cdn.org/g.js"</script><p id="h">h</p>
<a href="other.html#i">i</a><div style="background: url('http://cdn.org/j.png')"></div>
"""


def test_what_a_page_takes_from_elsewhere_is_seen(tmp_path):
    (tmp_path / "page.html").write_text(BAD_PAGE)
    (tmp_path / "other.html").write_text('<p id="k">k</p><a href="page.html#h">h</a>')
    (tmp_path / "look.css").write_text(
        "@font-face { src: url(https://cdn.org/l.woff) }"
    )
    found = {url.rpartition("/")[2] for _, url in site.from_elsewhere(tmp_path)}
    assert found == {"a.css", "b.js", "e.css", "g.js", "j.png", "l.woff"}
    dead = {target for _, target in site.dead_links(tmp_path)}
    assert dead == {"b.html", "c.png", "#d", "other.html#i"}
    assert [name for name, _ in site.without_text(tmp_path)] == ["page.html"]


@cache
def made(*command):
    """Return the folder of the book, written once by the command that makes it."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


@pytest.fixture(scope="module")
def book():
    return made(*typed("make book"))


@pytest.mark.weekly
@pytest.mark.runs("make book")
def test_every_lesson_is_a_page_with_its_outputs():
    book = made(*typed("make book"))
    for path in LESSONS:
        page = (book / path.relative_to(ROOT)).with_suffix(".html").read_text()
        recorded = nbformat.read(path, as_version=4)
        shown = html.unescape(re.sub(r"<[^>]+>", "", page))
        for proof in notebooks.proofs(recorded):
            assert f"{notebooks.PROOF}{proof}" in shown
        assert page.count('<pre class="mermaid">') == path.read_text().count(
            "```mermaid"
        )
        figures_there = sum(map(lessons.has_figure, recorded.cells))
        assert len(re.findall(r'<img alt="[^"]+" src="\.\./', page)) >= figures_there


@pytest.mark.weekly
def test_the_book_takes_nothing_from_elsewhere(book):
    assert list(site.from_elsewhere(book)) == []


@pytest.mark.weekly
def test_no_link_of_the_book_is_dead(book):
    assert list(site.dead_links(book)) == []


@pytest.mark.weekly
def test_every_picture_of_the_book_has_a_text(book):
    assert list(site.without_text(book)) == []


@pytest.mark.weekly
def test_a_link_to_a_heading_that_is_gone_stops_it(book, tmp_path):
    """By Sphinx itself: the first page links to a heading of another one."""
    (tmp_path / "index.md").write_text(
        "# A\n\n[b](b.md#gone)\n\n```{toctree}\nb.md\n```\n"
    )
    (tmp_path / "b.md").write_text("# B\n")
    (tmp_path / "_static").mkdir()
    python = str(ROOT / ".venv-book" / "bin" / "python")
    command = sphinx(tmp_path, tmp_path / "out", python)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode and "gone" in done.stderr


def all_pages(book: Path) -> list[str]:
    return sorted(path.relative_to(book).as_posix() for path in book.rglob("*.html"))


@pytest.fixture(scope="module")
def seen(book, tmp_path_factory):
    """Return what headless Chromium sees of each page, and what a search finds."""
    python = browser.python()
    folder = tmp_path_factory.mktemp("browser")
    fetch = "import sys, pathlib; from tests.tools.book.__main__ import fetched; "
    fetch += "fetched(*sys.argv[1:4], pathlib.Path(sys.argv[4]))"
    npm = ROOT / ".venv-book" / "bin" / "python"
    command = [npm, "-c", fetch, *AXE, AXE_SHA512, folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE)
    shutil.unpack_archive(folder / f"{'-'.join(AXE)}.tgz", folder)
    script = ROOT / "tests" / "tools" / "book" / "browser.py"
    command = [python, script, folder / "package" / "axe.min.js"]
    command += [
        ROOT / "build" / "screenshots" / "book",
        book.as_uri(),
        *all_pages(book),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.weekly
def test_no_page_breaks_a_rule_of_axe_or_asks_a_network(book, seen):
    views = seen[:-1]
    assert len(views) == 4 * len(all_pages(book))  # wide and narrow, light and dark
    for view in views:
        where = [view["page"], view["width"], view["theme"]]
        assert view["axe"] == [], where
        assert view["network"] == view["console"] == [], where
        assert view["sideways"] == 0, where  # a phone scrolls up and down alone
        assert view["open"] == 0, where
        assert all(view["diagrams"]) and all(view["pictures"]), where
    drawn = {view["page"] for view in views if view["diagrams"] and view["pictures"]}
    shown = {path.relative_to(ROOT).as_posix() for path in LESSONS}
    with_both = {page.replace(".html", ".ipynb") for page in drawn}
    assert {path for path in shown if "solutions" not in path} <= with_both
    light, dark = (
        {view["background"] for view in views if view["theme"] == theme}
        for theme in ("light", "dark")
    )
    assert len(light) == len(dark) == 1 and light != dark


@pytest.mark.weekly
def test_search_finds_a_word_without_a_server(seen):
    assert notebooks.title(LESSONS[0]) in seen[-1]["search"]
