"""Train the same ten steps with every strategy, for tests/test_parity.py.

What ranks do is recorded and compared by utils.parity.

To add a strategy, add an entry to STRATEGIES.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from tests import scripts
from tests.compare import relative
from utils import parity
from utils.datasets import digits
from utils.models import resnet18

GLOBAL_BATCH = 6  # 1, 2 and 3 workers have equal shares of it
IMAGES = 30  # so that an epoch has 5 steps, and set_epoch matters in the second one
EPOCHS = 2
STEPS = EPOCHS * IMAGES // GLOBAL_BATCH


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def step_by_hand(model, optimizer, images, labels, average=average_gradients):
    """Return a step that averages the gradients itself, between backward and step."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    average(model)
    optimizer.step()
    return loss.detach()


def step_without_averaging(model, optimizer, images, labels):
    return step_by_hand(model, optimizer, images, labels, average=lambda model: None)


def step_of_script(model, optimizer, images, labels):
    """Return the step that learners take away: that of train_ddp.py."""
    train_ddp = scripts.load(scripts.TRAIN_DDP)
    return train_ddp.train_step(model, optimizer, images, labels)


def step_on_unequal_shares(model, optimizer, images, labels):
    """Keep one image of rank 0's share only; the average stays a plain one."""
    keep = 1 if dist.get_rank() == 0 else len(images)
    return step_by_hand(model, optimizer, images[:keep], labels[:keep])


def batches_of_digits(calls_set_epoch: bool = True) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's images and labels, step by step."""
    data = Subset(digits("train"), range(IMAGES))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        if calls_set_epoch:
            sampler.set_epoch(epoch)
        yield from loader


@dataclass(frozen=True)
class Strategy:
    """wrap(model) and step(model, optimizer, images, labels) make a strategy.

    batches() gives a rank its images and labels.
    """

    wrap: Callable[[nn.Module], nn.Module]
    step: Callable[..., torch.Tensor]
    norm: str = "group"
    batches: Callable[[], Iterable] = batches_of_digits
    steps: int = STEPS


STRATEGIES = {
    "by hand": Strategy(lambda model: model, step_by_hand),
    "DDP": Strategy(DDP, step_of_script),
}
# Mistakes that the test has to see; without set_epoch the first epoch is right.
CONTROLS = {
    "no averaging": Strategy(lambda model: model, step_without_averaging, steps=2),
    "no set_epoch": Strategy(
        DDP, step_of_script, batches=partial(batches_of_digits, calls_set_epoch=False)
    ),
    "BatchNorm": Strategy(DDP, step_of_script, norm="batch", steps=2),
    "unequal shares": Strategy(lambda model: model, step_on_unequal_shares, steps=2),
}


def training_of(strategy: Strategy) -> parity.Training:
    """Return a strategy as functions that utils.parity calls: one epoch of all batches."""

    def build_model() -> nn.Module:
        torch.manual_seed(0)
        return resnet18(norm=strategy.norm)

    return parity.Training(
        build_model=build_model,
        build_optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-4, fused=True),
        make_loader=lambda rank, n, epoch: islice(strategy.batches(), strategy.steps),
        train_step=lambda model, optimizer, batch: strategy.step(
            model, optimizer, *batch
        ),
        wrap=strategy.wrap,
    )


Both = tuple[parity.Record, parity.Record]


def train_twice(strategy: Strategy) -> Both:
    """Train in float64 over all steps, and for the first one in float32, on this rank."""
    training = training_of(strategy)
    return (
        parity.record(training, torch.float64, epochs=1, steps=strategy.steps),
        parity.record(training, torch.float32, epochs=1, steps=1),
    )


def train_all(strategies: dict[str, Strategy]) -> dict[str, list[Both]]:
    """Train with each strategy; return on each rank what all of them did, by rank."""
    found = {}
    for name, strategy in strategies.items():
        found[name] = [None] * dist.get_world_size()
        dist.all_gather_object(found[name], train_twice(strategy))
    return found


def compare(alone: Both, together: list[Both]) -> dict[str, float]:
    """Return how far ranks are from one process, in units of the latter."""
    double, single = (
        parity.distances(one, ranks) for one, ranks in zip(alone, zip(*together))
    )
    return double._asdict() | {"gradient32": single.gradient}


def distances(ours: dict, theirs: dict) -> dict[str, float]:
    """Return how far tensors are from those of one process, in units of the latter."""
    assert ours["gradient32"].dtype == torch.float32
    assert [ours[key].shape for key in theirs] == [
        each.shape for each in theirs.values()
    ]
    return {key: relative(ours[key], theirs[key]) for key in theirs}


def in_a_group(run: Callable[..., dict], *args) -> dict:
    """Return `run(*args)` in a process group of all ranks."""
    dist.init_process_group("gloo")
    found = run(*args)
    gc.collect()  # DDP's objects, before the group they hold on to
    dist.destroy_process_group()
    return found


def alone(strategy: Strategy) -> Both:
    """Return `train_twice` in this process, which is a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = train_twice(strategy)
    dist.destroy_process_group()
    return found
