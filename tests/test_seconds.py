"""What runs of tests cost is noted, and no longer told once the code has changed."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.tools import notebooks, seconds


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(seconds, "RUNS", tmp_path / "build" / "seconds.json")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a(): pass\n")
    return tmp_path


def test_seconds_of_a_run_are_kept_until_the_code_changes(repository):
    assert seconds.noted_runs() == {}
    seconds.note_run("test", seconds=430.0, fit=8.0, tests=900)
    (repository / "README.md").write_text("changed")
    assert seconds.noted_runs() == {
        "test": {"seconds": 430.0, "fit": 8.0, "tests": 900}
    }
    (repository / "tests" / "test_b.py").write_text("def test_b(): pass\n")
    seconds.note_run("test-all", seconds=1300.0, fit=8.0, tests=1200)
    assert seconds.noted_runs() == {
        "test-all": {"seconds": 1300.0, "fit": 8.0, "tests": 1200}
    }


class Reporter:
    """What `pytest_terminal_summary` needs of pytest's."""

    def __init__(self, **outcomes):
        self.stats = {
            outcome: [SimpleNamespace(nodeid=name, duration=1.5) for name in names]
            for outcome, names in outcomes.items()
        }
        self.lines = []

    def section(self, title):
        self.lines.append(title)

    write_line = section


def summary(monkeypatch, status, warm_fit=lambda: 8.0, **outcomes) -> list[str]:
    """Return what a run of `make test` prints in a process that is 400 s old."""
    monkeypatch.setattr(seconds, "warm_fit", warm_fit)
    started = seconds.psutil.Process().create_time()
    monkeypatch.setattr(seconds.time, "time", lambda: started + 400)
    reporter = Reporter(**outcomes)
    config = SimpleNamespace(getoption=lambda _: "test")
    seconds.pytest_terminal_summary(reporter, status, config)
    return reporter.lines


def test_a_run_says_its_seconds_and_warm_fits_and_notes_them(repository, monkeypatch):
    names = ["tests/test_a.py::test_a", "tests/test_a.py::test_b", "tests/test_b.py::c"]
    assert summary(monkeypatch, 0, passed=names) == [
        "seconds per file",
        "    3.0  tests/test_a.py",
        "    1.5  tests/test_b.py",
        "    4.5  together",
        "make test: 400 s = 50 warm fits of two workers (8.0 s each)",
    ]
    assert seconds.noted_runs() == {"test": {"seconds": 400.0, "fit": 8.0, "tests": 3}}


def test_a_fit_that_could_not_be_measured_fails_no_run(repository, monkeypatch):
    def no_fit() -> float:
        raise subprocess.CalledProcessError(1, "python")

    lines = summary(monkeypatch, 0, warm_fit=no_fit, passed=["tests/test_a.py::test_a"])
    assert lines[-1].startswith("make test: 400 s; no warm fit was measured: Command")
    assert seconds.noted_runs() == {}


def test_a_run_in_which_something_failed_is_not_noted(repository, monkeypatch):
    lines = summary(monkeypatch, 1, failed=["tests/test_a.py::test_a"])
    assert lines == ["make test: 400 s"]
    assert seconds.noted_runs() == {}
