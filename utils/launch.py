"""Run a function of a notebook as N ranks on this machine, and collect what they return.

It does for a function what `torchrun --nproc_per_node=N` does for a script: N processes
with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. The function creates
the process group itself.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import cloudpickle

from utils.processes import free_port

# One server process imports torch once; every rank is forked from it in milliseconds.
# Unlike this process, the server has no threads and never touches a GPU.
_context = mp.get_context("forkserver")
_preloaded = ["torch.nn.parallel", "torchvision.models", "utils.gloo_in_one_thread"]
_context.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Import `module` before ranks are forked; it must be called before the first ones."""
    if module not in _preloaded:
        _preloaded.append(module)
        _context.set_forkserver_preload(_preloaded)


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
    ranks, pipes = [], []
    try:
        for rank in range(num_workers):
            here, there = _context.Pipe()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _context.Process(
                target=_run_rank, args=(payload, env | own, there), daemon=True
            )
            ranks.append(process)
            process.start()
            there.close()  # so that this end sees the end of a rank that dies
            pipes.append(here)
        return _collect(ranks, pipes, time.monotonic() + timeout)
    finally:
        for process in ranks:
            if process.pid:  # none if stop was pressed while it started
                process.kill()
                process.join()


def _collect(ranks: list, pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    loaded = 0
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = connection.wait(waiting, timeout=max(0, deadline - time.monotonic()))
        if not ready:
            late = [r for r in range(len(pipes)) if r not in results]
            raise RuntimeError(f"ranks {late} did not return in time: do they hang?")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = cloudpickle.loads(pipes[rank].recv_bytes())
            except (EOFError, ConnectionResetError):
                ranks[rank].join()
                code = ranks[rank].exitcode
                by = f" ({signal.Signals(-code).name})" if code < 0 else ""
                raise RuntimeError(
                    f"rank {rank} died with exit code {code}{by}"
                ) from None
            if kind == "loaded":
                loaded += 1
                for other in pipes if loaded == len(pipes) else []:
                    with contextlib.suppress(OSError):  # it has died: seen above
                        other.send_bytes(b"begin")
            elif kind == "returned":
                results[rank] = value
            else:
                summary, remote_traceback = value
                rank = _first_with(summary, rank, waiting, pipes)
                raise RuntimeError(f"rank {rank} failed with {summary}") from (
                    RuntimeError(remote_traceback)
                )
    return [results[rank] for rank in range(len(pipes))]


def _first_with(summary: str, rank: int, waiting: list, pipes: list) -> int:
    """Return the lowest rank that fails with the same error as `rank`.

    Else which of them is named would depend on which was the quickest.
    """
    for pipe in waiting:
        other = pipes.index(pipe)
        with contextlib.suppress(EOFError):
            if other < rank and pipe.poll(timeout=1):
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
