"""Stop a training when its scheduler asks: on all ranks after the same step, and saved.

Slurm, Kubernetes and clouds send SIGTERM some seconds before they kill; torchrun passes it
on to its workers. Under Ray the program that called `fit` gets it, and tells its workers
by a file in the storage that all of them see.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# As a shell reports a program that SIGTERM has ended: not 0, so a scheduler that restarts
# failed jobs starts this one again.
EXIT_STATUS = 128 + signal.SIGTERM
NOTHING, SAVE, STOP = range(3)
NOTICE_EVERY_S = 5.0  # Ray Train looks for drained nodes as often


class Stop:
    """What the ranks of this process group have been asked to do. Every rank makes one.

    Args:
        file: it exists once they are asked to stop (None: SIGTERM asks, as of torchrun).
        notice: `ray.train.get_preemption_info`, which says that a node will be gone soon.

    Source: https://docs.ray.io/en/latest/train/api/doc/ray.train.get_preemption_info.html
    """

    def __init__(
        self, file: Path | None = None, notice: Callable[[], object] | None = None
    ):
        self.file, self.notice = file, notice
        self.told = False  # by SIGTERM, perhaps while ranks are agreeing
        self.asked, self.noticed, self.last_look = NOTHING, False, time.monotonic()
        # Ranks agree on CPUs: a GPU would first have to finish its step.
        self.group: Any = dist.new_group(backend="gloo")
        if file is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)

    def _sigterm(self, *_) -> None:
        self.told = True

    def agreed(self) -> int:
        """Return what all ranks are to do now: NOTHING, SAVE, or save and STOP.

        Every rank calls it after each step, and gets the same answer. SAVE comes once,
        when Ray says that it will lose a node; the run then starts again without it. Costs
        an all-reduce of two bytes over gloo, and every five seconds a question to Ray.
        """
        look = False
        if dist.get_rank() == 0:
            if self.file and self.file.exists():
                self.told = True
            is_due = time.monotonic() - self.last_look > NOTICE_EVERY_S
            look = bool(self.notice) and is_due
        asked = STOP if self.told else NOTHING
        said = torch.tensor([asked, look], dtype=torch.uint8)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        self.asked, look = said.tolist()
        if look and self.notice:  # all ranks have to ask together
            self.last_look = time.monotonic()
            if self.notice() and not self.noticed:
                self.noticed = True
                return max(self.asked, SAVE)
        return self.asked


def notice_of_ray() -> Callable[[], object] | None:
    """Return what says that a node will be gone soon, if Ray Train started this worker.

    Under torchrun there is none: SIGTERM says it.
    """
    if "ray" not in sys.modules or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    import ray.train

    return ray.train.get_preemption_info if ray.is_initialized() else None


def what_next(folder: Path | None) -> str:
    """Return what to say of a stopped run, whose checkpoints are in `folder` or nowhere."""
    if folder:
        return "saved, and the same command goes on from there"
    return "nothing was saved, as --checkpoint-dir names no folder"


@contextlib.contextmanager
def passed_on(file: Path) -> Iterator[None]:
    """Let SIGTERM to this program make `file`, where its workers look, while inside.

    Once: a second SIGTERM ends it as usual.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # of a run that was killed before

    def pass_on(*_):
        signal.signal(signal.SIGTERM, before)
        file.touch()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        file.unlink(missing_ok=True)
