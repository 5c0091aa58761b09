"""Bytes of state and of activations: the formula of the ZeRO paper, and what is counted."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from utils import memory
from utils.models import GPT, GPT2_124M, SMOKE, Llama, Shape, checkpoint_blocks


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


LLAMA = Shape(4, 512, 1792, 8, 2, 1000)
BUILD = {
    "GPT, 0.2M": (GPT, SMOKE, SMOKE.shape),
    "GPT, 163M": (GPT, GPT2_124M, GPT2_124M.shape),
    "Llama": (Llama, LLAMA, LLAMA),
}


def kept_by(build, config, checkpointing) -> int:
    """Return bytes that a forward pass of 4 texts keeps; fakes may have any size."""
    with FakeTensorMode(), memory.count_memory() as counter:
        model = build(config)
        checkpoint_blocks(model, checkpointing)
        before = counter.live
        tokens = torch.zeros(4, 64, dtype=torch.long)
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), tokens.flatten())
        del logits
        assert loss.numel() == 1  # it keeps all the rest alive
        return counter.live - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("of", BUILD)
def test_activations_follow_the_formula(of, checkpointing, dtype, default_dtype):
    default_dtype(dtype)
    build, config, shape = BUILD[of]
    kept = kept_by(build, config, checkpointing)
    layers = memory.numbers_kept(shape, checkpointing) * shape.layers
    number = dtype.itemsize * 4 * 64 * shape.width
    predicted = number * (layers + 2) + 4 * 4 * 64 * shape.vocabulary
    # a number more or less per token, layer and width would be seen
    assert abs(kept - predicted) < number * shape.layers / 4


@pytest.mark.parametrize("vocabulary", [64, 100_000])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_peak_of_a_step_is_the_loss_or_a_block(checkpointing, vocabulary):
    """With 64 times the tokens of a real step, so that gradients are little beside it."""
    shape = LLAMA._replace(vocabulary=vocabulary)
    with FakeTensorMode(), memory.count_memory() as counter:
        model = Llama(shape)
        checkpoint_blocks(model, checkpointing)
        before = counter.live
        tokens = torch.zeros(64, 1024, dtype=torch.long)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    predicted = memory.activation_bytes(shape, 64 * 1024, checkpointing, 4)
    assert counter.peak - before == pytest.approx(predicted, rel=0.03)


def test_activations_of_the_paper():
    """34 bytes less two masks per token, layer and width, and 20.25 numbers of Llama 3."""
    gpt = Shape(32, 4096, 4 * 4096, 32, 32, 0, gated=False)
    assert memory.numbers_kept(gpt) == (34 - 2) / 2
    large = memory.activation_bytes(gpt, 16_384, per_word=0)
    assert large == 16_384 * 4096 * (32 * 32 + 2 * 5)  # 5: gradients inside a block
    assert memory.numbers_kept(Shape(80, 8192, 28_672, 64, 8, 0)) == 20.25


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
