"""Simulate what a wrap with `fully_shard` holds and sends, on more ranks than are here."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils import comms, memory
from utils.models import GPT, SMOKE, GPTConfig

Wrap = Callable[[GPT, dist.DeviceMesh], object]
WORLD_SIZE = 8


class Step(NamedTuple):
    """Of rank 0: bytes of state, bytes that a step adds at most, what it sends."""

    state: memory.State
    added: int
    comms: comms.Comms


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[dist.DeviceMesh]:
    """Make this process rank 0 of a group in which nothing is sent; yield its mesh.

    `fully_shard` cuts each parameter into a piece per rank: with 24 layers on 512 ranks
    that alone takes minutes.
    """
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        yield dist.init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def simulate(
    wrap: Wrap, config: GPTConfig = SMOKE, world_size: int = WORLD_SIZE
) -> Step:
    """Measure the second of two training steps of a GPT that `wrap(model, mesh)` shards.

    Nothing is sent, computed or allocated. `wrap` shards the model in place. Whatever it
    raises is raised.
    """
    with fake_ranks(world_size) as mesh, FakeTensorMode():
        with memory.count_memory() as counter:
            model = GPT(config)
            wrap(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tokens = torch.zeros(1, 8, dtype=torch.long)  # few: weights are the peak
            for _ in range(2):
                optimizer.zero_grad()
                counter.peak = at_start = counter.live
                with comms.count_comms() as counted:
                    logits = model(tokens).flatten(0, 1)
                    F.cross_entropy(logits, tokens.flatten()).backward()
                optimizer.step()
                state = memory.state_bytes(model, optimizer)
            return Step(state, counter.peak - at_start, counted)


def holds_its_share(step: Step) -> bool:
    """Return whether a rank holds at most 16 bytes / N per parameter, and some padding."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(SMOKE).parameters())
    formula = memory.predict(parameters, WORLD_SIZE, stage=3)
    return step.state.total < 1.05 * formula.total


def wrap_more(model: GPT, mesh: dist.DeviceMesh) -> None:
    """Shard as 03/01: blocks, embedding and output layer are groups of their own."""
    for module in (model.tokens, *model.blocks, model.head, model):
        fully_shard(module, mesh=mesh)
