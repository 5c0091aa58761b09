"""Bytes of state and of activations: the formula of the ZeRO paper, and what is counted."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from utils import memory
from utils.models import GPT, GPT2_124M, SMOKE


def test_the_zero_paper():
    """7.5 billion parameters on 64 GPUs, figure 1 of arXiv 1910.02054."""
    gigabytes = [
        round(memory.predict(7_500_000_000, 64, stage, memory.MIXED).total / 1e9, 1)
        for stage in range(4)
    ]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
        memory.predict(1, 1, 4)


def test_state_bytes_of_one_process():
    model = GPT(SMOKE)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    measured = memory.state_bytes(model, optimizer)
    assert measured == memory.predict(parameters, 1, 0)
    assert measured.total == 16 * parameters


@pytest.fixture
def default_dtype():
    """Set the type that models are made in: fake ones can't be converted."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def kept(config, checkpointing=False) -> int:
    """Return bytes that a forward pass of 4 texts keeps; fake tensors are of any size."""
    with FakeTensorMode(), memory.count_memory() as counter:
        model = GPT(config)
        for block in model.blocks if checkpointing else ():
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False
            )
        before = counter.live
        tokens = torch.zeros(4, config.block_size, dtype=torch.long)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        held = counter.live - before
        assert loss.numel() == 1  # it keeps all the rest alive
        return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [SMOKE, GPT2_124M], ids=["0.2M", "163M"])
def test_activations_follow_the_formula(config, dtype, default_dtype):
    default_dtype(dtype)
    measured = kept(config)
    of = {"tokens": 4 * config.block_size, "width": config.width}
    of |= {"vocabulary": config.vocab_size, "bytes_per_number": dtype.itemsize}
    predicted = memory.activation_bytes(layers=config.layers, **of)
    assert measured == pytest.approx(predicted, rel=0.02)
    # a number more or less per token, layer and width would be seen
    one = dtype.itemsize * 4 * config.block_size * config.width * config.layers
    assert abs(measured - predicted) < one / 4
    # checkpointing keeps the input of each layer; the one computed again comes later
    inputs = memory.activation_bytes(layers=config.layers, checkpointing=True, **of)
    inputs -= 15 * one // config.layers
    assert abs(kept(config, checkpointing=True) - inputs) < one / 4


def test_activations_of_the_paper():
    """34 bytes less two masks; and what a model of 7 billion holds for 16,384 tokens."""
    after = 2 * 2  # bytes per token and width after the layers, in 16 bit
    assert memory.activation_bytes(1, 1, 1) == 34 - 2 + after
    large = memory.activation_bytes(16_384, 4096, 32)
    assert large == 16_384 * 4096 * (32 * 32 + after)
    assert large / 1e9 == pytest.approx(69, abs=0.1)
    checkpointed = memory.activation_bytes(16_384, 4096, 32, checkpointing=True)
    assert checkpointed == 16_384 * 4096 * (2 * (32 + 15) + after)
    vocabulary = memory.activation_bytes(16_384, 4096, 32, vocabulary=32_000) - large
    assert vocabulary == 4 * 16_384 * 32_000


def test_count_memory_follows_what_lives():
    with memory.count_memory() as counted:
        kept = torch.zeros(1000)  # 4,000 bytes
        gone = kept + 1
        assert (counted.live, counted.peak) == (8000, 8000)
        view = kept[10:]  # no memory of its own
        kept += 1
        del gone
        assert (counted.live, counted.peak) == (4000, 8000)
        view.untyped_storage().resize_(400)
        assert counted.live == 400
    assert torch.UntypedStorage.resize_ is counted._resize


def test_a_tensor_on_the_meta_device_has_no_memory():
    """As a model that is built there, before each rank gets its shards."""
    with memory.count_memory() as counted:
        shape = torch.empty(1000, device="meta") + 1
        assert shape.untyped_storage().nbytes() == 4000  # what it would have
        assert (counted.live, counted.peak) == (0, 0)


def test_what_existed_before_is_not_counted_and_types_are_kept():
    before = torch.zeros(1000)
    with memory.count_memory() as counted:
        before += 1
        assert counted.live == 0
        kept = torch.zeros(10, dtype=torch.float64)
        assert counted.live == kept.nbytes == 80
