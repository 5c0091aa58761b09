"""utils.failures: what ends a run, and the sentence of a worker that says how to fix it."""

import contextlib

import pyarrow as pa
import pytest
import ray
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
