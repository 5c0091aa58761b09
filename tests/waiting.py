"""How long tests wait for what has to come, and how they do it."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

# Seconds. It costs nothing where the event comes; a slow and busy host needs some of them.
TIMEOUT_S = 900


def wait_until(
    true: Callable[[], Any],
    job: subprocess.Popen | None = None,
    said: Callable[[], object] = str,
) -> Any:
    """Wait until `true()`, and return what that is.

    Args:
        job: has to go on meanwhile.
        said: what to show if it does not come, as the text of a log.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := true()):
        assert job is None or job.poll() is None, f"it ended before: {said()}"
        assert time.monotonic() < deadline, f"not so after {TIMEOUT_S} s: {said()}"
        time.sleep(0.1)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs: it is there, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
