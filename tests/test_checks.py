"""A wrong answer gets a hint, whatever it is; never a traceback."""

import pytest
import torch

from utils import checks


@pytest.fixture(autouse=True)
def one_exercise(monkeypatch):
    exercise = checks.Exercise(lambda answer: answer == 64, "Two ranks, 32 each.")
    monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise})


def reply(answer, capsys):
    assert checks.check("01.1", answer) is None
    return capsys.readouterr().out


def test_right_answer(capsys):
    assert reply(64, capsys) == "Right!\n"
    assert reply(torch.tensor(64), capsys) == "Right!\n"


def test_wrong_answer_gets_the_hint(capsys):
    assert reply(32, capsys) == "Not yet. Two ranks, 32 each.\n"
    assert reply(None, capsys) == "Not yet. Two ranks, 32 each.\n"


def test_answer_that_raises_gets_the_hint(capsys):
    said = reply(torch.zeros(2), capsys)  # two booleans are not one
    assert said.startswith("Not yet (RuntimeError: ")
    assert said.endswith("Two ranks, 32 each.\n")
    assert said.count("\n") == 1


def test_no_answer_yet(capsys):
    assert "replace the three dots" in reply(..., capsys)


def test_unknown_exercise_names_those_there_are():
    with pytest.raises(ValueError, match=r"No exercise '9\.9': choose from 01\.1\."):
        checks.check("9.9", 1)
