"""The same steps under torchrun and Ray Train.

torchrun executes this file, so it imports what such a script needs, and no Ray.
"""

import gc
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import scripts
from tests.tools.benchmarks import partners
from utils.datasets import digits
from utils.models import resnet18

BATCH, STEPS = 32, 4  # per worker; steps per measurement
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}


class Loop:
    """The step of train_ddp.py, on a batch of each rank that stays the same."""

    def __init__(self, wrap) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.plain = resnet18()
        self.model = wrap(self.plain)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        images, labels = digits().tensors
        mine = slice(dist.get_rank() * BATCH, (dist.get_rank() + 1) * BATCH)
        self.batch = images[mine], labels[mine]
        self.step = scripts.load(scripts.TRAIN_DDP).train_step

    def run(self, steps: int) -> tuple[float, list[float]]:
        """Return the seconds of the steps, and the losses of this rank."""
        dist.barrier()
        start = time.perf_counter()
        losses = [
            self.step(self.model, self.optimizer, *self.batch) for _ in range(steps)
        ]
        dist.barrier()
        return time.perf_counter() - start, [loss.item() for loss in losses]

    def report(self) -> float:
        """Return the seconds of a report with a checkpoint: weights and optimizer state."""
        from utils.ray_runs import RayRun  # here: it imports Ray

        script = scripts.load(scripts.TRAIN_RAY_DDP)
        parts = script.save_checkpoint, script.load_checkpoint
        folder = Path(tempfile.gettempdir())  # as in `save`: below /tmp
        run = RayRun(folder, "bench", *parts)
        run.resume(self.plain, self.optimizer)
        epochs = run.epochs(1)
        next(epochs)
        dist.barrier()
        start = time.perf_counter()
        run.done(0.0)
        return time.perf_counter() - start

    def save(self) -> tuple[float, int]:
        """Return seconds of a plain torch.save of what `report` writes, and its bytes."""
        dist.barrier()
        start = time.perf_counter()
        with tempfile.NamedTemporaryFile() as file:  # on the disk of what is reported
            if dist.get_rank() == 0:
                optimizer = self.optimizer.state_dict()
                torch.save(
                    {"model": self.plain.state_dict(), "optimizer": optimizer}, file
                )
            return time.perf_counter() - start, os.path.getsize(file.name)


def usage() -> tuple[int, float]:
    """Return page faults without reading a disk, and seconds in the kernel, until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt, used.ru_stime


def serve(port: int, wrap) -> None:
    """Measure what the driver asks for, until it ends."""
    loop = Loop(wrap)
    tasks = {"report": loop.report, "save": loop.save, "usage": usage}
    tasks["steps"] = lambda: loop.run(STEPS)
    for order, answer in partners.orders(port):
        answer(tasks[order]())


def with_ddp(model):
    return DDP(model, **VIEW)


def main() -> None:
    """Be one rank of torchrun: serve at a port, or print when the first step was done."""
    assert "ray" not in sys.modules, "the start without Ray would contain Ray's import"
    dist.init_process_group("gloo")
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), with_ddp)
    else:
        Loop(with_ddp).run(1)
        if dist.get_rank() == 0:
            print(time.time())
    gc.collect()  # DDP's objects, before the group they hold on to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
