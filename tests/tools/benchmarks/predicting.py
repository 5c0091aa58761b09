"""Seconds of steps of sizes not fitted: predicted by utils.timing, or measured."""

import contextlib
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import sharding
from tests.tools.benchmarks.ratios import MET, MISSED, NOT_DECIDED, interval
from tests.tools.benchmarks.rows import Row
from utils import comms, memory, timing
from utils.checks.sharding import fake_ranks
from utils.launch import run_ranks
from utils.models import GPT, GPTConfig

# Layers and width of the GPTs of notebook 03/05, each with every strategy.
FIT = [(2, 64), (4, 64), (8, 64), (2, 128), (4, 128), (2, 256)]
LARGER = [(16, 64), (8, 128), (4, 256)]
# By whether there is a network; DDP that sends nothing is the bare model.
STRATEGIES = {
    True: ("ddp", "fsdp2", "fsdp2-keep"),
    False: ("single", "fsdp2", "fsdp2-keep"),
}
TEXTS, ROUNDS, BAR = 8, 16, 0.2

Key = tuple[int, int, str, bool]  # layers, width, strategy, network


def build(layers: int, width: int, strategy: str):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=layers, width=width))
    wrapped: nn.Module = model
    if strategy == "ddp":
        wrapped = DDP(model, gradient_as_bucket_view=True)
    elif strategy != "single":
        wrapped = sharding.shard(model, keep=strategy.endswith("keep"))
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)


def seconds_of(tokens: torch.Tensor, model, optimizer) -> float:
    """Return the shorter of two steps, from all ranks ready to all ranks done."""
    found = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return min(found)


def keys_of(network: bool) -> list[Key]:
    sizes = FIT + LARGER if network else FIT
    return [(*size, name, network) for size in sizes for name in STRATEGIES[network]]


def measure(network: bool) -> list[dict[Key, float]]:
    """Return seconds by key, of each round through all sizes, up and down in turns.

    Without a network, each process is in a group that sends nothing.
    """
    if network:
        dist.init_process_group("gloo")
    with contextlib.nullcontext() if network else fake_ranks(2):
        keys = keys_of(network)
        built = {key: build(*key[:3]) for key in keys}
        tokens = torch.randint(256, (TEXTS, 64))
        rounds = []
        for number in range(-1, ROUNDS):  # one to warm up
            order = keys if number % 2 else keys[::-1]
            rounds.append({key: seconds_of(tokens, *built[key]) for key in order})
        return rounds[1:]


def work_of(layers: int, width: int, strategy: str, network: bool) -> timing.Work:
    """Return what a rank of two does in a step."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=width))
    parameters = sum(p.numel() for p in model.parameters())
    stage = 3 if strategy.startswith("fsdp2") else 0
    return timing.Work(
        flops=timing.training_flops(parameters, TEXTS * 64),
        sent=comms.predict(strategy, 4 * parameters, 2) if network else 0,
        messages=timing.messages(strategy, layers, parameters) if network else 0,
        layers=layers,
        groups=timing.groups(strategy, layers),
        state=memory.predict(parameters, 2, stage).total,
    )


def predicted_over_measured(
    rounds: list[dict[Key, float]], latency: bool = True
) -> dict[Key, list[float]]:
    """Return by key of sizes not fitted the ratio in each round, fitted in that round."""
    works = {key: work_of(*key) for key in rounds[0]}
    if not latency:
        works = {key: work._replace(messages=0) for key, work in works.items()}
    found: dict[Key, list] = {key: [] for key in works if key[:2] in LARGER}
    for seconds in rounds:
        fitted = [key for key in seconds if key[:2] in FIT]
        machine = timing.fit([works[k] for k in fitted], [seconds[k] for k in fitted])
        for key, ratios in found.items():
            guess = timing.predict(works[key], machine).exposed
            ratios.append(guess / seconds[key])
    return found


def rows_of(rounds: list[dict[Key, float]]) -> list[Row]:
    """Return row 15, with and without latency: the size that is predicted worst."""
    what = "seconds of a step of sizes not fitted, 9 cases: predicted over measured"
    found = []
    for latency in (True, False):
        ratios = predicted_over_measured(rounds, latency)
        medians = {key: float(np.median(each)) for key, each in ratios.items()}
        worst = max(medians, key=lambda key: abs(np.log(medians[key])))
        low, high = interval(ratios[worst])
        inside = low >= 1 - BAR and high <= 1 + BAR
        outside = high < 1 - BAR or low > 1 + BAR
        verdict = MET if inside else MISSED if outside else NOT_DECIDED
        mean = np.mean([abs(each - 1) for each in medians.values()])
        found.append(
            Row(
                15,
                f"{what}, the worst" + ("" if latency else ", without a latency term"),
                f"within {BAR:.0%}" if latency else "printed",
                f"{medians[worst]:.3g}",
                f"{low:.3g} to {high:.3g}",
                verdict=verdict if latency else "",
                note=f"{worst[0]} layers, width {worst[1]}, {worst[2]}; "
                f"{mean:.0%} off on average",
                data={" ".join(map(str, k[:3])): each for k, each in ratios.items()},
            )
        )
    return found


def rows() -> list[Row]:
    """Return row 15 of the table."""
    rounds = zip(*(run_ranks(measure, 2, network)[0] for network in (True, False)))
    return rows_of([sent | free for sent, free in rounds])
