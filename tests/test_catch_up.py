"""make catch-up: a solved copy stands beside the learner's notebook, never over it."""

import ast
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests.patience import PATIENCE
from tests.readme import typed
from tests.tools import notebooks
from tests.tools.book.exercises import CHECK
from tests.tools.catch_up import catch_up, original, solutions, solved
from utils.checks import EXERCISES
from utils.errors import BadInput

LESSONS = [p for p in notebooks.all_notebooks() if p.stem != "solutions"]
LESSONS += [p for p in notebooks.electives() if p.stem != "solutions"]


def read(path):
    return nbformat.read(path, as_version=4)


def solve(path):
    return solved(read(path), read(path.with_name("solutions.ipynb")))


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells):
    return "".join(o.get("text", "") for cell in cells for o in cell.outputs)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_exercise_is_solved_and_everything_else_stays(path):
    lesson, copy = code(read(path)), code(solve(path))
    asked = [name for cell in lesson for name in CHECK.findall(cell.source)]
    assert asked
    assert [n for cell in copy for n in CHECK.findall(cell.source)] == asked
    checked = [cell for cell in copy if CHECK.search(cell.source)]
    for cell in checked:
        assert "Right" in printed([cell]) or "right" in printed([cell])
    kept = [cell.source for cell in lesson if not CHECK.search(cell.source)]
    sources = [cell.source for cell in copy]
    assert [source for source in sources if source in kept] == kept


def bound(source):
    """Return the names that a cell binds, at its top level or in a `with` or loop."""
    tree = ast.parse(source)
    defined = (ast.FunctionDef, ast.ClassDef)
    found = {node.name for node in tree.body if isinstance(node, defined)}
    inner = [
        n for top in tree.body if not isinstance(top, defined) for n in ast.walk(top)
    ]
    loops = [node for node in inner if isinstance(node, ast.comprehension)]
    own = {id(n) for loop in loops for n in ast.walk(loop.target)}  # seen only in there
    names = [
        node for node in inner if isinstance(node, ast.Name) and id(node) not in own
    ]
    return found | {n.id for n in names if isinstance(n.ctx, ast.Store)}


def python(cell):
    """Return the source of a cell without the lines that only IPython reads."""
    lines = cell.source.splitlines()
    return "\n".join(
        "pass" if line.lstrip()[:1] in "!%" and line else line for line in lines
    )


def needs(source):
    """Return the names that a cell reads before it has bound them itself."""
    found, own = set(), set()
    for statement in ast.parse(source).body:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        found |= {n.id for n in names if isinstance(n.ctx, ast.Load)} - own
        if isinstance(statement, ast.AugAssign) and isinstance(
            statement.target, ast.Name
        ):
            found |= {statement.target.id} - own
        own |= bound(ast.unparse(statement))
    return found


def test_a_name_that_is_read_before_it_is_bound_is_needed():
    assert needs("a = 1\na += b\nc += a\nd = d + [a]") == {"b", "c", "d"}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_solution_takes_a_name_that_its_lesson_still_needs(path):
    """Cells below an exercise run in the copy as they do in the lesson."""
    _, by_name = solutions(read(path.with_name("solutions.ipynb")))
    cells = code(read(path))
    for number, cell in enumerate(cells):
        for name in CHECK.findall(cell.source):
            own = set().union(*(bound(c.source) for c in by_name[name]))
            own -= bound(cell.source)  # a learner's answer takes these, too
            before, after = cells[:number], cells[number + 1 :]
            had = set().union(*(names_of(c, bound) for c in before))
            needed = set()
            for later in reversed(after):
                needed -= names_of(later, bound)
                needed |= names_of(later, needs)
            assert not own & had & needed, name


def names_of(cell, what):
    try:
        return what(python(cell))
    except SyntaxError:  # a command of the shell over several lines
        return set()


