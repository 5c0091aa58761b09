"""The step of one GPT beside each other in one process group: DDP, FSDP2, ZeRO-3."""

import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import sharding
from tests.tools.benchmarks.ratios import interleave, ratio
from tests.tools.benchmarks.report import Row
from utils.datasets import text
from utils.launch import run_ranks
from utils.models import GPT, GPTConfig
from utils.zero import load_deepspeed

# 6.5 million parameters: large enough that the work is not all overhead.
CONFIG = GPTConfig(layers=8, heads=8, width=256)
# Ranks send the same bytes whatever the batch: a large one gives them more work for it.
TEXTS = 8, 64


def seconds_of(step) -> float:
    """Return the seconds of one step, from all ranks ready to all ranks done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def mean_loss(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def measure(global_batch: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return seconds of steps: FSDP2 beside DDP, and ZeRO-3 beside FSDP2."""
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    per_rank = global_batch // dist.get_world_size()
    mine = slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)
    inputs, targets = text(block_size=CONFIG.block_size)[mine]

    def build():
        torch.manual_seed(0)
        return GPT(CONFIG)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_of(model):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def step_of(model):
        optimizer = adamw(model)

        def step():
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step

    model = build()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model),
        config=sharding.zero_config(3, per_rank),
    )

    def zero_step():
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return loss

    ddp, fsdp2 = step_of(DDP(build())), step_of(sharding.shard(build()))
    first = [mean_loss(step()) for step in (ddp, fsdp2, zero_step)]
    assert max(first) - min(first) < 1e-5, "not the same training"
    pairs = {"FSDP2 over DDP": (ddp, fsdp2), "ZeRO-3 over FSDP2": (fsdp2, zero_step)}
    return {
        name: interleave(partial(seconds_of, a), partial(seconds_of, b))
        for name, (a, b) in pairs.items()
    }


def rows() -> list[Row]:
    """Return row 9 of the table."""
    return [
        Row.of_ratio(
            9,
            f"step time of a GPT with 6.4 million parameters: {name}, "
            f"global batch of {texts * CONFIG.block_size} tokens",
            ratio(a, b),
            at_most=1.5,
            note=f"{np.median(a):.2f} s and {np.median(b):.2f} s per step",
        )
        for texts in TEXTS
        for name, (a, b) in run_ranks(measure, 2, texts)[0].items()
    ]
