"""What FSDP2 and ZeRO hold and send equals the formulas; two passes, and bf16.

That they train like one process is shown in test_parity.py.
"""

from functools import cache

import pytest
import torch

from tests import sharding
from utils import comms, memory
from utils.launch import run_ranks

KEEP = {"fsdp2": False, "fsdp2-keep": True}
PARAMETERS = sum(p.numel() for p in sharding.build_model(torch.float32).parameters())


def fsdp2_all() -> dict:
    results = {n: sharding.fsdp2(torch.float32, 1, keep=k) for n, k in KEEP.items()}
    return results | {"bf16": sharding.fsdp2(torch.float32, bf16=True)}


def zero_all() -> dict:
    results = {"bf16": sharding.zero(3, torch.float32, bf16={"enabled": True})}
    for stage in range(4):
        results[stage] = sharding.zero(stage, torch.float32, steps=3)
        results[stage, "passes"] = sharding.zero(stage, torch.float32, 3, passes=2)
    return results


@cache
def fsdp2() -> dict:
    return run_ranks(fsdp2_all, 2)[0]


@cache
def zero() -> dict:
    return run_ranks(zero_all, 2)[0]


def worst(ours, theirs) -> float:
    if isinstance(ours[0], float):
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    pairs = zip(ours, theirs, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("stage", range(4))
def test_two_passes_of_half_the_batch_are_one_of_all(stage):
    """The script's step, with gradient_accumulation_steps of the config."""
    ours, theirs = zero()[stage, "passes"], zero()[stage]
    assert worst(ours["losses"], theirs["losses"]) < 1e-5
    assert worst(ours["gradients"], theirs["gradients"]) < 1e-6
    assert worst(ours["parameters"], theirs["parameters"]) < 1e-5


def test_bf16_stays_near():
    exact = sharding.one_process(torch.float64)["losses"]
    assert 1e-6 < worst(fsdp2()["bf16"]["losses"], exact) < 0.05
    assert 1e-6 < worst(zero()["bf16"]["losses"], exact) < 0.05


@pytest.mark.parametrize("name", KEEP)
def test_fsdp2_holds_and_sends_what_the_formulas_say(name):
    result = fsdp2()[name]
    predicted = memory.predict(PARAMETERS, 2, stage=3)
    for measured, formula in zip(result["state"], predicted):
        assert measured == pytest.approx(formula, rel=0.02)
    sent = comms.predict(name, 4 * PARAMETERS, 2)
    assert result["sent"] == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
def test_zero_holds_and_sends_what_the_formulas_say(stage):
    per_parameter = memory.DEEPSPEED_FP32 if stage else memory.FP32
    predicted = memory.predict(PARAMETERS, 2, stage, per_parameter)
    # between two passes, where stage 1 holds whole gradients
    for measured, formula in zip(zero()[stage, "passes"]["state"], predicted):
        assert measured == pytest.approx(formula, rel=0.02)
    sent = comms.predict(f"zero{stage}" if stage else "ddp", 4 * PARAMETERS, 2)
    assert zero()[stage]["sent"] == pytest.approx(sent, rel=0.01)
