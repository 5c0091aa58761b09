"""Show in a notebook for how long a cell has been running, if that is more than 5 s.

What it shows goes when the cell ends: of it an output without data stays, which no
page shows.
"""

import os
import sys
import threading
import time
from typing import Any

AFTER = 5.0  # seconds


class Clock:
    """Show a bar, and the seconds, from `AFTER` seconds after `start` until `stop`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, info: Any = None) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(
            target=self._tick, args=(self.ended,), daemon=True
        )
        self.thread.start()

    def stop(self, result: Any = None) -> None:
        self.ended.set()
        if self.thread:
            self.thread.join(2)

    def _tick(self, ended: threading.Event) -> None:
        if ended.wait(AFTER):
            return
        from IPython.display import display

        began = time.monotonic() - AFTER
        shown = display(_running(AFTER), raw=True, display_id=True)
        while not ended.wait(1):
            shown.update(_running(time.monotonic() - began), raw=True)
        shown.update({}, raw=True)


def _running(seconds: float) -> dict[str, str]:
    return {"text/html": f"<progress></progress> {seconds:.0f} s"}


def show_in_notebook() -> None:
    """Show the bar in this cell and each after it, in a notebook's kernel.

    Elsewhere it does nothing, nor where WORKSHOP_PROGRESS is "off", as in tests, which
    compare outputs.
    """
    ipython = sys.modules.get("IPython")  # others need not import it for this
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    if os.environ.get("WORKSHOP_PROGRESS") == "off":
        return
    clock = Clock()
    shell.events.register("pre_run_cell", clock.start)
    shell.events.register("post_run_cell", clock.stop)
    clock.start()  # of this cell, which imports
