"""Mistakes that people make are rejected, each by the test that is named for it."""

import ast
import re
from pathlib import Path

import pytest

from tests.tools import mistakes
from tests.tools.notebooks import ROOT

ALL = mistakes.all_mistakes()

# A test for the copy: whatever a test starts there imports the copy's `utils`.
PROBE = """
import subprocess, sys
from pathlib import Path
from utils.cluster import start_ray
import pytest, ray
from tests.patience import PATIENCE
from utils.launch import run_ranks

OURS = str(Path(__file__).parents[1] / "utils" / "__init__.py")
CODE = "import utils; print(utils.__file__)"

def where():
    import utils
    return utils.__file__

def test_here_and_on_ranks():
    assert [where(), *run_ranks(where, 2)] == [OURS] * 3

def test_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(CODE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node=2", "script.py"]
    found = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=PATIENCE)
    assert found.split() == [OURS] * 2

@pytest.mark.xdist_group("ray")
def test_in_a_task_of_ray():
    start_ray(1)
    found = ray.get(ray.remote(where).remote())
    ray.shutdown()
    assert found == OURS
"""


def test_no_two_have_the_same_name():
    """A name on the command line means one of them, and heads one row of the table."""
    assert len(ALL) == len({mistake.name for mistake in ALL})


@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.name)
def test_a_mistake_can_be_made_and_changes_one_line(mistake):
    """What it changes still stands there, so that the list does not go stale."""
    text = mistakes.with_mistake(mistake)
    if mistake.file.endswith(".py"):
        ast.parse(text)  # else any test would reject it
    changed = text.splitlines()
    before = (ROOT / mistake.file).read_text().splitlines()
    assert len(changed) == len(before)
    assert sum(a != b for a, b in zip(before, changed)) == 1


@pytest.mark.parametrize("copies", [0, 2])
def test_a_line_that_does_not_stand_there_once_is_named(copies, tmp_path):
    (tmp_path / "script.py").write_text("step()\n" * copies)
    mistake = mistakes.Mistake("no step", "script.py", "step()", "pass", "a test", "")
    with pytest.raises(
        ValueError, match=rf"'step\(\)' stands {copies} times in script"
    ):
        mistakes.with_mistake(mistake, tmp_path)


def test_the_tests_that_reject_them_exist():
    """Their functions; `test_without_a_mistake_all_of_these_tests_pass` knows the rest."""
    for mistake in ALL:
        file, _, name = mistake.test.partition("::")
        function = f"def {name.partition('[')[0]}(" if name else ""
        assert function in (ROOT / file).read_text(), mistake.test


def test_the_table_is_that_of_the_list():
    """Made by `python -m tests.tools.mistakes`, in the order of the list."""
    rows = re.findall(r"^\| .+ \| `.+` \| `.+` \|", mistakes.TABLE.read_text(), re.M)
    assert len(rows) == len(ALL)
    for row, mistake in zip(rows, ALL):
        assert row.startswith(mistakes.row_start(mistake))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    mistakes.copy_workshop(folder)
    return folder


@pytest.mark.weekly
def test_a_copy_imports_its_own_utils(copy):
    probe = copy / "tests" / "test_probe.py"
    probe.write_text(PROBE)
    found = mistakes.run(copy, "tests/test_probe.py")
    probe.unlink()
    assert (found.status, found.passed) == (0, 3), found.output


@pytest.mark.weekly
def test_without_a_mistake_all_of_these_tests_pass(copy):
    tests = {mistake.test for mistake in ALL}
    found = mistakes.run(copy, *tests, timeout=mistakes.TIMEOUT_S * len(tests))
    assert found.status == 0, found.output
    assert found.passed >= len(tests)


@pytest.mark.weekly
@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.name)
def test_a_mistake_is_rejected(mistake, copy):
    with mistakes.made(mistake, copy):
        found = mistakes.run(copy, mistake.test)
    assert mistakes.rejects(found, mistake), found.output
