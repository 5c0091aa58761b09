"""tests.tools.repeat: its table, its limits, and that nothing is left running."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import PATIENCE, is_alive, wait_until
from tests.tools import notebooks, repeat


@pytest.fixture
def loops(monkeypatch) -> list[list[int]]:
    """Return the process ids of the loops beside each run."""
    found, busy = [], repeat.busy

    @contextlib.contextmanager
    def noted(number):
        with busy(number) as started:
            assert all(loop.poll() is None for loop in started)
            found.append([loop.pid for loop in started])
            yield started

    monkeypatch.setattr(repeat, "busy", noted)
    return found


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process, it stays
    return tmp_path


def columns(printed: str) -> dict[str, list[str]]:
    """Return the runs and the green ones of each row, by the name in its first column."""
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()]
    return {row[0]: row[1:3] for row in rows if len(row) == 5 and row[1].isdigit()}


TINY = """
import pytest, subprocess, time
from pathlib import Path
pytestmark = pytest.mark.xdist_group("ray")

def test_right(): pass

def test_third_fails():
    Path("runs").open("a").write("x")
    assert Path("runs").stat().st_size != 3

@pytest.mark.weekly
def test_of_another_day(): raise OSError
"""
HANGS = """
import subprocess, time
with open("pid", "w") as file:
    file.write(str(subprocess.Popen(["sleep", "10000"]).pid))
time.sleep(10_000)
"""


@pytest.mark.weekly
def test_a_failure_that_comes_and_goes_is_counted_and_named(root, loops, capsys):
    """In what starts Ray, which is what it repeats if nothing is named."""
    (root / "test_tiny.py").write_text(TINY)
    (root / "test_other.py").write_text("def test_other(): raise OSError")
    assert repeat.main(["-n", "4", "--loops", "2", "--loaded", "1"]) == 1
    printed = capsys.readouterr().out
    assert columns(printed) == {"test_tiny.py": ["4", "3"]}
    assert "test_tiny.py, run 3:\n- FAILED test_tiny.py::test_third_fails" in printed
    assert printed.count("FAILED") == 1
    assert [len(each) for each in loops] == [0, 0, 0, 2]
    assert not any(psutil.pid_exists(pid) for each in loops for pid in each)


@pytest.mark.slow
def test_a_run_that_skips_everything_has_not_passed(root, loops, capsys):
    """As an elective does whose packages are missing."""
    skipped = "import pytest\n@pytest.mark.skip\ndef test_tiny(): pass"
    (root / "test_tiny.py").write_text(skipped)  # for pytest this is no failure
    assert repeat.main(["test_tiny.py", "-n", "1", "--loops", "1"]) == 1
    printed = capsys.readouterr().out
    assert columns(printed) == {"test_tiny.py": ["1", "0"]}
    assert "1 skipped" in printed


@pytest.mark.weekly
@pytest.mark.parametrize("gone", [[], ["xgboost"]])
def test_electives_count_where_they_are_installed(gone, monkeypatch):
    monkeypatch.setattr(repeat, "missing", lambda *_: gone)
    found = repeat.with_ray()
    lessons = {str(path.relative_to(notebooks.ROOT)) for path in notebooks.electives()}
    assert lessons
    assert lessons & set(found) == (set() if gone else lessons)
    assert "02-ddp-pytorch-ray/01_ray_core.ipynb" in found


@pytest.mark.weekly
def test_a_run_has_a_limit_and_leaves_nothing(root, loops, capsys, monkeypatch):
    """A program in pytest's place: it begins at once."""
    monkeypatch.setattr(repeat, "PYTEST", [sys.executable, "-c", HANGS])
    (root / "test_hangs.py").touch()
    assert (
        repeat.main(["test_hangs.py", "-n", "1", "--loops", "1", "--limit", "9"]) == 1
    )
    printed = capsys.readouterr().out
    assert columns(printed) == {"test_hangs.py": ["1", "0"]}
    assert "- it took more than 9 s" in printed
    left = int((root / "pid").read_text())
    wait_until(lambda: not is_alive(left))
    assert [len(each) for each in loops] == [1]
    assert not psutil.pid_exists(loops[0][0])


@pytest.mark.slow
def test_a_gate_is_a_fresh_clone_with_its_own_environment(
    root, loops, capsys, tmp_path
):
    said = tmp_path / "said"
    (root / ".ci").mkdir()
    (root / ".ci" / "run").write_text(
        f'#!/bin/bash\necho "$(ls -A | xargs):$PWD" >>{said}\n'
        f"[ $(wc -l <{said}) = 1 ] || {{ echo 'FAILED a test - why'; exit 1; }}\n"
    )
    (root / ".ci" / "run").chmod(0o755)
    (root / "Makefile").write_text("setup:\n\tmkdir .venv\n")
    (root / "uncommitted").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for command in (["init", "-q"], ["add", ".ci", "Makefile"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], cwd=root, check=True, timeout=PATIENCE)
    assert repeat.main(["--gate", "-n", "2", "--loaded", "1", "--loops", "1"]) == 1
    printed = capsys.readouterr().out
    assert columns(printed) == {"the gate": ["2", "1"]}
    assert "the gate, run 2:\n- FAILED a test - why" in printed
    there, folders = zip(*(line.split(":") for line in said.read_text().splitlines()))
    assert set(there) == {".ci .git .venv Makefile"}
    assert len(set(folders)) == 2
    assert all(" " in folder and not os.path.exists(folder) for folder in folders)
    assert [len(each) for each in loops] == [0, 1]


@pytest.mark.slow
def test_loops_end_with_what_started_them():
    program = (
        "import time; from tests.tools import repeat\n"
        "with repeat.busy(2) as loops:\n"
        "    print(*[loop.pid for loop in loops], flush=True)\n"
        "    time.sleep(10_000)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=notebooks.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    loops = list(map(int, started.stdout.readline().split()))
    started.kill()
    started.wait(PATIENCE)
    assert len(loops) == 2
    wait_until(lambda: not any(map(is_alive, loops)))


@pytest.mark.parametrize(
    "wrong",
    [
        ["-n", "0"],
        ["-n", "101"],
        ["--gate", "tests/test_tiers.py"],
        ["02-ddp-pytorch-ray/02*.ipynb"],  # as a shell leaves it where nothing matches
    ],
)
def test_it_is_bounded_and_says_what_it_takes(wrong, capsys):
    with pytest.raises(SystemExit):
        repeat.main(wrong)
    assert "usage: python -m tests.tools.repeat" in capsys.readouterr().err
