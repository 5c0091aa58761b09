"""What a wrap with `fully_shard` does, simulated or run: for the exercises of part 03."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils import comms, memory
from utils.models import GPT, SMOKE

Wrap = Callable[[GPT, dist.DeviceMesh], object]
WORLD_SIZE = 8


class Step(NamedTuple):
    """Of rank 0 of eight: bytes of state, bytes that a step adds at most, collectives."""

    state: memory.State
    added: int
    calls: dict[str, int]


def simulate(wrap: Wrap) -> Step:
    """The second of two training steps of the small GPT, sharded by `wrap(model, mesh)`.

    Nothing is sent or computed. Whatever `wrap` raises is raised.
    """
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=store)
    try:
        mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
        with FakeTensorMode(), memory.count_memory() as counter:
            model = GPT(SMOKE)
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
            return Step(state, counter.peak - at_start, dict(counted.calls))
    finally:
        dist.destroy_process_group()


def holds_its_share(step: Step) -> bool:
    """Whether no rank holds more than 16 bytes / N per parameter, and some padding."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(SMOKE).parameters())
    formula = memory.predict(parameters, WORLD_SIZE, stage=3)
    return step.state.total < 1.05 * formula.total


def wrap_more(model: GPT, mesh: dist.DeviceMesh) -> None:
    """The wrap of 03/01: blocks, embedding and output layer are groups of their own."""
    for module in (model.tokens, *model.blocks, model.head, model):
        fully_shard(module, mesh=mesh)


def lowers_the_peak(wrap: Wrap) -> bool | str:
    """Whether a step adds at least a fifth less than with `wrap_more`."""
    step = simulate(wrap)
    if not holds_its_share(step):
        return "A rank holds more than its share of the state."
    ratio = step.added / simulate(wrap_more).added
    return ratio < 0.8 or f"A step adds {ratio:.0%} of what it added before."


def tells_shards_from_copies(is_sharded: Callable) -> bool | str:
    """Whether `is_sharded(model, optimizer, world_size)` knows FSDP2 from what is whole.

    Three models, each after a backward pass and a step: FSDP2's, a plain one, and one that
    shares out the optimizer's state only.
    """
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=store)
    try:
        mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
        found = []
        for is_wrapped, updated in ((True, ""), (False, ""), (False, "head")):
            model = GPT(SMOKE)
            if is_wrapped:
                wrap_more(model, mesh)
            optimizer = torch.optim.AdamW(model.get_submodule(updated).parameters())
            model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
            optimizer.step()
            found.append(bool(is_sharded(model, optimizer, WORLD_SIZE)))
    finally:
        dist.destroy_process_group()
    if not found[0]:
        return "It says of a model that FSDP2 has sharded that it is not."
    if found[1]:
        return "It takes a model that every rank holds whole for a sharded one."
    return not found[2] or "It is content if the optimizer's state alone is divided."
