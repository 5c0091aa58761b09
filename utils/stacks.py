"""Ask the ranks of a job that hangs in which call each of them is, and end the job."""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from utils.launch import run_ranks

_HEADING = re.compile(r"^(?:Current thread|Stack) .*most recent call first.*$", re.M)
_PAUSE = 0.5  # seconds before a look, and in it
# Looks that have to agree, over 2 s. A rank that comes to a store before it listens tries
# again half a second later, and meanwhile all of them stand still.
_LOOKS = 3


def of_hanging(
    work: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 240
) -> list[str]:
    """Start `work(*args)` on ranks; return each one's calls once all of them stand still.

    That is when all have stopped computing, and three questions in a row get the same
    answer. Then the ranks are ended.

    Args:
        work: what each rank runs. It registers the question: it calls
            `faulthandler.register(signal.SIGUSR1)`.
        num_workers: the number of ranks.
        args: for `work`.
        timeout: seconds until they have to stand still.

    Returns:
        By rank, the names of its calls, the outermost first, from `work` on.

    Raises:
        RuntimeError: they do not stand still, or one of them ended.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder, deadline = Path(name), time.monotonic() + timeout
        job = pool.submit(run_ranks, _answer_into, num_workers, folder, work, args)
        try:
            seen: list[Any] = []
            while not job.done() and time.monotonic() < deadline:
                ranks = [folder / str(rank) for rank in range(num_workers)]
                seen.append(_look(ranks))
                if seen[-1] and seen[-_LOOKS:] == [seen[-1]] * _LOOKS:
                    return seen[-1][1]
                time.sleep(_PAUSE)
        finally:
            for path in folder.glob("*.pid"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(int(path.read_text())).kill()
            with contextlib.suppress(RuntimeError):  # of the ranks that were ended
                job.result()
    raise RuntimeError("The ranks do not stand still, or one of them has ended.")


def calls(dump: str) -> str:
    """Return the newest stack in what faulthandler wrote, as "outer > inner"."""
    newest = _HEADING.split(dump)[-1]
    names = [line.split()[-1] for line in newest.splitlines() if " in " in line]
    if "_answer_into" not in names:
        return ""
    inside = names[: names.index("_answer_into")]
    # torch wraps its collectives, to log them
    return " > ".join(name for name in reversed(inside) if name != "wrapper")


def _look(ranks: list[Path]) -> tuple[float, list[str]] | None:
    """Return the seconds computed so far, rounded, and all calls; None if unknown."""
    try:
        pids = [int(rank.with_suffix(".pid").read_text()) for rank in ranks]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess, ProcessLookupError):
        return None
    time.sleep(_PAUSE)  # until they have written
    found = [calls(rank.read_text()) for rank in ranks]
    used = sum(each.user + each.system for each in times)
    return (round(used, 1), found) if all(found) else None


def _answer_into(folder: Path, work: Callable[..., Any], args: tuple) -> Any:
    """Send stderr, where faulthandler writes, into a file on a rank, and call `work`."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until `work` registers it
    own = folder / os.environ["RANK"]
    os.dup2(os.open(own, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    temporary = own.with_suffix(".tmp")
    temporary.write_text(str(os.getpid()))
    temporary.rename(own.with_suffix(".pid"))
    return work(*args)
