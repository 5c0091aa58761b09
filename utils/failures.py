"""Find what failed in a run of Ray Train, and the sentence that says how to fix it."""

import contextlib
from collections.abc import Callable, Iterator

import pyarrow as pa
import ray
import ray.train
from ray.train import TrainingFailedError, UserCallback

from utils.errors import BadInput

UNREADABLE = (OSError, pa.ArrowException)
# gloo listens at the address that the host name stands for, on Debian 127.0.1.1
LOOPBACK = (
    "A worker cannot reach those on other nodes: on their nodes, the host name stands for "
    "an address of that machine alone (127...), and gloo uses it. Before `ray start`, set "
    "GLOO_SOCKET_IFNAME on every node to the network device that the others reach "
    "(`ip -brief address` lists them)."
)


class NoRestartOnBadInput(UserCallback):
    """End a run at bad input, without a restart: for `RunConfig(callbacks=[...])`.

    BadInput, of a worker or of a task of Ray Data, would only come again: the run ends at
    once, although `FailureConfig` allows a restart. Any other error may be gone by then.
    """

    def after_exception(self, run_context, worker_exceptions) -> None:
        """Raise the first BadInput. Runs in Ray Train's controller."""
        for error in worker_exceptions.values():
            if isinstance(_cause(error), BadInput):
                raise error


@contextlib.contextmanager
def in_a_sentence(read_again: Callable[[], object] | None = None) -> Iterator[None]:
    """Raise the BadInput behind a failed run: `with in_a_sentence(): trainer.fit()`.

    If there is none, the failure is raised as it is. The block may also run tasks of Ray
    Data outside of `fit`. Ray is ended first, and with it the workers' logs, so that what
    went wrong stands below them.

    Args:
        read_again: what finds the damage if a task of Ray Data could not read its file,
            and raises it in a sentence.

    Raises:
        BadInput: what a worker or a task said.
        ray.train.TrainingFailedError, RayTaskError: none said anything of that kind.
    """
    try:
        yield
    except (TrainingFailedError, ray.exceptions.RayTaskError) as failure:
        ray.shutdown()
        if read_again and any(map(_could_not_read, errors_behind(failure))):
            read_again()
        if problem := bad_input_behind(failure):
            raise problem from failure
        raise


def bad_input_behind(failure: Exception) -> BadInput | None:
    """Return the BadInput that a worker or a task raised, if any.

    One error of gloo becomes a BadInput, too: that of nodes whose host name stands for
    127..., which no other node reaches.
    """
    for error in errors_behind(failure):
        cause = _cause(error)
        if "Gloo connectFullMesh failed" in str(cause) and "[127." in str(cause):
            return BadInput(LOOPBACK)
        if isinstance(cause, BadInput):
            # Ray Data adds lines about its retries to what a task has said
            return cause if cause is error else BadInput(str(cause).partition("\n")[0])
    return None


def errors_behind(failure: Exception) -> list[Exception]:
    """Return the errors behind a TrainingFailedError; of any other error, itself alone."""
    if not isinstance(failure, TrainingFailedError):
        return [failure]
    errors = getattr(failure, "worker_failures", {}).values()
    # what a callback made of them, as `NoRestartOnBadInput` does
    return [*errors, *filter(None, [getattr(failure, "controller_failure", None)])]


def _cause(error: Exception) -> Exception:
    """Return the error that a task raised, without Ray's wrap; a worker's as it is."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _could_not_read(error: Exception) -> bool:
    """Return whether a task of Ray Data could not read; a worker may have a full disk."""
    return _cause(error) is not error and isinstance(_cause(error), UNREADABLE)
