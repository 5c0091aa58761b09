"""The notebooks keep to the design, and comparing their outputs bites."""

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbconvert.filters.markdown import markdown2html

from tests import scripts
from tests.patience import PATIENCE, is_alive, wait_until
from tests.tools import notebooks
from tests.tools.notebooks import glossary, outline, pictures
from tests.tools.notebooks.execution import execute
from tests.tools.notebooks.navigation import navigation
from tests.tools.notebooks.questions import HEADING, questions
from utils.show import function_source

ALL = notebooks.all_notebooks() + notebooks.electives()
PAGES = [
    path
    for pattern in ("*.md", "0*/**/*.md", "docs/*.md", "tests/**/*.md", "utils/**/*.md")
    for path in sorted(notebooks.ROOT.glob(pattern))
]
FORBIDDEN_OUTPUT = {
    "a path of this machine": r"/(?:root|home|Users|tmp|work)/",
    "a process id": r"\bpid[= ]\d+",
    "terminal colours": r"\\u001b\[",
    "widget state": r"widget-view",
    "an address": r"\b(?:10|172|192)\.\d+\.\d+\.\d+",
}
FORBIDDEN_SOURCE = {
    "sys.path surgery": r"sys\.path",
    "a star import": r"import \*",
    "GPUs hard-coded": r"use_gpu=True",
    "an import that ruff does not put before Ray's": r"from utils import .*\bcluster\b",
    "a banner": r"# ?[=\-#]{10,}",
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


@pytest.mark.parametrize("what", FORBIDDEN_OUTPUT)
def test_outputs_are_clean(notebook, what):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            shown = {
                k: v for k, v in output.get("data", {}).items() if "image" not in k
            }
            text = json.dumps(output | {"data": shown}, ensure_ascii=False)
            assert not re.search(FORBIDDEN_OUTPUT[what], text), cell.source


@pytest.mark.parametrize("what", FORBIDDEN_SOURCE)
def test_sources_are_clean(notebook, what):
    for cell in code_cells(notebook):
        assert not re.search(FORBIDDEN_SOURCE[what], cell.source), cell.source


def test_errors_are_announced(notebook):
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
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}


def test_navigation_is_fresh(notebook):
    line = navigation(notebook.path)
    assert notebook.cells[0].source.startswith(line)
    assert notebook.cells[-1].source.endswith(line)


def test_times_are_fresh(notebook):
    """Of the first cell; `python -m tests.tools.notebooks link` writes them anew."""
    if outline.side_trips(notebook.cells):
        line = outline.time_line(notebook, outline.minutes_to_run(notebook))
        assert f"{line}\n" in f"{notebook.cells[0].source}\n"


@pytest.mark.parametrize("readme", outline.readmes(), ids=name)
def test_rows_of_lessons_are_fresh(readme):
    rows = outline.rows_of(readme)
    assert rows
    for path, there in rows.items():
        assert there == outline.row(path, readme)


LESSONS = [
    path
    for path in [*notebooks.all_notebooks(), *notebooks.electives()]
    if path.stem != "solutions"
]


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_links_to_the_glossary_are_fresh(path):
    """`python -m tests.tools.notebooks link` sets them; glossary.toml says which."""
    notebook = nbformat.read(path, as_version=4)
    before = [cell.source for cell in notebook.cells]
    glossary.with_links(path, notebook)
    assert [cell.source for cell in notebook.cells] == before
    linked = [text for cell in before for text in glossary.LINK.findall(cell)]
    assert linked and len(linked) == len(glossary.terms(path))


