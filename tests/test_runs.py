"""The folder of a run: which checkpoint counts, who saves there, and what is deleted."""

import argparse
import sys

import pytest

from utils import runs
from utils.errors import BadInput


def is_whole(checkpoint):
    return (checkpoint / "whole").exists()


@pytest.fixture
def checkpoints(tmp_path):
    """Return a folder with four checkpoints, of which the last one is cut off."""
    for number in (5, 10, 15, 20):
        folder = tmp_path / f"step-{number:06d}"
        folder.mkdir()
        (folder / ("half" if number == 20 else "whole")).write_bytes(bytes(10))
    return tmp_path


def test_the_newest_is_that_of_the_highest_number(tmp_path):
    assert runs.newest(tmp_path) is None
    for name in ("step-999950.pt", "step-1000000.pt", "step-x.pt", "other.pt"):
        (tmp_path / name).touch()
    assert runs.newest(tmp_path).name == "step-1000000.pt"
    runs.keep_newest(tmp_path, 1)
    assert not (tmp_path / "step-999950.pt").exists()
    assert (tmp_path / "step-1000000.pt").exists()


def test_a_checkpoint_that_is_not_whole_does_not_count(checkpoints):
    assert runs.newest(checkpoints, is_whole).name == "step-000015"


def test_the_newest_are_kept_and_what_a_killed_save_left_is_not(checkpoints, capsys):
    (checkpoints / ".step-000012.pt.tmp").write_bytes(bytes(10))
    (checkpoints / "notes.txt").touch()
    runs.keep_newest(checkpoints, 2, is_whole)
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {"step-000010", "step-000015", "notes.txt"}
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{checkpoints / 'step-000020'} does not count as whole: deleting it"


def test_what_cannot_be_deleted_does_not_count_as_kept(checkpoints, monkeypatch):
    delete, stays = runs._delete, checkpoints / "step-000020"
    monkeypatch.setattr(runs, "_delete", lambda path: path == stays or delete(path))
    runs.keep_newest(checkpoints, 1, is_whole)
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {"step-000015", stays.name}


def test_fresh_refuses_a_folder_that_holds_something(tmp_path):
    runs.prepare(tmp_path / "new", fresh=True)
    runs.prepare(tmp_path, fresh=False)
    with pytest.raises(BadInput, match=r"is not empty, and --fresh starts in an empty"):
        runs.prepare(tmp_path, fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_script_does_not_take_over_the_checkpoints_of_another_one(tmp_path):
    """It would take them for what a killed save has left, and delete them."""
    for script in ("train_fsdp2.py", "train_ddp.py"):  # one that saves nothing, and one
        runs.prepare(tmp_path, fresh=True, script=script)
        runs.claim(tmp_path, script, None)
    checkpoint = tmp_path / "step-000005.pt"
    checkpoint.touch()
    runs.prepare(tmp_path, fresh=False, script="train_ddp.py")
    with pytest.raises(BadInput, match=r"of train_ddp\.py, and this is train_fsdp2"):
        runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")

    (
        tmp_path / runs.OWNER
    ).unlink()  # as in a copy: it is of the script that can load it
    runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")
    with pytest.raises(BadInput, match=r"holds step-000005\.pt, and no whole checkp"):
        runs.claim(tmp_path, "train_fsdp2.py", None)
    runs.claim(tmp_path, "train_ddp.py", checkpoint)
    with pytest.raises(BadInput, match=r"of train_ddp\.py, and this is train_fsdp2"):
        runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")


def test_what_differs_from_the_run_in_a_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    args = argparse.Namespace(batch_size=32, lr=0.1, epochs=3)
    run = runs.defining(args, "batch_size", "lr")
    assert run == {"script": "train.py", "--batch-size": 32, "--lr": 0.1}
    runs.check_same(tmp_path, run, dict(run))
    for changes, sentence in (
        ({"--lr": 0.2}, r"with --lr 0.1, and this one has --lr 0.2: use"),
        ({"script": "other.py"}, r"with script train.py, and .* script other.py"),
    ):
        with pytest.raises(BadInput, match=sentence):
            runs.check_same(tmp_path, run, run | changes)


@pytest.mark.parametrize(
    ("done", "line"),
    [
        ([None], "starts anew: D holds no checkpoint yet"),
        (["epoch 3"], "goes on after epoch 3 of D"),
        (
            ["epoch 3", True],
            "nothing is left to train after epoch 3 of D: ask for more",
        ),
        (
            ["epoch 3", False, 64],
            "goes on after epoch 3 of D, and 64 images of the next",
        ),
    ],
)
def test_one_line_says_where_a_run_begins(done, line, tmp_path):
    assert runs.begin(tmp_path / "D", *done) == line
