"""Run a function of a notebook as N ranks on this machine, and collect what they return.

It does for a function what `torchrun --nproc_per_node=N` does for a script: N processes
with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. The function creates
the process group itself.
"""

import contextlib
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from utils.parity.ranks import CONTEXT, Died, Late, Ranks
from utils.processes import free_port

# What the server of ranks imports once.
_preloaded = ["torch.nn.parallel", "torchvision.models", "utils.gloo_in_one_thread"]
CONTEXT.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Import `module` before ranks are forked; it must be called before the first ones."""
    if module not in _preloaded:
        _preloaded.append(module)
        CONTEXT.set_forkserver_preload(_preloaded)


def run_ranks(
    function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 900
) -> list[Any]:
    """Call `function(*args)` in `num_workers` processes; return their results by rank.

    They call it at the same moment, once all of them have loaded it: what they wait for
    in it is each other, not an import. A process that fails or dies ends the others at
    once, and so does an interrupt (Ctrl-C, or a notebook's stop).

    Raises:
        ValueError: `num_workers` is less than 1.
        RuntimeError: a rank raised an exception (its traceback is the cause), died,
            or did not return within `timeout` seconds.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, but must be at least 1.")
    payload = cloudpickle.dumps((function, args))
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    env |= {"WORLD_SIZE": str(num_workers), "LOCAL_WORLD_SIZE": str(num_workers)}
    arguments = [
        (payload, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_workers)
    ]
    with Ranks(_run_rank, arguments) as ranks:
        try:
            return _collect(ranks, timeout)
        except Died as died:
            by = f" ({signal.Signals(-died.code).name})" if died.code < 0 else ""
            said = f"rank {died.rank} died with exit code {died.code}{by}"
            raise RuntimeError(said) from None
        except Late as late:
            said = f"ranks {late.ranks} did not return in time: do they hang?"
            raise RuntimeError(said) from None


def _collect(ranks: Ranks, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    loaded = 0
    for rank, message in ranks.messages(timeout, of_each=False):
        kind, value = cloudpickle.loads(message)
        if kind == "loaded":
            loaded += 1
            for pipe in ranks.pipes if loaded == len(ranks.pipes) else []:
                with contextlib.suppress(OSError):  # it has died: seen above
                    pipe.send_bytes(b"begin")
        elif kind == "returned":
            results[rank] = value
            ranks.done.add(rank)
        else:
            summary, remote_traceback = value
            rank = _first_with(summary, rank, ranks)
            raise RuntimeError(f"rank {rank} failed with {summary}") from (
                RuntimeError(remote_traceback)
            )
    return [results[rank] for rank in range(len(ranks.pipes))]


def _first_with(summary: str, rank: int, ranks: Ranks) -> int:
    """Return the lowest rank that fails with the same error as `rank`.

    Else which of them is named would depend on which was the quickest.
    """
    for other, pipe in enumerate(ranks.pipes[:rank]):
        with contextlib.suppress(EOFError):
            if other not in ranks.done and pipe.poll(timeout=1):
                kind, value = cloudpickle.loads(pipe.recv_bytes())
                if kind == "raised" and value[0] == summary:
                    return other
    return rank


def _run_rank(payload: bytes, env: dict[str, str], caller) -> None:
    # A notebook's stop reaches every process. The caller ends the ranks; were they to end
    # by themselves, each would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash in C code prints the Python lines that led to it
    os.environ.clear()
    os.environ.update(env)
    with contextlib.suppress(EOFError, OSError):  # the caller has died
        try:
            function, args = cloudpickle.loads(payload)
            caller.send_bytes(cloudpickle.dumps(("loaded", None)))
            caller.recv_bytes()  # once all ranks have loaded it
            message = cloudpickle.dumps(("returned", function(*args)))
        except Exception as error:
            summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            message = cloudpickle.dumps(("raised", (summary, traceback.format_exc())))
        caller.send_bytes(message)
        # Rank 0 holds the store through which the others meet: as under torchrun, it
        # stays until all have returned. The caller kills this process then.
        caller.recv_bytes()
