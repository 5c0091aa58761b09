"""What runs when, and what a test that hangs or is skipped does: in runs of a tiny project.

These runs of pytest have the options and plugins of this project.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import pytest

from tests import skips, tiers
from tests.patience import PATIENCE, is_alive
from tests.test_environment import sources
from tests.tools import notebooks
from utils.launch import run_ranks

STARTED = "import os; open(os.environ['STARTED'], 'a').write(os.getcwd() + '\\n')"


class Project:
    """A folder with modules of tests and notebooks, and its own cache of what failed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started = folder / "started"  # a line for each kernel
        startup = folder / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "note.py").write_text(STARTED)

    def notebook(self, name: str, *sources: str, raises: bool = False) -> None:
        """Write a notebook without outputs; the first cell `raises` by dividing by zero."""
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        for count, cell in enumerate(cells, 1):
            cell.execution_count = count
        if raises:
            cells[0].metadata.tags = ["raises-exception"]
            said = {"ename": "ZeroDivisionError", "evalue": "division by zero"}
            cells[0].outputs = [nbformat.v4.new_output("error", traceback=[], **said)]
        (self.folder / name).parent.mkdir(exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=cells), self.folder / name)

    def run(self, *arguments: str, **environment: str) -> dict[str, str]:
        """Run pytest; return each test's outcome, and all it printed as "output"."""
        self.started.write_text("")
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "conftest"]
        command += ["--no-fold-skipped"]
        command += ["-c", notebooks.ROOT / "pyproject.toml", "--rootdir", self.folder]
        command += ["-o", f"cache_dir={self.folder / 'cache'}", *arguments]
        paths = {
            "PYTHONPATH": str(notebooks.ROOT),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "STARTED": str(self.started),
        }
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | paths | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        line = r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: at setup of)? "
        line += r"(?:\S+/)?(\S+::.+?)(?: - .*)?$"
        found = {name: state for state, name in re.findall(line, done.stdout, re.M)}
        return found | {"output": done.stdout}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def two_lessons(project: Project) -> None:
    project.notebook("02-part/01_first.ipynb", "a = 1", "b = a")
    divide = "b = a / int(open('../switch').read())"
    project.notebook("02-part/02_second.ipynb", "a = 1", divide, "c = a", "d = c")
    (project.folder / "switch").write_text("0")
    (project.folder / "test_tiny.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert int(open('switch').read())\n"
        "@pytest.mark.slow\n"
        "def test_slow(): pass\n"
        "@pytest.mark.part02\n"
        "def test_of_part_02(): pass\n"
    )


FIRST = {"01_first.ipynb::Cell 0", "01_first.ipynb::Cell 1"}
SECOND = {f"02_second.ipynb::Cell {number}" for number in range(4)}
TESTS = {f"test_tiny.py::test_{name}" for name in ("right", "wrong", "of_part_02")}


@pytest.mark.weekly
@pytest.mark.covers("pytest --nbval 01-ddp-pytorch-only", "pytest --lf")
def test_marks_choose_and_a_failed_cell_brings_its_notebook(project):
    two_lessons(project)
    found = project.run("--nbval", "-m", "not slow and not weekly", ".")
    found.pop("output")
    assert set(found) == FIRST | TESTS
    assert project.started.read_text().count("\n") == 1  # the kernel of the first one

    found = project.run("--nbval", "-m", "part02 and not weekly", ".")
    found.pop("output")
    assert set(found) == FIRST | SECOND | {"test_tiny.py::test_of_part_02"}

    found = project.run(
        "--nbval", "02-part", "test_tiny.py"
    )  # as typed, without a mark
    found.pop("output")
    assert set(found) == FIRST | SECOND | TESTS | {"test_tiny.py::test_slow"}
    failed = {name for name, state in found.items() if state == "FAILED"}
    not_run = {name for name, state in found.items() if state == "XFAIL"}
    assert not_run == {"02_second.ipynb::Cell 2", "02_second.ipynb::Cell 3"}
    assert failed == {"02_second.ipynb::Cell 1", "test_tiny.py::test_wrong"}

    found = project.run("-n", "2", "--nbval", ".")  # the same, in two lanes
    found.pop("output")
    assert {name for name, state in found.items() if state == "FAILED"} == failed

    (project.folder / "switch").write_text("1")
    found = project.run("--lf", "02-part", "test_tiny.py")
    found.pop("output")
    assert found == dict.fromkeys(SECOND | {"test_tiny.py::test_wrong"}, "PASSED")
    assert project.started.read_text().count("\n") == 1


