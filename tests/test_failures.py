"""utils.failures: what ends a run, and what a worker says is to be mended."""

import pyarrow as pa
import pytest
import ray
from ray.train import ControllerError, WorkerGroupError

from utils import failures

pytestmark = pytest.mark.part02


def test_what_a_worker_says_is_wrong_is_found():
    bug, sentence = TypeError("a bug"), ValueError("a sentence")
    assert (
        failures.what_to_mend(WorkerGroupError("failed", {0: bug, 1: sentence}))
        is sentence
    )
    assert failures.what_to_mend(WorkerGroupError("failed", {0: bug})) is None
    # what a callback of the controller raised: then no worker was restarted
    assert failures.what_to_mend(ControllerError(sentence)) is sentence
    assert failures.what_to_mend(ControllerError(bug)) is None


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ValueError("a sentence"), True),
        (ray.exceptions.RayTaskError("f", "", OSError("a damaged page")), True),
        (ray.exceptions.RayTaskError("f", "", pa.ArrowInvalid("damaged")), True),
        (
            ray.exceptions.RayTaskError("f", "", ray.exceptions.UserCodeException()),
            True,
        ),
        (ray.exceptions.RayActorError(), False),
        (RuntimeError("Connection closed by peer"), False),  # a rank whose peer died
        (
            ray.exceptions.RayTaskError("f", "", ray.exceptions.NodeDiedError("lost")),
            False,
        ),
    ],
)
def test_bad_input_ends_a_run_and_a_death_does_not(error, ends):
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.as_instanceof_cause()
    errors = {0: RuntimeError("collateral"), 1: error}
    callback = failures.NoRestartOnBadInput()
    if ends:
        with pytest.raises(type(error)):
            callback.after_exception(None, errors)
    else:
        callback.after_exception(None, errors)
