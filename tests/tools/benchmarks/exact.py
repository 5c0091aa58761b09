"""Bytes of state and bytes sent, beside the formulas: exact, so CI gates them too."""

from collections.abc import Iterable

import torch

from tests import sharding
from tests.tools.benchmarks.rows import Row
from utils import memory
from utils.launch import run_ranks

STRATEGIES = {"ddp": 0, "fsdp2": 3, "fsdp2-keep": 3, "zero1": 1, "zero2": 2, "zero3": 3}


def measure() -> dict[str, dict]:
    """Return this rank's bytes of state and bytes sent, by strategy, on two ranks."""
    float32 = torch.float32
    found = {"ddp": sharding.ddp(float32)}
    found["fsdp2"] = sharding.fsdp2(float32, 1)
    found["fsdp2-keep"] = sharding.fsdp2(float32, 1, keep=True)
    for stage in (1, 2, 3):
        found[f"zero{stage}"] = sharding.zero(stage, float32, 3)  # step 1 sends more
    # between two passes, where stage 1 holds whole gradients
    found["zero1"]["state"] = sharding.zero(1, float32, 2, passes=2)["state"]
    # where stage 2 holds more than its formula: shown beside the row
    found["zero2"]["between"] = sharding.zero(2, float32, 2, passes=2)["state"]
    keys = {"sent", "state", "between"}
    return {name: {k: one[k] for k in keys & one.keys()} for name, one in found.items()}


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
        state[name] = _worst(sum(found[name]["state"]) / total[name] for found in ranks)
        sends = sharding.predict_sent(name, 2)
        sent[name] = _worst(found[name]["sent"] / sends for found in ranks)
    between = _worst(sum(found["zero2"]["between"]) / total["zero2"] for found in ranks)
    held = (
        "; zero1 between two passes, the others in a step of one. Between two passes "
        f"zero2 is at {between:.4f}: both ranks hold the whole gradient of the weight "
        "that the border of their partitions cuts"
    )
    return [
        _row(6, "bytes sent per step over the formula", sent, 0.01),
        _row(7, "state bytes per rank over the formula", state, 0.02, held),
    ]


def _worst(ratios: Iterable[float]) -> float:
    return max(ratios, key=lambda value: abs(value - 1))


def _row(
    number: int, what: str, ratios: dict[str, float], tolerance: float, note: str = ""
) -> Row:
    worst = _worst(ratios.values())
    return Row(
        number,
        f"{what}, 2 ranks, {len(ratios)} strategies: the worst",
        f"within {tolerance:.0%}",
        f"{worst:.4f}",
        verdict="met" if abs(worst - 1) <= tolerance else "missed",
        note=", ".join(f"{name} {value:.4f}" for name, value in ratios.items()) + note,
        data=ratios,
    )
