"""The same steps under torchrun and Ray Train, for start.py.

torchrun executes this file, so it imports what such a script needs, and no Ray.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import scripts
from tests.benchmarks import partners
from utils.datasets import digits
from utils.models import resnet18

BATCH, STEPS = 32, 4  # per worker; steps per measurement
VIEW = {"gradient_as_bucket_view": True}


class Loop:
    """The step of train_ddp.py, on a share of the digits that stays the same."""

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
        """Seconds for the steps, and the losses of this rank."""
        dist.barrier()
        start = time.perf_counter()
        losses = [
            self.step(self.model, self.optimizer, *self.batch) for _ in range(steps)
        ]
        dist.barrier()
        return time.perf_counter() - start, [loss.item() for loss in losses]

    def report(self) -> float:
        """Seconds for one report with a checkpoint: weights and optimizer state."""
        report = scripts.load(scripts.TRAIN_RAY_DDP).report
        dist.barrier()
        start = time.perf_counter()
        report(self.plain, self.optimizer, {"epoch": 0})
        return time.perf_counter() - start


def serve(port: int, wrap) -> None:
    loop = Loop(wrap)
    for order, answer in partners.orders(port):
        answer(loop.report() if order == "report" else loop.run(STEPS))


def with_ddp(model):
    return DDP(model, **VIEW)


def main() -> None:
    """One rank of torchrun."""
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
