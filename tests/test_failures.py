"""utils.failures: what ends a run, and the sentence of a worker that says how to fix it."""

import contextlib
import json

import pyarrow as pa
import pytest
import ray
import torch
from ray.train import ControllerError, WorkerGroupError

from utils import failures
from utils.errors import BadInput


def task_error(cause):
    return ray.exceptions.RayTaskError("f", "", cause).as_instanceof_cause()


GLOO = (  # as Ray 2.60 and torch 2.15 put it, on two machines (tests/test_nodes.py)
    "Gloo connectFullMesh failed with [third_party/gloo/transport/tcp/pair.cc:152] "
    "timed out connecting: SO_ERROR: Connection refused, remote=[{}]:36265$0"
)
BUG, SENTENCE = ValueError("a bug"), BadInput("a sentence")


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (WorkerGroupError("failed", {0: BUG, 1: SENTENCE}), "a sentence"),
        (WorkerGroupError("failed", {0: BUG}), None),
        # what a callback of the controller raised: then no worker was restarted
        (ControllerError(SENTENCE), "a sentence"),
        (ControllerError(BUG), None),
        # of a task; Ray Data adds lines about retries
        (
            WorkerGroupError("f", {0: task_error(BadInput("a sentence\nAttempt 1/1"))}),
            "a sentence",
        ),
        # nodes whose host name stands for 127..., and nodes that are only too slow
        (
            WorkerGroupError("failed", {1: RuntimeError(GLOO.format("127.0.1.1"))}),
            failures.LOOPBACK,
        ),
        (
            WorkerGroupError("failed", {1: RuntimeError(GLOO.format("10.0.0.2"))}),
            None,
        ),
    ],
)
def test_the_bad_input_behind_a_failed_run_is_found(failure, found):
    problem = failures.bad_input_behind(failure)
    assert (problem and str(problem)) == found
    assert problem is None or type(problem) is BadInput


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (SENTENCE, True),
        (task_error(SENTENCE), True),
        (ValueError("of somebody's own train_fn"), False),
        (task_error(ValueError("of a map_batches")), False),
        (task_error(OSError("a damaged page")), False),
        (OSError(28, "No space left on device"), False),  # a disk may get room again
        (ray.exceptions.RayActorError(), False),
        (RuntimeError("Connection closed by peer"), False),  # a rank whose peer died
        (task_error(ray.exceptions.NodeDiedError("lost")), False),
    ],
)
def test_bad_input_ends_a_run_and_a_death_does_not(error, ends):
    errors = {0: RuntimeError("collateral"), 1: error}
    callback = failures.NoRestartOnBadInput()
    with pytest.raises(type(error)) if ends else contextlib.nullcontext():
        callback.after_exception(None, errors)


@pytest.fixture
def no_shutdown(monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    return ended


def test_a_run_ends_with_the_sentence_below_all_logs(no_shutdown):
    failure = WorkerGroupError("failed", {0: BadInput("a sentence")})
    with pytest.raises(BadInput, match="a sentence") as raised:
        with failures.in_a_sentence():
            raise failure
    assert raised.value.__cause__ is failure
    assert no_shutdown == [True]


def test_a_bug_keeps_its_traceback(no_shutdown):
    for bug in (TypeError("a bug"), ValueError("a bug"), OSError("a bug")):
        failure = WorkerGroupError("failed", {0: bug})
        with pytest.raises(WorkerGroupError), failures.in_a_sentence():
            raise failure


@pytest.mark.parametrize(
    ("error", "read"),
    [
        (task_error(OSError("a damaged page")), True),
        (task_error(pa.ArrowInvalid("a damaged page")), True),
        (task_error(BadInput("An image is corrupt")), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_only_what_a_task_could_not_read_has_the_data_read_again(
    error, read, no_shutdown
):
    """Else a full disk, or a missing folder to resume, would cost a pass over all data."""
    again = []
    with pytest.raises((BadInput, WorkerGroupError)):
        with failures.in_a_sentence(lambda: again.append(True)):
            raise WorkerGroupError("failed", {0: error})
    assert again == [True] * read


def test_a_killed_first_save_is_removed_and_nothing_else(tmp_path):
    """Ray has no list then; with one, tests/test_stopping.py removes what it lacks."""
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "checkpoint.pt").write_bytes(b"half")
    (tmp_path / ".saving-1").mkdir()
    (tmp_path / ".saving-1" / "checkpoint.pt").write_bytes(b"half")
    (tmp_path / "stop").touch()
    whole = tmp_path / "checkpoint_2"
    whole.mkdir()
    torch.save({}, whole / "checkpoint.pt")  # of a run whose list somebody lost
    failures.remove_cut_off(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"stop", "checkpoint_2"}
    failures.remove_cut_off(tmp_path / "not there")


@pytest.mark.parametrize("found", [True, False])
def test_a_list_of_checkpoints_that_does_not_fit_is_a_sentence(found, tmp_path):
    """As where somebody deleted a checkpoint that a sentence had called damaged."""
    if found:
        (tmp_path / "checkpoint_2").mkdir()
    gone = {"checkpoint_dir_name": "checkpoint_1", "metrics": {}}
    state = {"ray_version": ray.__version__, "current_report_index": 1}
    state |= {"checkpoint_results": [gone], "checkpoint_report_indices": [0]}
    for name in ("pending_training_results", "pending_validation_specs"):
        state[name] = []
    for name in ("validated", "timed_out_validation", "failed_validation"):
        state[f"{name}_checkpoint_dir_names"] = []
    cut_off = json.dumps(state)[:-1]
    for text, cause in (
        (json.dumps(state), "not exist anymore"),
        (json.dumps({"ray_version": "2.1.0"}), "saved with Ray version 2.1.0"),
        (cut_off, "Expecting"),
    ):
        (tmp_path / "checkpoint_manager_snapshot.json").write_text(text)
        with pytest.raises(BadInput, match=r"fit \(.*or delete .* to") as problem:
            failures.remove_cut_off(tmp_path)
        assert cause in str(problem.value)
        assert str(problem.value).count(". ") == 0  # one sentence
    assert (tmp_path / "checkpoint_2").exists() == found
