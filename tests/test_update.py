"""make update: a correction arrives, and nothing of the learner's is lost.

With real repositories: one to fetch from, and a learner's clone of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.readme import typed
from tests.tools import update
from tests.tools.notebooks import ROOT
from utils.errors import BadInput

LESSON = "01-part/01_lesson.ipynb"
AS_WHO = ["-c", "user.name=A Name", "-c", "user.email=a@b.c"]


@pytest.fixture(autouse=True)
def only_this_configuration(monkeypatch, tmp_path):
    """Keep out the settings of whoever runs the tests."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(tmp_path / "none"))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *AS_WHO, *arguments]
    return subprocess.check_output(
        command, cwd=folder, text=True, stderr=subprocess.STDOUT, timeout=PATIENCE
    )


def cell(name, source, output=None):
    found = {"cell_type": "code", "id": name, "metadata": {}, "source": [source]}
    printed = [{"name": "stdout", "output_type": "stream", "text": [output]}]
    return found | {"execution_count": None, "outputs": printed if output else []}


def write(folder, *cells, path=LESSON):
    file = folder / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))


def read(folder, path=LESSON):
    """Return ids, sources and outputs of a notebook's cells."""
    cells = json.loads((folder / path).read_text())["cells"]
    return [
        (c["id"], "".join(c["source"]), *(o["text"][0] for o in c.get("outputs", [])))
        for c in cells
    ]


def commit(folder, message="a correction"):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


@pytest.fixture
def theirs(tmp_path) -> Path:
    """Return the workshop's repository."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    write(folder, cell("a", "1", "one"), cell("b", "2", "two"), cell("c", "...", "-"))
    (folder / "script.py").write_text("first\n\n\n\n\nlast\n")
    (folder / ".gitignore").write_text("build/\n*-mine.*\n")
    commit(folder, "lessons")
    return folder


@pytest.fixture
def mine(theirs, tmp_path) -> Path:
    """Return a learner's clone."""
    git(tmp_path, "clone", "--quiet", theirs.as_uri(), "mine")
    return tmp_path / "mine"


def correct(theirs):
    """Correct the second cell of the lesson, and the end of the script."""
    write(theirs, cell("a", "1", "one"), cell("b", "22", "TWO"), cell("c", "...", "-"))
    (theirs / "script.py").write_text("first\n\n\n\n\nthe end\n")
    commit(theirs)


def edit(mine):
    """Execute the lesson, answer an exercise, add a cell, and change the script."""
    own = cell("d", "my own", "note")
    write(
        mine, cell("a", "1", "1!"), own, cell("b", "2", "2!"), cell("c", "7", "right")
    )
    (mine / "script.py").write_text("FIRST\n\n\n\n\nlast\n")


def test_a_correction_arrives_and_answers_outputs_and_own_cells_stay(theirs, mine):
    correct(theirs)
    edit(mine)
    said = update.update(mine)
    assert read(mine) == [
        ("a", "1", "1!"),
        ("d", "my own", "note"),
        ("b", "22", "TWO"),
        ("c", "7", "right"),
    ]
    assert (mine / "script.py").read_text() == "FIRST\n\n\n\n\nthe end\n"
    assert git(mine, "rev-parse", "HEAD") == git(theirs, "rev-parse", "HEAD")
    assert any(line.startswith(f"{LESSON}: corrected, and your") for line in said)
    # what was there, whole
    (kept,) = (mine / "build" / "before-update").iterdir()
    assert read(kept)[2] == ("b", "2", "2!")
    before = read(mine)
    assert update.update(mine) == ["Nothing to update: this is the newest version."]
    assert read(mine) == before


def test_where_both_changed_a_cell_both_are_there(theirs, mine):
    correct(theirs)
    write(mine, cell("a", "1"), cell("b", "2 by me", "2!"), cell("c", "..."))
    update.update(mine)
    assert read(mine)[1:4] == [
        ("b", "2 by me", "2!"),
        ("b-note", update.CORRECTED),
        ("b-corrected", "22", "TWO"),
    ]


