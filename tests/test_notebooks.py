"""Recordings are clean, comparing them bites, and links lead somewhere."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbconvert.filters.markdown import markdown2html

from tests.tools import notebooks
from tests.tools.notebooks import outline
from tests.tools.notebooks.execution import execute
from tests.tools.notebooks.navigation import navigation
from tests.waiting import TIMEOUT_S, is_alive, wait_until

ALL = notebooks.all_notebooks() + notebooks.electives()
FORBIDDEN_OUTPUT = {
    "a path of this machine": r"/(?:root|home|Users|tmp|work)/",
    "a process id": r"\bpid[= ]\d+",
    "terminal colours": r"\\u001b\[",
    "widget state": r"widget-view",
    "an address": r"\b(?:10|172|192)\.\d+\.\d+\.\d+",
}
FORBIDDEN_SOURCE = {
    "an import that ruff does not put before Ray's": r"from utils import .*\bcluster\b",
    "a command that a space in the path breaks": r"\{sys\.executable\}",
}


def name(path: Path) -> str:
    return str(path.relative_to(notebooks.ROOT))


@pytest.fixture(params=ALL, ids=name)
def notebook(request):
    node = nbformat.read(request.param, as_version=4)
    node.path = request.param
    return node


def code_cells(notebook) -> list:
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]


def test_every_cell_was_executed_in_order(notebook):
    """nbval compares nothing in a cell without an execution count."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_compared_output_names_a_port(notebook):
    """The dashboard takes the next one where Ray's own is in use."""
    for cell in code_cells(notebook):
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            printed = "".join(output.get("text", "") for output in cell.outputs)
            assert not re.search(r"//[\w.]+:\d+", printed), cell.source


def test_no_output_names_the_recording_machine(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            shown = {
                k: v for k, v in output.get("data", {}).items() if "image" not in k
            }
            text = json.dumps(output | {"data": shown}, ensure_ascii=False)
            found = [w for w, what in FORBIDDEN_OUTPUT.items() if re.search(what, text)]
            assert found == [], cell.source


def test_no_cell_fails_on_the_machine_of_a_reader(notebook):
    for cell in code_cells(notebook):
        for what, pattern in FORBIDDEN_SOURCE.items():
            assert not re.search(pattern, cell.source), (what, cell.source)


def test_a_cell_fails_only_if_its_tag_says_so(notebook):
    for cell in code_cells(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        expected = "raises-exception" in cell.metadata.get("tags", [])
        assert failed == expected, cell.source


def test_no_stream_holds_a_traceback(notebook):
    """An error that a lesson means to show is an output of its own kind."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert "Traceback (most recent" not in output.get("text", ""), cell.source


def test_metadata_name_the_kernel_only(notebook):
    """Else saving a notebook in JupyterLab is a change."""
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}


def test_links_to_the_neighbours_are_up_to_date(notebook):
    """`python -m tests.tools.notebooks link` writes them."""
    line = navigation(notebook.path)
    assert notebook.cells[0].source.startswith(line)
    assert notebook.cells[-1].source.endswith(line)


def test_links_are_rendered(notebook):
    """Markdown takes a line that begins with HTML as HTML, links and all."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            page = markdown2html(cell.source)
            assert "](" not in re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL)


def texts(path: Path) -> str:
    """Return what a page, or a notebook's cells, say; without what is quoted as code."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


@cache
def anchors(path: Path) -> set[str]:
    """Return what may stand behind `#` in a link to a page, as GitHub names headings."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join(
            cell.source for cell in nbformat.read(path, as_version=4).cells
        )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return set(map(outline.anchor, headings))


def dead_links(path: Path) -> list[str]:
    """Return links of a page or notebook to a file, or to a heading, that is not there."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", texts(path)):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", ALL, ids=name)
def test_what_is_linked_to_is_there(path):
    assert dead_links(path) == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What is *here*?\n[a](#what-is-here) [b](#gone) [c](page.md#what-is-here) "
        "[d](gone.md) [e](page.md#gone) [f](https://g.org/h#i) `[j](k)`\n"
        "```\n[l](m)\n```\n"
    )
    assert dead_links(page) == ["#gone", "gone.md", "page.md#gone"]


def test_notebook_proves_something(notebook):
    if notebook.path.stem != "solutions":
        assert notebooks.proofs(notebook)


@pytest.fixture(scope="module")
def canaries(tmp_path_factory) -> dict[str, str]:
    """Compare notebooks of one cell as lessons are; return PASSED or FAILED for each.

    All in one run of pytest, with the options and plugins of this project.
    """
    folder = tmp_path_factory.mktemp("canaries")
    raising = "%config InteractiveShell.system_raise_on_error = True\n!false"
    for name, source, recorded in (
        ("as_recorded", "print(41 + 1)", "42\n"),
        ("a_digit_changed", "print(41 + 1)", "43\n"),
        ("a_command_fails", raising, ""),
        ("a_child_prints", "!echo 42", "42\r\n"),
        ("a_child_prints_otherwise", "!echo 42", "43\r\n"),
    ):
        cell = nbformat.v4.new_code_cell(source, execution_count=1)
        if recorded:
            output = nbformat.v4.new_output("stream", name="stdout", text=recorded)
            cell.outputs = [output]
        path = folder / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    command = [sys.executable, "-m", "pytest", "-v", "--nbval", folder]
    command += ["--rootdir", notebooks.ROOT, "-c", notebooks.ROOT / "pyproject.toml"]
    # no cache: `pytest --lf` would run these again
    command += ["-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=notebooks.ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 1, done.stdout
    found = re.findall(r"(\w+)\.ipynb::Cell 0 (PASSED|FAILED)", done.stdout)
    return dict(found)


def test_nbval_compares_outputs(canaries):
    """A recorded output with one digit changed has to fail, and no other."""
    assert canaries["as_recorded"] == "PASSED"
    assert canaries["a_digit_changed"] == "FAILED"


def test_a_command_that_fails_is_seen(canaries):
    assert canaries["a_command_fails"] == "FAILED"


def test_output_of_child_processes_is_compared(canaries):
    assert canaries["a_child_prints"] == "PASSED"
    assert canaries["a_child_prints_otherwise"] == "FAILED"


def test_a_failure_names_notebook_and_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    cells = [
        nbformat.v4.new_markdown_cell("# Title"),
        nbformat.v4.new_code_cell("1 / 0"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "broken.ipynb")
    with pytest.raises(
        RuntimeError, match=r"broken\.ipynb, cell 1: .*ZeroDivisionError"
    ):
        execute(tmp_path / "broken.ipynb", {})


def test_what_a_notebook_leaves_behind_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    source = (
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1234567'], start_new_session=True).pid"
    )
    cell = nbformat.v4.new_code_cell(source)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "left.ipynb")
    executed = execute(tmp_path / "left.ipynb", {})
    pid = int(executed.cells[0].outputs[0].data["text/plain"])
    wait_until(lambda: not is_alive(pid))
