"""What failed in a run of Ray Train, and whether a sentence says how to mend it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import ray
from ray.train import CheckpointConfig, TrainingFailedError, UserCallback

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
    """For `RunConfig(callbacks=[...])`: a restart is for workers that died.

    BadInput, of a worker or of a task of Ray Data, would only come again: the run ends at
    once, although `FailureConfig` allows a restart. Any other error may be gone by then.
    """

    def after_exception(self, run_context, worker_exceptions) -> None:
        """Raise the first BadInput. Runs in Ray Train's controller."""
        for error in worker_exceptions.values():
            if isinstance(_cause(error), BadInput):
                raise error


def run_options(name: str, folder: Path) -> dict:
    """For `RunConfig(**run_options(name, folder))`: a run that can be resumed by its name.

    Of its checkpoints, in `folder`, the last is kept. Bad input ends it at once.
    """
    return {
        "name": name,
        "storage_path": str(folder),
        "checkpoint_config": CheckpointConfig(num_to_keep=1),
        "callbacks": [NoRestartOnBadInput()],
    }


@contextlib.contextmanager
def in_a_sentence(read_again: Callable[[], object] | None = None) -> Iterator[None]:
    """`with in_a_sentence(): trainer.fit()` raises what is to be mended, if that is known.

    The same holds for a task of Ray Data outside of `fit`.

    Ends Ray before, and with it the workers' logs: what went wrong stands below them.

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
        if read_again and any(map(_could_not_read, what_failed(failure))):
            read_again()
        if problem := what_to_mend(failure):
            raise problem from failure
        raise


def what_to_mend(failure: Exception) -> BadInput | None:
    """The error of a worker or task that says in a sentence what is wrong, if one did.

    Of gloo's errors it knows the one that nodes without a name in the network get.

    Args:
        failure: what `TorchTrainer.fit` raised, a `ray.train.TrainingFailedError`.
    """
    for error in what_failed(failure):
        cause = _cause(error)
        if "Gloo connectFullMesh failed" in str(cause) and "[127." in str(cause):
            return BadInput(LOOPBACK)
        if isinstance(cause, BadInput):
            # Ray Data adds lines about its retries to what a task has said
            return cause if cause is error else BadInput(str(cause).partition("\n")[0])
    return None


def what_failed(failure: Exception) -> list[Exception]:
    """The errors of workers behind a TrainingFailedError; another error as it is."""
    if not isinstance(failure, TrainingFailedError):
        return [failure]
    errors = getattr(failure, "worker_failures", {}).values()
    # what a callback made of them, as `NoRestartOnBadInput` does
    return [*errors, *filter(None, [getattr(failure, "controller_failure", None)])]


def _cause(error: Exception) -> Exception:
    """The error that a task raised, as it was; or that of a worker itself."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _could_not_read(error: Exception) -> bool:
    """Whether it is that of a task of Ray Data; a worker's may be a full disk."""
    return _cause(error) is not error and isinstance(_cause(error), UNREADABLE)
