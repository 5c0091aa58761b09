"""FSDP2 and ZeRO train like one process, and hold and send what the formulas say.

As in test_parity.py, float64 decides "same algorithm" and the first gradients in float32
"same code path". ZeRO keeps float32 master copies, so its float64 runs agree to 1e-6. Its
stage 0 refuses to reduce float64: it runs in float32, where a loss of 5 is rounded to
5e-7, and ten steps of AdamW make 1e-5 (seen) of that in the parameters: 1e-5 and 1e-4.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests import sharding
from utils import comms, memory
from utils.launch import run_ranks

KEEP = {"fsdp2": False, "fsdp2-keep": True}
PARAMETERS = sum(p.numel() for p in sharding.build_model(torch.float32).parameters())


def fsdp2_all() -> dict:
    results = {}
    for name, keep in KEEP.items():
        results[name] = sharding.fsdp2(torch.float64, keep=keep)
        results[f"{name} float32"] = sharding.fsdp2(torch.float32, 1, keep=keep)
    if dist.get_world_size() == 2:
        results["summed"] = sharding.fsdp2(torch.float64, 1, sum_gradients=True)
        results["bf16"] = sharding.fsdp2(torch.float32, bf16=True)
        results["from meta"] = duplicated_shards()
    return results


def duplicated_shards() -> tuple[torch.Tensor, torch.Tensor]:
    """What `init_weights` on shards makes of a weight, and what it should be."""
    with torch.device("meta"):
        model = sharding.GPT(sharding.CONFIG)
    sharding.shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    whole = model.head.weight.full_tensor()
    return whole, sharding.build_model(torch.float32).head.weight.detach()


def zero_all() -> dict:
    results = {}
    for stage in range(4):
        # stage 0 refuses to reduce float64
        dtype = torch.float64 if stage else torch.float32
        results[stage] = sharding.zero(stage, dtype)
        results[stage, "float32"] = sharding.zero(stage, torch.float32, steps=3)
        if dist.get_world_size() == 2:
            results[stage, "passes"] = sharding.zero(stage, torch.float32, 3, passes=2)
    if dist.get_world_size() == 2:
        results["bf16"] = sharding.zero(3, torch.float32, bf16={"enabled": True})
    return results


@cache
def fsdp2(num_workers: int) -> dict:
    return run_ranks(fsdp2_all, num_workers)[0]


@cache
def zero(num_workers: int) -> dict:
    return run_ranks(zero_all, num_workers)[0]


@cache
def one_process(dtype: torch.dtype) -> dict:
    return sharding.one_process(dtype)


def worst(ours, theirs) -> float:
    if isinstance(ours[0], float):
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    pairs = zip(ours, theirs, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", KEEP)
def test_fsdp2_equals_one_process(name, num_workers):
    ours, theirs = fsdp2(num_workers)[name], one_process(torch.float64)
    assert len(ours["losses"]) == 10
    for key in ("losses", "gradients", "parameters"):
        assert worst(ours[key], theirs[key]) < 1e-10, key
    assert ours["test loss"] == pytest.approx(theirs["test loss"], abs=1e-5)
    single = fsdp2(num_workers)[f"{name} float32"]
    gradients = one_process(torch.float32)["gradients"]
    assert worst(single["gradients"], gradients) < 1e-5


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_zero_equals_one_process(stage, num_workers):
    ours, theirs = zero(num_workers)[stage], one_process(torch.float64)
    assert len(ours["losses"]) == 10
    assert worst(ours["losses"], theirs["losses"]) < (1e-6 if stage else 1e-5)
    assert worst(ours["gradients"], theirs["gradients"]) < 1e-6
    assert worst(ours["parameters"], theirs["parameters"]) < (1e-6 if stage else 1e-4)
    assert ours["test loss"] == pytest.approx(theirs["test loss"], abs=1e-5)
    gradients = one_process(torch.float32)["gradients"]
    assert worst(zero(num_workers)[stage, "float32"]["gradients"], gradients) < 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_two_passes_of_half_the_batch_are_one_of_all(stage):
    """The script's step, with gradient_accumulation_steps of the config."""
    ours, theirs = zero(2)[stage, "passes"], zero(2)[stage, "float32"]
    assert worst(ours["losses"], theirs["losses"]) < 1e-5
    assert worst(ours["gradients"], theirs["gradients"]) < 1e-6
    assert worst(ours["parameters"], theirs["parameters"]) < 1e-5


def test_bf16_stays_near():
    exact = one_process(torch.float64)["losses"]
    assert 1e-6 < worst(fsdp2(2)["bf16"]["losses"], exact) < 0.05
    assert 1e-6 < worst(zero(2)["bf16"]["losses"], exact) < 0.05


def test_summed_gradients_are_seen():
    """A negative control: without the division by the world size, twice the length."""
    theirs = one_process(torch.float64)["gradients"]
    ours = fsdp2(2)["summed"]["gradients"]
    assert worst(ours, theirs) > 1e-3
    assert worst([g / 2 for g in ours], theirs) < 1e-10


def test_duplicated_shards_are_seen():
    """A negative control: on a CPU mesh, `init_weights` gives all ranks one shard."""
    ours, theirs = fsdp2(2)["from meta"]
    assert torch.equal(*ours.chunk(2))
    assert (ours - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("name", KEEP)
def test_fsdp2_holds_and_sends_what_the_formulas_say(name):
    result = fsdp2(2)[f"{name} float32"]
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
    for measured, formula in zip(zero(2)[stage, "passes"]["state"], predicted):
        assert measured == pytest.approx(formula, rel=0.02)
    sent = comms.predict(f"zero{stage}" if stage else "ddp", 4 * PARAMETERS, 2)
    assert zero(2)[stage, "float32"]["sent"] == pytest.approx(sent, rel=0.01)