@pytest.mark.slow
def test_side_trips_are_run_with_their_part_and_do_not_gate(project):
    path = project.folder / "02-part" / "02_second.ipynb"
    project.notebook("02-part/02_second.ipynb", "a = 1", "1 / 0", "b = 1 / 0", "a + 1")
    cells = nbformat.read(path, nbformat.NO_CONVERT).cells
    texts = ["# A lesson", "## Going deeper\n\n### Why?", "### How?", "## Read next"]
    for place, text in enumerate(texts):
        cells.insert(2 * place, nbformat.v4.new_markdown_cell(text))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    found = project.run("--nbval-lax", "-m", "not weekly and not side_trip", "02-part")
    output = found.pop("output")
    main = ["02_second.ipynb::Cell 0", "02_second.ipynb::Cell 3"]
    assert found == dict.fromkeys(main, "PASSED"), output
    found = project.run("--nbval-lax", "-m", "part02 and not weekly", "02-part")
    assert found["02_second.ipynb::Cell 1"] == "FAILED"


def test_side_trips_of_lessons_are_cells_of_code():
    lessons = [p for p in notebooks.all_notebooks() if p.stem != "solutions"]
    for path in lessons:
        trips = tiers.in_side_trips(path)
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.id for cell in cells if cell.cell_type == "code"]
        texts = [c.source if c.cell_type == "markdown" else "" for c in cells]
        (start,) = [n for n, text in enumerate(texts) if text.startswith("## Going")]
        end = next(
            n for n in range(start + 1, len(texts)) if texts[n].startswith("## ")
        )
        below = {cell.id for cell in cells[start:end] if cell.cell_type == "code"}
        assert below and {code[number] for number in trips} == below, path


NOTE = """
import os, pytest, time
from pathlib import Path

pytestmark = [{marks}]

@pytest.fixture(scope="module", autouse=True)
def note():
    file = Path(__file__).with_suffix(".txt")
    with file.open("a") as written:  # twice where two lanes have tests of this file
        written.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")

@pytest.mark.parametrize("number", range({count}))
def test_some(number):
    time.sleep(0.1)  # so that the other lane would get some of them
    assert number < {right}
"""
RAY = 'pytest.mark.xdist_group("ray")'


@pytest.mark.weekly
def test_what_starts_ray_is_in_one_lane_and_each_file_in_one(project):
    """And no name of a test tells of its lane: `--lf` would not find it."""
    marks = {"a": RAY, "b": "", "c": RAY, "d": "", "e": "", "f": RAY}
    for name, mark in marks.items():
        right = 8 if name == "e" else 9
        note = NOTE.format(marks=mark, right=right, count=6 if mark else 9)
        (project.folder / f"test_{name}.py").write_text(note)
    project.notebook("01-part/a.ipynb", "a = 1", "b = a", "1 / int(b < 1)", "c = b")
    wrong = {"test_e.py::test_some[8]", "a.ipynb::Cell 2"}
    found = project.run("-n", "2", "--nbval", ".")
    assert not any("@" in name for name in found)
    assert {name for name, state in found.items() if state == "FAILED"} == wrong
    lanes = {n: (project.folder / f"test_{n}.txt").read_text().split() for n in marks}
    assert all(len(each) == 1 for each in lanes.values()), lanes
    assert lanes["a"] == lanes["c"] == lanes["f"]
    assert {lane for (lane,) in lanes.values()} == {"gw0", "gw1"}
    assert project.started.read_text().count("\n") == 1

    found = project.run("-n", "2", "--lf", ".")
    assert {name for name in found if "test_" in name} == wrong - {"a.ipynb::Cell 2"}
    assert sum(".ipynb" in name for name in found) == 4  # all cells of that notebook


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
def test_what_starts_ray_without_its_mark_fails(project):
    ours = "from utils.cluster import start_ray; start_ray(1)"
    (project.folder / "test_tiny.py").write_text(
        "import subprocess, sys\n"
        "from tests import scripts\n"
        "def test_starts_ray():\n"
        f"    command = [sys.executable, '-c', {ours!r}]\n"
        "    subprocess.run(command, env=scripts.environment(), check=True)\n"
        "def test_starts_none(): pass\n"
    )
    found = project.run("test_tiny.py")
    output = found.pop("output")
    assert found["test_tiny.py::test_starts_none"] == "PASSED"
    assert found["test_tiny.py::test_starts_ray"] == "ERROR"  # once it had passed
    assert "It starts a Ray outside of the lane" in output
    logs = Path(re.search(r"^Logs of Ray: (.*)", output, re.M)[1])
    assert [*logs.glob("ray/session_2*/logs/raylet.out")]
    shutil.rmtree(logs)


