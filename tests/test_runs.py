"""What stands in the folder of a run: which checkpoint counts, whose it is, what goes."""

import argparse
import sys

import pytest

from utils import runs
from utils.errors import BadInput


def test_the_newest_is_that_of_the_highest_number(tmp_path):
    assert runs.newest(tmp_path) is None
    for name in ("step-999950.pt", "step-1000000.pt", "step-x.pt", "other.pt"):
        (tmp_path / name).touch()
    assert runs.newest(tmp_path).name == "step-1000000.pt"


def test_a_checkpoint_that_is_not_whole_does_not_count(tmp_path):
    for number in (5, 10):
        (tmp_path / f"step-{number:06d}").mkdir()
    (tmp_path / "step-000005" / "whole").touch()
    found = runs.newest(tmp_path, lambda path: (path / "whole").exists())
    assert found.name == "step-000005"


def test_the_newest_are_kept_and_what_a_killed_save_left_is_not(tmp_path, capsys):
    for number in (5, 10, 15, 20):
        (tmp_path / f"step-{number:06d}").mkdir()
        (tmp_path / f"step-{number:06d}" / "weights").write_bytes(bytes(10))
        if number < 20:
            (tmp_path / f"step-{number:06d}" / "whole").touch()
    (tmp_path / ".step-000012.pt.tmp").write_bytes(bytes(10))
    (tmp_path / "notes.txt").touch()
    runs.keep_newest(tmp_path, 2, lambda path: (path / "whole").exists())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000010", "step-000015", "notes.txt"}
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{tmp_path / 'step-000020'} does not count as whole: deleting it"


def test_files_go_as_folders_do(tmp_path):
    for number in range(4):
        (tmp_path / f"step-{number}.pt").touch()
    runs.keep_newest(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3.pt"]
    for number in (999950, 1000000):  # as texts, the other way round
        (tmp_path / f"step-{number}.pt").touch()
    runs.keep_newest(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1000000.pt"]


def test_fresh_refuses_a_folder_that_holds_something(tmp_path):
    runs.prepare(tmp_path / "new", fresh=True)
    runs.prepare(tmp_path, fresh=False)
    with pytest.raises(BadInput, match=r"is not empty, and --fresh starts in an empty"):
        runs.prepare(tmp_path, fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_belongs_to_the_script_that_saves_there(tmp_path):
    """Another one would take its checkpoints for what a killed save has left."""
    for _ in range(2):
        runs.prepare(tmp_path, fresh=False, script="train_ddp.py")
        # the second time, as after a kill in its first save
        runs.claim(tmp_path, "train_ddp.py", None)
        (tmp_path / "step-000005.pt").touch()
    with pytest.raises(BadInput, match=r"of train_ddp\.py, and this is train_fsdp2"):
        runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")
    (tmp_path / runs.OWNER).unlink()
    (tmp_path / runs.OWNER).mkdir()
    with pytest.raises(BadInput, match=r"script cannot be read .Is a directory.: name"):
        runs.prepare(tmp_path, fresh=False, script="train_ddp.py")


def test_what_nobody_has_claimed_is_of_whoever_can_load_it(tmp_path):
    """As what was copied from another folder, or is of a version without that file."""
    checkpoint = tmp_path / "step-000005.pt"
    checkpoint.touch()
    runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")
    with pytest.raises(
        BadInput, match=r"holds step-000005\.pt, and no whole checkpoint"
    ):
        runs.claim(tmp_path, "train_fsdp2.py", None)
    runs.prepare(tmp_path, fresh=False, script="train_ddp.py")
    runs.claim(tmp_path, "train_ddp.py", checkpoint)
    with pytest.raises(BadInput, match=r"of train_ddp\.py, and this is train_fsdp2"):
        runs.prepare(tmp_path, fresh=False, script="train_fsdp2.py")


def test_a_folder_in_which_nothing_was_saved_is_free(tmp_path):
    for script in ("train_ddp.py", "train_fsdp2.py"):
        runs.prepare(tmp_path, fresh=True, script=script)
        runs.claim(tmp_path, script, None)
    (tmp_path / "log.txt").touch()
    runs.prepare(tmp_path, fresh=False, script="train_deepspeed.py")


def test_what_cannot_be_deleted_does_not_count_as_kept(tmp_path, monkeypatch):
    for number in (5, 10, 15):
        (tmp_path / f"step-{number:06d}").mkdir()
        if number < 15:
            (tmp_path / f"step-{number:06d}" / "whole").touch()
    delete = runs._delete
    stays = tmp_path / "step-000015"
    monkeypatch.setattr(runs, "_delete", lambda path: path == stays or delete(path))
    runs.keep_newest(tmp_path, 1, lambda path: (path / "whole").exists())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000010", stays.name}


def test_what_differs_from_the_run_in_a_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    args = argparse.Namespace(batch_size=32, lr=0.1, epochs=3)
    run = runs.defining(args, "batch_size", "lr")
    assert run == {"script": "train.py", "--batch-size": 32, "--lr": 0.1}
    runs.check_same(tmp_path, run, dict(run))
    with pytest.raises(
        BadInput, match=r"with --lr 0.1, and this one has --lr 0.2: use"
    ):
        runs.check_same(tmp_path, run, run | {"--lr": 0.2})
    with pytest.raises(BadInput, match=r"with script train.py, and .* script other.py"):
        runs.check_same(tmp_path, run, run | {"script": "other.py"})


@pytest.mark.parametrize(
    ("done", "line"),
    [
        ((None,), "starts anew: D holds no checkpoint yet"),
        (("epoch 3",), "goes on after epoch 3 of D"),
        (
            ("epoch 3", True),
            "nothing is left to train after epoch 3 of D: ask for more",
        ),
        (
            ("epoch 3", False, 64),
            "goes on after epoch 3 of D, and 64 images of the next",
        ),
    ],
)
def test_one_line_says_where_a_run_begins(done, line, tmp_path):
    assert runs.begin(tmp_path / "D", *done) == line