def test_the_first_use_of_a_term_is_linked_and_no_other(monkeypatch):
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    monkeypatch.setattr(glossary, "terms", lambda path: ["rank", "DDP"])
    first = (
        "# A rank\n\n`rank` [rank](#a) <b>\n```\nrank\n```\nno-rank, **Ranks** and rank"
    )
    cells = [text(first), code("rank = 0  # DDP"), text("ddp, DDP. A DDP")]
    cells += [text("## Going deeper\n\nrank")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    for _ in range(2):  # the second time changes nothing
        glossary.with_links(Path("lesson.ipynb"), notebook)
        link = "**[Ranks](../docs/glossary.md#rank)**"
        assert notebook.cells[0].source == first.replace("**Ranks**", link)
        assert notebook.cells[1].source == "rank = 0  # DDP"
        ddp = "ddp, [DDP](../docs/glossary.md#ddp). A DDP"
        assert notebook.cells[2].source == ddp
    monkeypatch.setattr(glossary, "terms", lambda path: ["gloo"])
    with pytest.raises(LookupError, match=r"lesson\.ipynb never uses 'gloo'"):
        glossary.with_links(Path("lesson.ipynb"), notebook)
    monkeypatch.setattr(glossary, "terms", lambda path: ["frobnicate"])
    with pytest.raises(LookupError, match="glossary has no term 'frobnicate'"):
        glossary.with_links(Path("lesson.ipynb"), notebook)


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_three_questions_end_the_main_line_and_its_cells_answer_them(path):
    main = outline.main_line(nbformat.read(path, as_version=4).cells)
    found = questions(main)
    assert [each.asked[:3] for each in found] == ["1. ", "2. ", "3. "]
    assert main[-1].source.count("<details>") == 3
    for each in found:
        assert each.anchors
        for anchor in each.anchors:
            assert cells_of_code_below(anchor, main), (each.asked, anchor)


def cells_of_code_below(anchor: str, cells: list) -> int:
    """Count the cells of code of a section, up to the next heading as large as its own."""
    level = count = 0
    for cell in cells:
        if cell.cell_type == "code":
            count += bool(level)
            continue
        for marks, heading in re.findall(r"^(#+) (.+)$", cell.source, re.MULTILINE):
            if outline.anchor(heading) == anchor:
                level = len(marks)
            elif level and len(marks) <= level:
                return count
    return count


def test_a_question_that_no_cell_answers_is_seen():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [text("## Only *text*"), text("## With code\n\n### Deep"), code("1")]
    assert cells_of_code_below("only-text", cells) == 0
    assert cells_of_code_below("gone", cells) == 0
    assert cells_of_code_below("with-code", cells) == 1
    answer = "<details><summary>Answer</summary>\n\nIt is. [Deep](#deep).\n\n</details>"
    asked = text(f"{HEADING}\n\n**1. Is it?**\n\n{answer}")
    (found,) = questions([*cells, asked])
    assert found == ("1. Is it?", "It is. [Deep](#deep).", ["deep"])
    assert questions(cells) == questions([asked, *cells]) == []


@pytest.mark.parametrize("picture", pictures.COPIED)
def test_copied_pictures_are_those_of_the_lessons(picture):
    """`python -m tests.tools.notebooks link` copies them."""
    now = pictures.recorded(*pictures.COPIED[picture])
    assert (pictures.PICTURES / f"{picture}.png").read_bytes() == now


def test_a_figure_that_a_lesson_does_not_have_is_named():
    lesson, _ = pictures.COPIED["overlap"]
    with pytest.raises(LookupError, match="has 0 figures with the title 'Gone'"):
        pictures.recorded(lesson, "Gone")


def bound_and_used(cells: list) -> tuple[set[str], set[str]]:
    """Return names that cells of code bind, and names that they use."""
    bound, used = set(), set()
    for cell in cells:
        if cell.cell_type != "code":
            continue
        source = TransformerManager().transform_cell(cell.source)
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=asname):
                    bound.add((asname or name).split(".")[0])
    return bound, used


def taken_from_other_trips(cells: list) -> dict[str, set[str]]:
    """Return by side trip the names of another one that it uses and nobody else binds."""
    main, _ = bound_and_used(outline.main_line(cells))
    trips = {h: bound_and_used(t) for h, t in outline.side_trips(cells).items()}
    found = {}
    for heading, (own, used) in trips.items():
        others = [bound for other, (bound, _) in trips.items() if other != heading]
        found[heading] = (used - main - own) & set().union(*others)
    return {heading: names for heading, names in found.items() if names}


def test_no_side_trip_needs_another(notebook):
    assert taken_from_other_trips(notebook.cells) == {}


def test_a_side_trip_that_needs_another_is_seen():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [code("a = 1"), text("## Going deeper"), text("### One"), code("b = a")]
    cells += [text("### Two"), code("c = a\nprint(c, b)"), text("## Read next")]
    assert taken_from_other_trips(cells) == {"Two": {"b"}}


def imported(tree: ast.AST) -> dict[str, object]:
    """Return what a program imports of `utils` and the scripts, by its name there.

    Raises:
        ImportError: it is not there.
    """
    found = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "utils"
        ):
            for alias in node.names:
                exec(f"from {node.module} import {alias.name} as it", theirs := {})
                found[alias.asname or alias.name] = theirs["it"]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if path := next(notebooks.ROOT.glob(f"0*/{alias.name}.py"), None):
                    found[alias.asname or alias.name] = scripts.load(path)
    return found


