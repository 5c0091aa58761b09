"""What failed in a run of Ray Train, and whether a sentence says how to mend it."""

import pyarrow as pa
import ray
from ray.train import UserCallback


class NoRestartOnBadInput(UserCallback):
    """For `RunConfig(callbacks=[...])`: a restart is for workers that died.

    Bad input, for which a worker raises a ValueError, or which a task of Ray Data cannot
    read or decode, would fail again: the run ends at once, although `FailureConfig` allows
    a restart.
    """

    def after_exception(self, run_context, worker_exceptions) -> None:
        """Raises the first such error. Runs in Ray Train's controller."""
        unreadable = (OSError, pa.ArrowException, ray.exceptions.UserCodeException)
        for error in worker_exceptions.values():
            in_task = isinstance(error, ray.exceptions.RayTaskError)
            if isinstance(error, ValueError) or (
                in_task and isinstance(error.cause, (ValueError, *unreadable))
            ):
                raise error


def what_to_mend(failure: Exception) -> Exception | None:
    """The error of a worker that says in a sentence what is wrong, if one failed so.

    Args:
        failure: what `TorchTrainer.fit` raised, a `ray.train.TrainingFailedError`.
    """
    errors = what_failed(failure)
    return next((e for e in errors if isinstance(e, (ValueError, OSError))), None)


def what_failed(failure: Exception) -> list[Exception]:
    """The errors of workers behind a `ray.train.TrainingFailedError`."""
    errors = getattr(failure, "worker_failures", {}).values()
    # what a callback made of them, as `NoRestartOnBadInput` does
    return [*errors, *filter(None, [getattr(failure, "controller_failure", None)])]
