"""The folder of a run of Ray Train: what stays, what goes, and how the run ended."""

import argparse
import json
import os
import signal
from pathlib import Path

import pytest
import ray
import torch

from utils import ray_runs, runs
from utils.errors import BadInput

NAMES = [f"checkpoint_2026-11-30_10-00-0{n}.000000" for n in range(10)]


def a_checkpoint(folder: Path) -> None:
    folder.mkdir()
    torch.save({}, folder / "checkpoint.pt")


def test_a_killed_first_save_is_removed_and_nothing_else(tmp_path):
    """Ray has no list then, and gets one of what is whole: its next run begins there."""
    for name in (NAMES[1], ".saving-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").write_bytes(b"half")
    (tmp_path / "stop").touch()
    (tmp_path / "checkpoint_best").mkdir()  # of another program
    a_checkpoint(tmp_path / NAMES[2])  # killed before Ray noted it
    a_checkpoint(tmp_path / NAMES[0])
    for _ in range(2):  # the second time there is a list
        ray_runs.clean(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            *("stop", "checkpoint_best", ray_runs.LIST),
            *(NAMES[0], NAMES[2]),
        }
        result = ray.train.Result.from_path(tmp_path)
        assert Path(result.checkpoint.path).name == NAMES[2]
    ray_runs.clean(tmp_path / "not there")


def snapshot(*names: str) -> dict:
    """Return Ray's list of these checkpoints."""
    results = [{"checkpoint_dir_name": name, "metrics": {}} for name in names]
    state = {"ray_version": ray.__version__, "current_report_index": len(names)}
    state |= {"checkpoint_results": results, "latest_checkpoint_result": results[-1]}
    state["checkpoint_report_indices"] = [*range(len(names))]
    for name in ("pending_training_results", "pending_validation_specs"):
        state[name] = []
    for name in ("validated", "timed_out_validation", "failed_validation"):
        state[f"{name}_checkpoint_dir_names"] = []
    return state


@pytest.mark.parametrize("gone", [NAMES[3], NAMES[1], "both"])
def test_a_checkpoint_that_somebody_deleted_leaves_the_list(gone, tmp_path):
    """As a sentence says of one that is damaged: the newest that is whole is next."""
    listed = [NAMES[1], NAMES[2], NAMES[3]]
    (tmp_path / ray_runs.LIST).write_text(json.dumps(snapshot(*listed)))
    left = [n for n in listed[:2] if n != gone] if gone != NAMES[1] else listed[1:]
    left = left[1:] if gone == "both" else left
    for name in left:
        a_checkpoint(tmp_path / name)
    a_checkpoint(tmp_path / NAMES[9])  # which Ray never took
    ray_runs.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_2*")) == left
    result = ray.train.Result.from_path(tmp_path)
    found = [Path(each.path).name for each, _ in result.best_checkpoints]
    assert found == left and Path(result.checkpoint.path).name == left[-1]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (json.dumps({"ray_version": "2.1.0"}), "checkpoint_results"),
        (
            json.dumps(snapshot(NAMES[2]) | {"ray_version": "2.1.0", "x": 1})[:-1],
            "",
        ),
        ("[]", "list indices"),
    ],
)
def test_a_list_of_checkpoints_that_does_not_fit_is_a_sentence(text, cause, tmp_path):
    a_checkpoint(tmp_path / NAMES[2])
    (tmp_path / ray_runs.LIST).write_text(text)
    with pytest.raises(BadInput, match=r"fit \(.*or delete .* to") as problem:
        ray_runs.clean(tmp_path)
    assert cause in str(problem.value)
    assert str(problem.value).count(". ") == 0  # one sentence
    assert (tmp_path / NAMES[2]).exists()


@pytest.mark.parametrize(
    ("checkpoint_dir", "sentence"),
    [
        (
            None,
            "stopped in epoch 2: the last checkpoint is in a/b, but the same command",
        ),
        (
            Path("a"),
            "stopped in epoch 2: saved, and the same command goes on from there",
        ),
    ],
)
def test_a_stopped_run_says_what_was_saved(checkpoint_dir, sentence, capsys):
    says = "stopped in epoch 2: saved, and the same command goes on from there"
    report = {"stopped": True, "says": says}
    checkpoint = argparse.Namespace(path="a/b")
    result = argparse.Namespace(return_value=report, checkpoint=checkpoint)
    with pytest.raises(SystemExit) as ended:
        ray_runs.end(result, checkpoint_dir)
    assert ended.value.code == runs.EXIT_STATUS
    assert sentence in capsys.readouterr().out


def test_thirty_people_who_start_together_get_thirty_runs(tmp_path, monkeypatch):
    """On one disk, within the same second."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    monkeypatch.setattr(ray_runs.time, "strftime", lambda _: "now")
    assert len({ray_runs.folder_of("train", None) for _ in range(30)}) == 30


def test_sigterm_is_passed_on_once(tmp_path):
    (tmp_path / "stop").touch()  # of a run that was killed while it stopped
    file = ray_runs.StopFile(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with ray_runs.passed_on(file):
        assert not file.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert file.exists()
        assert signal.getsignal(signal.SIGTERM) == before
    assert not file.exists()
