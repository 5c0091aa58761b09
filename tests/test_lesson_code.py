"""The code of lessons: it calls what is there, and no side trip needs another one.

Quick, and without executing a cell: electives and side trips run weekly only.
"""

import ast
import inspect
import sys

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests import scripts
from tests.tools import notebooks
from tests.tools.notebooks import outline
from utils.show import function_source

ALL = notebooks.all_notebooks() + notebooks.electives()
OURS = {"utils", *(path.stem for path in notebooks.ROOT.glob("0*/*.py"))}


def name(path) -> str:
    return str(path.relative_to(notebooks.ROOT))


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
    taken = {}
    for heading, (own, used) in trips.items():
        others = [bound for other, (bound, _) in trips.items() if other != heading]
        taken[heading] = (used - main - own) & set().union(*others)
    return {heading: names for heading, names in taken.items() if names}


@pytest.mark.parametrize("path", ALL, ids=name)
def test_no_side_trip_needs_another(path):
    assert taken_from_other_trips(nbformat.read(path, as_version=4).cells) == {}


def test_a_side_trip_that_needs_another_is_found():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [code("a = 1"), text("## Going deeper"), text("### One"), code("b = a")]
    cells += [text("### Two"), code("c = a\nprint(c, b)"), text("## Read next")]
    assert taken_from_other_trips(cells) == {"Two": {"b"}}


def imported(tree: ast.AST) -> dict[str, object]:
    """Return what a program imports of `utils` and the scripts, by its name there.

    Raises:
        ImportError: it is not there.
    """
    namespace = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case _:
                continue
        if OURS & {module.split(".")[0] for module in modules}:
            exec(ast.unparse(node), namespace)
    return namespace


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
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
            ):
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
            value(node)  # raises where it is gone
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


@pytest.fixture
def scripts_importable(monkeypatch):
    """Let `import train_ddp` find the script, as in the folder of a lesson."""
    for folder in notebooks.ROOT.glob("0[123]-*"):
        monkeypatch.syspath_prepend(folder)
    yield
    for module in OURS - {"utils"}:  # else ranks of later tests would look for it
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("scripts_importable")
@pytest.mark.parametrize("path", ALL, ids=name)
def test_cells_give_utils_and_scripts_the_arguments_that_they_take(path):
    """Quick, also for electives and side trips, which no change executes."""
    transform = TransformerManager().transform_cell
    assert wrong_calls("\n".join(map(transform, notebooks.code(path)))) == []


@pytest.mark.usefixtures("scripts_importable")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("run(print, 2, timeout=1)", None),
        ("run(*a, timeout=1)", None),
        ("run(f, **b)", None),
        ("def run(): ...\nrun()", None),
        ("run(print, ranks=2)", "run: missing a required argument"),
        ("run(print, 2, limit=2)", "run: got an unexpected keyword argument 'limit'"),
        ("run(*a, limit=2)", "run: got an unexpected keyword argument 'limit'"),
        ("train_ddp.evaluate()", "train_ddp.evaluate: missing a required argument"),
    ],
)
def test_a_wrong_call_is_found(call, message):
    source = "from utils.launch import run_ranks as run\nimport train_ddp\n" + call
    wrong = wrong_calls(source)
    assert len(wrong) == bool(message) and all(w.startswith(message) for w in wrong)


def test_a_function_that_is_gone_is_found():
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        wrong_calls("from utils import comms\ncomms.gone()")
    with pytest.raises(ImportError, match="cannot import name 'gone'"):
        wrong_calls("from utils.launch import gone")


def test_functions_of_the_ray_notebook_are_those_of_the_script():
    """A reader takes the script along: what the lesson proves must be true of it."""
    script = scripts.TRAIN_RAY_DDP.read_text()
    lesson = "\n".join(
        source
        for source in notebooks.code(
            scripts.TRAIN_RAY_DDP.with_name("02_ray_train_ddp.ipynb")
        )
        if source.startswith("def ")
    )
    for name in ("load_data", "build", "train_fn"):
        shown, taken = (
            ast.parse(function_source(text, name)) for text in (lesson, script)
        )
        assert ast.dump(shown) == ast.dump(taken), name
