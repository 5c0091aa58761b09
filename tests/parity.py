"""Train the same ten steps with every strategy, for tests/test_parity.py.

To add a strategy, add an entry to STRATEGIES.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from tests import scripts
from tests.compare import relative
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
    """A step that averages the gradients itself, between backward and step."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    average(model)
    optimizer.step()
    return loss.detach()


def step_without_averaging(model, optimizer, images, labels):
    return step_by_hand(model, optimizer, images, labels, average=lambda model: None)


def step_of_script(model, optimizer, images, labels):
    """The step that learners take away: that of train_ddp.py."""
    train_ddp = scripts.load(scripts.TRAIN_DDP)
    return train_ddp.train_step(model, optimizer, images, labels)


def step_on_unequal_shares(model, optimizer, images, labels):
    """Rank 0 keeps one image of its share only; the average stays a plain one."""
    keep = 1 if dist.get_rank() == 0 else len(images)
    return step_by_hand(model, optimizer, images[:keep], labels[:keep])


def batches_of_digits(calls_set_epoch: bool = True) -> Iterator[list[torch.Tensor]]:
    """This rank's images and labels, step by step."""
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


def train(
    strategy: Strategy, dtype: torch.dtype, batches: list
) -> dict[str, torch.Tensor]:
    """Train on this rank's `batches`, one step for each.

    Returns the loss of each step, averaged over the ranks ("losses", [steps]), the
    gradient of the first step ("gradient", [parameters]) and the parameters after the
    last one ("parameters", [parameters]).
    """
    torch.manual_seed(0)
    model = strategy.wrap(resnet18(norm=strategy.norm).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    losses, gradient = [], None
    for images, labels in batches:
        losses.append(strategy.step(model, optimizer, images.to(dtype), labels))
        if gradient is None:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    return {
        "losses": mean_losses / dist.get_world_size(),
        "gradient": gradient,
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
    }


def train_twice(strategy: Strategy) -> dict[str, torch.Tensor]:
    """In float64 over all steps, with the gradient of the first one in float32 as
    "gradient32"."""
    batches = list(islice(strategy.batches(), strategy.steps))
    single = train(strategy, torch.float32, batches[:1])
    return train(strategy, torch.float64, batches) | {"gradient32": single["gradient"]}


def distances(ours: dict, theirs: dict) -> dict[str, float]:
    """How far each result is from that of one process, in units of the latter."""
    assert ours["gradient32"].dtype == torch.float32
    assert [ours[key].shape for key in theirs] == [
        each.shape for each in theirs.values()
    ]
    return {key: relative(ours[key], theirs[key]) for key in theirs}


def compare_all(strategies: dict[str, tuple[Strategy, Path]]) -> dict[str, dict]:
    """Train with each strategy; the distances to the results in the file beside it.

    Only on rank 0, elsewhere none. What is compared stays here: it is hundreds of MB.
    """
    found = {}
    for name, (strategy, file) in strategies.items():
        ours = train_twice(strategy)
        if dist.get_rank() == 0:
            found[name] = distances(
                ours, torch.load(file, mmap=True, weights_only=True)
            )
    return found


def in_a_group(run: Callable[..., dict], *args) -> dict:
    """`run(*args)` in a process group of all ranks."""
    dist.init_process_group("gloo")
    found = run(*args)
    gc.collect()  # DDP's objects, before the group they hold on to
    dist.destroy_process_group()
    return found


def alone(run: Callable[..., dict], *args) -> dict:
    """`run(*args)` in this process, which is a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = run(*args)
    dist.destroy_process_group()
    return found
