"""What runs of tests cost is noted, and no longer told once the code has changed."""

import pytest

from tests import notebooks, seconds


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