@pytest.mark.covers(
    "make catch-up NOTEBOOK=02-ddp-pytorch-ray/01_ray_core.ipynb",
)
def test_the_learners_notebook_and_earlier_copies_stay(tmp_path, monkeypatch):
    part = tmp_path / "02-ddp-pytorch-ray"
    part.mkdir()
    for name in ("01_ray_core.ipynb", "solutions.ipynb"):
        (part / name).write_bytes((notebooks.ROOT / part.name / name).read_bytes())
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    with pytest.raises(BadInput, match=r"as it was written, .* is not here; git says"):
        catch_up(part / "01_ray_core.ipynb")
    run = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", tmp_path]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "lessons"]):
        subprocess.run([*run, *command], check=True, timeout=PATIENCE)
    (part / "01_ray_core.ipynb").write_text("edited, and broken")
    first, second = catch_up(part / "01_ray_core.ipynb"), catch_up(Path("01_ray_core"))
    assert (first.name, second.name) == (
        "01_ray_core-solved.ipynb",
        "01_ray_core-solved-2.ipynb",
    )
    assert (part / "01_ray_core.ipynb").read_text() == "edited, and broken"
    assert original(part / "01_ray_core.ipynb", tmp_path) == read(LESSONS[4])
    assert printed(code(read(first))).count("Proved: ") == 1
    nbformat.validate(read(first))
    assert notebooks.all_notebooks() == [
        part / "01_ray_core.ipynb",
        part / "solutions.ipynb",
    ]
    with pytest.raises(BadInput, match="is not a lesson: name one of 02-ddp"):
        catch_up(part / "solutions.ipynb")


@pytest.mark.parametrize("target", ["catch-up", "update", "rehearse"])
def test_a_class_waits_for_no_packages(target):
    """Also where the pins are newer than the environment, as after `make update`."""
    command = ["make", "--dry-run", "--what-if=requirements.txt", target]
    command += ["NOTEBOOK=a.ipynb", "SEATS=seats.txt"]
    planned = subprocess.check_output(
        command, cwd=notebooks.ROOT, text=True, timeout=PATIENCE
    )
    assert f"tests.tools.{target.replace('-', '_')}" in planned
    planned = planned.replace(str(notebooks.ROOT), "")
    assert "pip" not in planned and "ipykernel" not in planned


def test_the_command_asks_for_a_lesson():
    command = typed("make catch-up NOTEBOOK=02-ddp-pytorch-ray/01_ray_core.ipynb")
    done = subprocess.run(
        command[:2],
        cwd=notebooks.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "Name a lesson, as in 'make catch-up NOTEBOOK=" in done.stderr


def test_every_exercise_has_a_solution():
    found = set()
    for path in notebooks.all_notebooks() + notebooks.electives():
        if path.stem == "solutions":
            found |= solutions(read(path))[1].keys()
    assert found == EXERCISES.keys()


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("path", [LESSONS[0], LESSONS[5]], ids=lambda path: path.stem)
def test_a_solved_copy_runs(path, tmp_path):
    """As a learner runs it: from the top, in the lesson's folder."""
    from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, execute

    target = path.with_name(f"{path.stem}-solved-9.ipynb")
    nbformat.write(solve(path), target)
    try:
        done = execute(target, RECORDING_ENVIRONMENT)
    finally:
        target.unlink()
    assert "Not yet" not in printed(code(done))


def test_in_a_seat_without_history_it_is_the_lesson_that_nobody_changes(
    monkeypatch, tmp_path
):
    mine = tmp_path / LESSONS[0].relative_to(notebooks.ROOT)
    mine.parent.mkdir()
    mine.write_text("{}")
    monkeypatch.setenv("WORKSHOP_LESSONS", str(notebooks.ROOT))
    assert original(mine, tmp_path) == read(LESSONS[0])
    monkeypatch.delenv("WORKSHOP_LESSONS")
    with pytest.raises(BadInput, match="is not here"):
        original(mine, tmp_path)