def wrong_calls(source: str) -> list[str]:
    """Return calls of `utils` and the scripts with arguments that they do not take.

    A name that the program binds once more may be another thing, and is left out.

    Raises:
        AttributeError: one of these modules does not have what is used of it.
    """
    tree = ast.parse(source)
    known, wrong = imported(tree), []
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name)
            ):
                known.pop(name, None)
            case ast.Name(id=name, ctx=ast.Store()):
                known.pop(name, None)

    def value(node: ast.AST) -> object:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = value(node.value)
            return getattr(owner, node.attr) if inspect.ismodule(owner) else None
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value(node)
        if not isinstance(node, ast.Call) or not callable(called := value(node.func)):
            continue
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        names = {each.arg: None for each in node.keywords if each.arg}
        try:
            signature = inspect.signature(called)
            whole = not starred and len(names) == len(node.keywords)
            bind = signature.bind if whole else signature.bind_partial
            bind(*([] if starred else node.args), **names)
        except TypeError as error:
            wrong.append(f"{ast.unparse(node.func)}: {error}")
        except ValueError:  # of a class that takes what its base does, which is in C
            continue
    return wrong


@pytest.mark.parametrize("path", notebooks.all_notebooks(), ids=name)
def test_utils_and_scripts_take_the_arguments_that_cells_give(path):
    """Also those of side trips, which are not executed in every change."""
    transform = TransformerManager().transform_cell
    assert wrong_calls("\n".join(map(transform, notebooks.code(path)))) == []


def test_a_wrong_call_is_seen():
    start = "from utils import comms\nfrom utils.launch import run_ranks as run\n"
    start += "from utils.errors import BadInput\nimport train_ddp\nBadInput('no')\n"
    right = "run(print, 2, timeout=1)\nrun(*a, timeout=1)\nrun(f, **b)\n"
    assert wrong_calls(start + right) == []
    (said,) = wrong_calls(start + "run(print, ranks=2)")
    assert said.startswith("run: missing a required argument")
    for call in ("run(print, 2, limit=2)", "run(*a, limit=2)"):
        (said,) = wrong_calls(start + call)
        assert said == "run: got an unexpected keyword argument 'limit'"
    (said,) = wrong_calls(start + "train_ddp.evaluate()")
    assert said.startswith("train_ddp.evaluate: missing a required argument")
    assert wrong_calls(start + "def run(): ...\nrun()") == []
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        wrong_calls(start + "comms.gone()")
    with pytest.raises(ImportError, match="cannot import name 'gone'"):
        wrong_calls("from utils.launch import gone")


def test_links_are_rendered(notebook):
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


@pytest.mark.parametrize("path", ALL + PAGES, ids=name)
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


def functions(path) -> dict[str, ast.FunctionDef]:
    """Return the functions that the cells of a notebook define, by name."""
    cells = code_cells(nbformat.read(path, as_version=4))
    sources = [c.source for c in cells if re.search(r"^def ", c.source, re.MULTILINE)]
    nodes = [node for source in sources for node in ast.parse(source).body]
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def test_actors_train_with_the_loop_of_part_01():
    """With its average_gradients spelled out, and without the losses."""
    part_01, part_02 = scripts.TRAIN_DDP.parent, scripts.TRAIN_RAY_DDP.parent
    by_hand = functions(part_01 / "01_data_parallelism_by_hand.ipynb")
    by_actors = functions(part_02 / "01_ray_core.ipynb")

    def loop(function: ast.FunctionDef) -> str:
        (found,) = (node for node in function.body if isinstance(node, ast.For))
        return ast.unparse(found)

    average = "\n".join(map(ast.unparse, by_hand["average_gradients"].body))
    expected = loop(by_hand["train_by_hand"])
    for ours, theirs in {
        "average_gradients(model)": textwrap.indent(average, " " * 4).lstrip(),
        "dist.get_world_size()": "world_size",
        ".to(dtype)": ".double()",
        "\n    losses.append(loss.item())": "",
    }.items():
        assert ours in expected
        expected = expected.replace(ours, theirs)
    assert loop(by_actors["train"]) == expected


def test_functions_of_the_ray_notebook_are_those_of_the_script():
    """It imports what it does not write out."""
    script = scripts.TRAIN_RAY_DDP.read_text()
    path = scripts.TRAIN_RAY_DDP.parent / "02_ray_train_ddp.ipynb"
    ours = {"load_data", "build", "report", "train_fn"}
    shown = functions(path)
    for name in ours:
        theirs = ast.parse(function_source(script, name)).body[0]
        assert ast.dump(shown[name]) == ast.dump(theirs), name


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
        command, cwd=notebooks.ROOT, capture_output=True, text=True, timeout=PATIENCE
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