@pytest.mark.weekly
def test_what_hangs_is_stopped_and_the_others_go_on(project):
    project.notebook("02-part/a.ipynb", "import time; time.sleep(10_000)", "b = 1")
    stubborn = (
        "import time\n"
        "while True:\n"
        "    try: time.sleep(1)\n"
        "    except KeyboardInterrupt: print('no')"
    )
    project.notebook("02-part/c.ipynb", stubborn, "time.sleep(10_000)")
    project.notebook("02-part/b.ipynb", "a = 1")
    (project.folder / "test_tiny.py").write_text(
        "import pytest, subprocess, time\n"
        "def test_hangs():\n"
        "    child = subprocess.Popen(['sleep', '10000'])\n"
        "    open('pid', 'w').write(str(child.pid))\n"
        "    time.sleep(10_000)\n"
        "def test_right(): pass\n"
        "def test_skipped(): pytest.skip('no time')\n"
    )
    # apart, as the limit of a test counts the start of a kernel as well
    found = project.run("-o", "timeout=6", "test_tiny.py")
    cells = project.run("--nbval", "--nbval-cell-timeout=8", "02-part")
    output = found.pop("output") + cells.pop("output")
    found |= cells
    assert found == {
        "a.ipynb::Cell 0": "FAILED",
        "a.ipynb::Cell 1": "XFAIL",
        "b.ipynb::Cell 0": "PASSED",
        "c.ipynb::Cell 0": "FAILED",
        "c.ipynb::Cell 1": "XFAIL",
        "test_tiny.py::test_hangs": "FAILED",
        "test_tiny.py::test_right": "PASSED",
        "test_tiny.py::test_skipped": "FAILED",
    }
    assert "Timeout (>6.0s) from pytest-timeout" in output
    assert "KeyboardInterrupt" in output  # as nbval says it
    assert "Skipped: no time" in output
    assert "list its reason in tests/skips.py" in output
    assert not is_alive(int((project.folder / "pid").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "1 / 0",
        pytest.param("import time; time.sleep(10_000)", marks=pytest.mark.weekly),
    ],
)
def test_below_a_cell_that_failed_none_is_run(project, source):
    note = "open('../ran', 'a').write('{}')".format
    cells = [note("a"), source, note("b"), note("c")]
    project.notebook("02-part/a.ipynb", *cells)
    project.notebook("02-part/b.ipynb", note("d"), "1 / 0", note("e"))
    path = project.folder / "02-part" / "b.ipynb"
    raises = nbformat.read(path, nbformat.NO_CONVERT)
    raises.cells[1].metadata["tags"] = ["raises-exception", "nbval-ignore-output"]
    for cell in (raises.cells[0], raises.cells[2]):
        cell.metadata["tags"] = ["nbval-ignore-output"]
    nbformat.write(raises, path)
    found = project.run("--nbval-lax", "--nbval-cell-timeout=8", "02-part")
    output = found.pop("output")
    a = ["PASSED", "FAILED", "XFAIL", "XFAIL"]
    assert found == {f"a.ipynb::Cell {n}": state for n, state in enumerate(a)} | {
        f"b.ipynb::Cell {n}": "PASSED" for n in range(3)
    }
    assert (project.folder / "ran").read_text() == "ade"
    assert output.count("not run, as Cell 1 failed") >= 2
    assert "1 failed, 4 passed, 2 xfailed" in output