def test_a_cell_that_both_change_is_corrected_again_and_again(theirs, mine):
    """The newest correction is there, once, and what the learner wrote stays."""

    def corrected_to(source):
        write(theirs, cell("a", "1"), cell("b", source), cell("c", "..."))
        commit(theirs)
        update.update(mine)
        return [(name, source) for name, source, *_ in read(mine)[1:-1]]

    def write_into(name, source):
        notebook = json.loads((mine / LESSON).read_text())
        (found,) = [c for c in notebook["cells"] if c["id"] == name]
        found["source"] = [source]
        (mine / LESSON).write_text(json.dumps(notebook))

    own, note, more = ("b", "2 by me"), ("b-note", update.CORRECTED), ("d", "my own")
    write(mine, cell("a", "1"), cell(*own), cell(*more), cell("c", "..."))
    assert corrected_to("22") == [own, note, ("b-corrected", "22"), more]
    assert corrected_to("222") == [own, note, ("b-corrected", "222"), more]
    write_into("b-corrected", "222 by me")  # it becomes the learner's own
    tried = [("b-corrected", "222 by me"), more]
    assert corrected_to("3") == [own, note, ("b-corrected-2", "3"), *tried]
    write_into("b", "3")  # the correction is taken over
    assert corrected_to("4") == [("b", "4"), ("b-corrected-2", "3"), *tried]
    assert not list(mine.glob("01-part/*-mine*"))


def test_a_cell_that_was_deleted_comes_back_if_it_is_corrected(theirs, mine):
    correct(theirs)
    write(mine, cell("c", "7"))
    update.update(mine)
    assert [name for name, *_ in read(mine)] == ["b", "c"]


def test_cells_that_come_and_go(theirs, mine):
    write(theirs, cell("a", "1"), cell("new", "3"), cell("c", "..."))
    commit(theirs)
    write(mine, cell("b", "2, mine"), cell("c", "7"))  # "a" was deleted
    update.update(mine)
    assert [name for name, *_ in read(mine)] == ["b", "new", "c"]
    write(theirs, cell("a", "1"), cell("new", "3"))
    commit(theirs)
    write(mine, cell("new", "3", "3!"), cell("c", "..."))  # "c" as it was
    update.update(mine)
    assert read(mine) == [("new", "3", "3!")]


def test_files_that_do_not_fit_in_stand_beside(theirs, mine):
    correct(theirs)
    (theirs / "new.txt").write_text("theirs")
    commit(theirs)
    (mine / "script.py").write_text("first\n\n\n\n\nMY END\n")
    (mine / "new.txt").write_text("mine")
    (mine / LESSON).write_text("no notebook any more")
    update.update(mine)
    assert (mine / "script.py").read_text().endswith("the end\n")
    assert (mine / "script-mine.py").read_text().endswith("MY END\n")
    assert (mine / "new.txt").read_text() == "theirs"
    assert (mine / "new-mine.txt").read_text() == "mine"
    assert (mine / "01-part/01_lesson-mine.ipynb").read_text() == "no notebook any more"
    assert read(mine)[1] == ("b", "22", "TWO")


def test_notebooks_without_ids_stand_beside(theirs, mine):
    correct(theirs)
    nameless = cell("a", "by me")
    del nameless["id"]
    write(mine, nameless)
    update.update(mine)
    assert read(mine)[1] == ("b", "22", "TWO")
    assert "by me" in (mine / "01-part/01_lesson-mine.ipynb").read_text()


def test_what_the_workshop_drops_stays_if_it_was_edited(theirs, mine):
    git(theirs, "rm", "--quiet", LESSON, "script.py")
    commit(theirs)
    (mine / "script.py").write_text("mine")
    update.update(mine)
    assert not (mine / LESSON).exists()
    assert (mine / "script.py").read_text() == "mine"


