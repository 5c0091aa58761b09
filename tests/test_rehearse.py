"""The rehearsal: each lesson in each seat, and a table that says where one failed."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

from tests.tools import notebooks, rehearse
from tests.tools.rehearse import Outcome, Seat
from utils.errors import BadInput

LESSON = "01-part/01_tiny.ipynb"


def seat(folder: Path, source: str) -> Path:
    """Return a clone with one lesson and an environment, whose path may have a space."""
    (folder / "01-part").mkdir(parents=True)
    for name in ("tests", "utils", "README.md", "requirements.txt", "pyproject.toml"):
        (folder / name).symlink_to(notebooks.ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    cells = [nbformat.v4.new_markdown_cell("# Tiny")]
    cells.append(nbformat.v4.new_code_cell(source))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / LESSON)
    return folder


@pytest.mark.covers(
    "make rehearse SEATS=seats.txt",
    ".venv/bin/python -m tests.tools.rehearse seats.txt --lessons 02/01 02/02",
)
@pytest.mark.weekly
def test_two_seats_one_of_which_fails(tmp_path, monkeypatch, capsys):
    good = seat(tmp_path / "a seat", "print('Proved: it runs')")
    bad = seat(tmp_path / "bad", "1 / 0")
    listed = tmp_path / "seats.txt"
    listed.write_text(f"{good}  # the first\n\n env A=1 :: {bad}\n")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setattr(notebooks, "ROOT", good)
    # a doctor that is quick, and not well in one of the two
    call = rehearse.call

    def quick(seat, module, seconds):
        if module == "utils.doctor":
            ill = seat.folder == str(bad)
            return (2, "FAIL  memory: too little\n", 1.0) if ill else (0, "", 1.0)
        return call(seat, module, seconds)

    monkeypatch.setattr(rehearse, "call", quick)
    monkeypatch.setattr(sys, "argv", ["rehearse", str(listed)])
    assert rehearse.main() == 1
    printed = capsys.readouterr().out
    assert "| seat | doctor | 01/01 |" in printed
    assert re.search(rf"^\| {good} \| 1 s \| \d+ s \|$", printed, re.M)
    row = f"| env A=1 {bad} | **FAILED** | **FAILED** |"
    assert row in printed
    assert re.search(
        rf"{bad}, 01/01: {LESSON}, cell 1: ZeroDivisionError: division by zero", printed
    )
    said = "doctor: ask an administrator: FAIL  memory: too little"
    assert said in printed
    assert (good / "build/notebooks" / LESSON).exists()  # a copy was executed


def test_a_seat_that_cannot_be_reached(tmp_path, capsys):
    for lost in (Seat(str(tmp_path / "gone")), Seat("w", ("no-such-command",))):
        found = rehearse.rehearse(lost, [LESSON], 1)
        assert not any(outcome.well for outcome in found.values())
        assert found[LESSON].said


def test_a_seat_that_does_not_answer(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    status, said, _ = rehearse.call(Seat("w", (str(slow),)), "utils.doctor", 0.2)
    assert status == 124
    assert said.startswith("no answer in")


def test_what_a_line_of_the_list_says():
    text = "kubectl exec -i jupyter-ann -- :: ~/work shop # hers\n# nobody\n/srv/w\n"
    command = ("kubectl", "exec", "-i", "jupyter-ann", "--")
    assert rehearse.seats(text) == [Seat("~/work shop", command), Seat("/srv/w")]
    assert rehearse.quoted("~/work shop") == "~/'work shop'"
    with pytest.raises(BadInput, match="'ssh a ::' ends without the folder"):
        rehearse.seats("ssh a ::")
    with pytest.raises(BadInput, match="No seat is listed"):
        rehearse.seats("# nothing\n")


def test_lessons_are_named_like_in_the_readme():
    assert rehearse.chosen(["02/01"]) == ["02-ddp-pytorch-ray/01_ray_core.ipynb"]
    assert len(rehearse.chosen([])) == len(notebooks.all_notebooks())
    with pytest.raises(BadInput, match=r"no lesson 02/99: name some of 01/01, "):
        rehearse.chosen(["02/99"])


def test_the_table_says_the_seconds():
    found = {Seat("w"): {"doctor": Outcome(True, 2, ""), LESSON: Outcome(True, 61, "")}}
    assert rehearse.table(found).splitlines()[-1] == "| w | 2 s | 61 s |"
