"""Note in a file that all processes of a run share what happened when, and wait for it.

A process that is killed returns nothing, so what it did is read from here.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

_member: dict[str, int] = {}  # what this process is, or was, in its process group


def note(path: str | Path, event: str, **details) -> None:
    """Append a line to the log: `event`, time (seconds), pid, and `details`.

    If this process has been in a process group, the line also says its rank and world size.
    """
    with contextlib.suppress(ValueError):  # no group; Ray may end it while a step ends
        _member.update(rank=dist.get_rank(), world_size=dist.get_world_size())
    details |= {"event": event, "time": time.time(), "pid": os.getpid()} | _member
    with open(path, "a") as file:  # lines of several processes do not mix
        file.write(json.dumps(details) + "\n")


def noted(path: str | Path, event: str, after: float = 0, **where) -> list[dict]:
    """Return an event's entries after a time, in order, whose details equal `where`."""
    text = Path(path).read_text() if Path(path).exists() else ""
    *lines, _ = text.split("\n")  # of the last one, not all may have arrived yet
    entries = [json.loads(line) for line in lines]
    wanted = where.items() | {("event", event)}
    return [
        entry
        for entry in entries
        if entry["time"] > after and all(entry.get(k) == v for k, v in wanted)
    ]


def wait_for(
    path: str | Path,
    event: str,
    unless: Callable[[], object] = lambda: False,
    seconds: float = 600,
    **where,
) -> dict:
    """Wait for the first entry that `noted` finds.

    Args:
        path: of the log.
        event: which entry it is, as in `note`.
        unless: asked whether nothing can come any more. Anything but None and False says
            so, as what `subprocess.Popen.poll` returns, whose 0 is an end, too.
        seconds: how long to wait.
        where: what the entry's details have to be.

    Raises:
        TimeoutError: there was none within `seconds`, or before `unless` said so.
    """
    deadline = time.monotonic() + seconds
    while True:
        over = unless()
        is_late = time.monotonic() > deadline
        if found := noted(path, event, **where):  # looked for once it is over, too
            return found[0]
        if is_late or not (over is None or over is False):
            raise TimeoutError(f"{event!r} with {where} did not happen.")
        time.sleep(0.01)


def when(path: str | Path, event: str, act: Callable[[dict], Any], **where) -> Future:
    """Call `act(entry)` in a thread once there is an entry that `wait_for` waits for."""

    def watch():
        return act(wait_for(path, event, **where))

    return ThreadPoolExecutor(1).submit(watch)
