"""Bytes of state and bytes sent, beside the formulas: exact."""

from collections.abc import Iterable

import torch

from tests import sharding
from tests.tools.benchmarks.ratios import MET, MISSED
from tests.tools.benchmarks.report import Row
from utils import memory
from utils.launch import run_ranks

STRATEGIES = {"ddp": 0, "fsdp2": 3, "fsdp2-keep": 3, "zero1": 1, "zero2": 2, "zero3": 3}


def measure() -> dict[str, dict]:
    """Return this rank's bytes of state and bytes sent, by strategy, on two ranks."""
    float32 = torch.float32
    measured = {"ddp": sharding.ddp(float32)}
    measured["fsdp2"] = sharding.fsdp2(float32, 1)
    measured["fsdp2-keep"] = sharding.fsdp2(float32, 1, keep=True)
    for stage in (1, 2, 3):
        measured[f"zero{stage}"] = sharding.zero(stage, float32, 3)  # step 1 sends more
    # while gradients accumulate: stage 1 holds whole ones, stage 2 more than its formula
    measured["zero1"]["state"] = sharding.zero(1, float32, 2, accumulation_steps=2)[
        "state"
    ]
    measured["zero2"]["between"] = sharding.zero(2, float32, 2, accumulation_steps=2)[
        "state"
    ]
    keys = {"sent", "state", "between"}
    return {k: {key: v[key] for key in keys & v.keys()} for k, v in measured.items()}


def rows() -> list[Row]:
    """Return rows 6 and 7 of the table."""
    ranks = run_ranks(measure, 2)
    parameters = sum(
        p.numel() for p in sharding.build_model(torch.float32).parameters()
    )
    sent, state, total = {}, {}, {}
    for name, stage in STRATEGIES.items():
        kind = memory.DEEPSPEED_FP32 if name.startswith("zero") else memory.FP32
        total[name] = memory.predict(parameters, 2, stage, kind).total
        state[name] = worst(sum(rank[name]["state"]) / total[name] for rank in ranks)
        formula = sharding.predict_sent(name, 2)
        sent[name] = worst(rank[name]["sent"] / formula for rank in ranks)
    between = worst(sum(rank["zero2"]["between"]) / total["zero2"] for rank in ranks)
    held = (
        "; zero1 while it accumulates gradients, the others in a step without. While zero2 "
        f"accumulates it is at {between:.4f}: both ranks hold the whole gradient of the "
        "weight that the border of their partitions cuts"
    )
    return [
        row(6, "bytes sent per step over the formula", sent, 0.01),
        row(7, "state bytes per rank over the formula", state, 0.02, held),
    ]


def worst(ratios: Iterable[float]) -> float:
    return max(ratios, key=lambda value: abs(value - 1))


def row(
    number: int, what: str, ratios: dict[str, float], tolerance: float, note: str = ""
) -> Row:
    """Return a row that the worst strategy decides."""
    value = worst(ratios.values())
    return Row(
        number,
        f"{what}, 2 ranks, {len(ratios)} strategies: the worst",
        f"within {tolerance:.0%}",
        f"{value:.4f}",
        verdict=MET if abs(value - 1) <= tolerance else MISSED,
        note=", ".join(f"{name} {value:.4f}" for name, value in ratios.items()) + note,
        data=ratios,
    )