@pytest.mark.weekly
def test_what_hangs_where_no_signal_reaches_ends_the_run(project):
    (project.folder / "test_tiny.py").write_text(
        "import signal, time\n"
        "def test_hangs():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "    time.sleep(10_000)\n"
    )
    limits = ["-o", "timeout=1", "-o", "faulthandler_timeout=3"]
    output = project.run(*limits, "test_tiny.py")["output"]
    assert "Timeout (0:00:03)!" in output
    assert 'test_tiny.py", line 4 in test_hangs' in output


def test_a_cell_is_stopped_before_its_test_and_a_test_before_the_run(pytestconfig):
    cell = pytestconfig.getoption("nbval_cell_timeout")
    test = float(pytestconfig.getini("timeout"))
    run = float(pytestconfig.getini("faulthandler_timeout"))
    assert PATIENCE <= cell < test < run < 3600  # as long as one wait in a test
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


def test_a_run_in_the_background_lets_ctrl_c_through():
    """A shell makes what it starts there ignore SIGINT, and a child inherits that."""
    program = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import conftest
child = "import signal; signal.raise_signal(signal.SIGINT)"
print(subprocess.run([sys.executable, "-c", child]).returncode)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=notebooks.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr


def test_first_notebooks_and_solutions_are_quick():
    """`make test` runs the first notebook of each part and its solutions, and no other."""
    parts = {path.parent for path in notebooks.all_notebooks()}
    assert len(parts) >= 3
    for part in parts:
        first, *others, solutions = sorted(part.glob("*.ipynb"))
        assert solutions.stem == "solutions"
        assert tiers.is_quick(first) and tiers.is_quick(solutions)
        assert others and not any(map(tiers.is_quick, others))


def warn() -> None:
    warnings.warn("ours", stacklevel=1)


def test_a_warning_of_our_own_code_is_an_error():
    with pytest.raises(UserWarning, match="ours"):
        warn()
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "file", 1, module="ray.data")


def test_a_warning_of_a_rank_is_an_error():
    with pytest.raises(Exception, match="ours"):
        run_ranks(warn, 1)


def skips_in_tests() -> set[str]:
    """Return the reasons that tests give to `pytest.skip` and to `skipif`."""
    found = set()
    root = notebooks.ROOT
    for path in (root / "conftest.py", *root.glob("tests/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name == "pytest.skip" and node.args:
                    found.add(ast.literal_eval(node.args[0]))
                elif name in ("pytest.mark.skipif", "pytest.mark.skip"):
                    found |= {ast.literal_eval(k.value) for k in node.keywords}
    return found


def test_every_skip_that_is_allowed_is_one_of_a_test():
    assert set(skips.ALLOWED) == skips_in_tests()


WAITS = {"run", "call", "check_call", "check_output"}


def waits_without_limit(source: str, lesson: bool = False) -> list[str]:
    """Return calls that wait for a process for as long as it takes.

    In a lesson those of `subprocess` alone: who waits for a job sees it there, and a cell
    has a limit of its own.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        limited = "timeout" in {keyword.arg for keyword in node.keywords}
        if owner == "subprocess":
            waits = name in WAITS
        else:  # a request is one of torch.distributed, and its group has a limit
            waits = name in ("wait", "communicate") and not node.args
            waits = waits and not lesson and owner != "request"
        if waits and not limited:
            found.append(ast.unparse(node))
    return found


def test_nothing_waits_for_a_process_without_a_limit():
    for path, source in sources():
        lesson = path.suffix == ".ipynb"
        assert waits_without_limit(source, lesson) == [], path


@pytest.mark.parametrize(
    "call",
    ["subprocess.run(['a'])", "job.wait()", "partner.started.communicate()"],
)
def test_a_wait_without_a_limit_is_seen(call):
    assert waits_without_limit(call) == [call]
    limited = call[:-1] + (", timeout=1)" if "run" in call else "timeout=1)")
    assert waits_without_limit(limited) == []
    assert bool(waits_without_limit(call, lesson=True)) == ("subprocess" in call)
