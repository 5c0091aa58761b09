"""A correction of a lesson reaches a class, and nobody loses an answer to it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S

GUIDE = (ROOT / "docs" / "teaching.md").read_text()
COMMAND = re.search(r"^\.venv/bin/gitpuller (.+)$", GUIDE, re.MULTILINE)[1]


def run(folder: Path, command: str) -> str:
    who = "git -c user.name=a -c user.email=a@b.c"
    command = command.replace("git commit", f"{who} commit")
    return subprocess.check_output(
        command, shell=True, cwd=folder, text=True, timeout=TIMEOUT_S
    )


def write(folder: Path, *cells: tuple[str, str]) -> None:
    """Write the lesson: of each cell its source, and what it printed."""
    made = []
    for number, (source, printed) in enumerate(cells):
        outputs = [new_output("stream", text=printed)] if printed else []
        made.append(new_code_cell(source, id=f"cell-{number}", outputs=outputs))
    nbformat.write(new_notebook(cells=made), folder / "lesson.ipynb")


def read(folder: Path) -> list[tuple[str, str]]:
    cells = nbformat.read(folder / "lesson.ipynb", as_version=4).cells
    return [(c.source, "".join(o.text for o in c.outputs)) for c in cells]


@pytest.fixture
def learner(tmp_path, monkeypatch) -> Path:
    """Return a clone with an answer, made before a correction."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    write(theirs, ("a = 1", ""), ("a", "1\n"), ("answer = ...", ""))
    run(theirs, "git init -q -b main && git add -A && git commit -q -m lessons")
    run(tmp_path, f"git clone -q '{theirs.as_uri()}' mine")
    write(mine, ("a = 1", ""), ("a", "mine\n"), ("answer = 42", "Right!\n"))
    write(theirs, ("a = 2", ""), ("a", "1\n"), ("answer = None", ""))
    run(theirs, "git commit -q -a -m corrected")
    return mine


def test_a_correction_arrives_and_answers_and_outputs_stay(learner):
    run(learner, f"'{sys.executable}' -m nbgitpuller.pull {COMMAND}")
    assert read(learner) == [
        ("a = 2", ""),
        ("a", "mine\n"),
        ("answer = 42", "Right!\n"),
    ]


def test_without_a_network_nothing_changes(learner):
    before = read(learner)
    run(learner, "git remote set-url origin file:///nowhere")
    with pytest.raises(subprocess.CalledProcessError):
        run(learner, f"'{sys.executable}' -m nbgitpuller.pull {COMMAND}")
    assert read(learner) == before
    assert run(learner, "git log --format=%s") == "lessons\n"