def test_files_that_nobody_touched_keep_their_mode(theirs, mine):
    (theirs / "script.py").write_text("changed")
    (theirs / "script.py").chmod(0o755)
    commit(theirs)
    update.update(mine)
    assert os.access(mine / "script.py", os.X_OK)
    assert git(mine, "status", "--porcelain") == ""


def test_own_commits_are_kept_in_a_branch(theirs, mine):
    correct(theirs)
    edit(mine)
    commit(mine, "my answers")
    own = git(mine, "rev-parse", "HEAD").strip()
    said = update.update(mine)
    assert read(mine)[2:] == [("b", "22", "TWO"), ("c", "7", "right")]
    assert git(mine, "rev-parse", f"mine-{own[:10]}").strip() == own
    assert any(f"mine-{own[:10]}" in line for line in said)


@pytest.mark.parametrize("kind", ["detached", "shallow"])
def test_a_clone_that_stands_on_a_commit_or_has_no_history(
    kind, theirs, mine, tmp_path
):
    if kind == "shallow":
        (theirs / "script.py").write_text("a second version\n")
        commit(theirs)
        mine = tmp_path / "shallow"
        git(tmp_path, "clone", "--quiet", "--depth=1", theirs.as_uri(), mine.name)
    else:
        git(mine, "checkout", "--quiet", "--detach")
    correct(theirs)
    write(mine, cell("a", "1", "1!"), cell("b", "2"), cell("c", "7", "right"))
    update.update(mine)
    assert read(mine) == [("a", "1", "1!"), ("b", "22", "TWO"), ("c", "7", "right")]
    branches = git(mine, "branch", "--list", "mine-*")
    assert branches == ""  # there were no commits to keep


def unchanged(mine, sentence):
    """Check that nothing is changed, and that one sentence says why."""
    before = {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    with pytest.raises(BadInput, match=sentence):
        update.update(mine)
    after = {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    for found in (before, after):
        for path in [path for path in found if path.name == "FETCH_HEAD"]:
            del found[path]
    assert before == after


def test_without_a_network_nothing_is_changed(theirs, mine):
    edit(mine)
    theirs.rename(theirs.with_name("away"))
    unchanged(mine, "The correction cannot be fetched; git says: ")


def test_a_folder_that_is_no_clone(tmp_path, monkeypatch):
    folder = tmp_path / "unpacked"
    folder.mkdir()
    unchanged(folder, "is not a clone of git")
    monkeypatch.setenv("PATH", str(folder))
    unchanged(folder, "git is not installed")


def test_a_clone_that_follows_nothing_or_is_in_the_middle_of_a_merge(theirs, mine):
    git(mine, "checkout", "--quiet", "-b", "own")
    git(mine, "remote", "set-head", "origin", "--delete")
    unchanged(mine, "follows no branch")
    git(mine, "checkout", "--quiet", "main")
    correct(theirs)
    (mine / "script.py").write_text("mine")
    commit(mine)
    subprocess.run(
        ["git", *AS_WHO, "pull", "--quiet", "--no-rebase"],
        cwd=mine,
        capture_output=True,
        timeout=PATIENCE,
    )
    unchanged(mine, "merge or rebase is not finished")


@pytest.mark.runs("make update")
def test_the_command_says_what_it_did(theirs, mine):
    """In a clone that has the Makefile and the tool, as every clone of the workshop has."""
    for path in ("Makefile", "tests/__init__.py", "tests/tools", "utils"):
        (theirs / path).parent.mkdir(exist_ok=True)
        (theirs / path).symlink_to(ROOT / path)
    (theirs / "requirements.txt").write_text("")
    commit(theirs)
    git(mine, "pull", "--quiet")
    correct(theirs)
    (theirs / "requirements.txt").write_text("numpy\n")
    commit(theirs)
    edit(mine)
    done = subprocess.run(
        [*typed("make update"), f"PYTHON={sys.executable}"],
        cwd=mine,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "The packages have changed: run `make setup`." in done.stdout
    assert done.stdout.endswith("without saving, and open them again.\n")
    assert read(mine)[2] == ("b", "22", "TWO")
