"""ResNet-18 with one input channel and GroupNorm, and the GPT of part 03."""

import pytest
import torch
from torch import nn

from utils.errors import BadInput
from utils.models import (
    GPT,
    GPT2_124M,
    SMOKE,
    GPTConfig,
    Llama,
    RMSNorm,
    Shape,
    checkpoint_blocks,
    fill_by_name,
    resnet18,
)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_resnet_has_our_parameters_and_shapes(norm):
    """torchvision's 11,689,512, less 990 classes and two input channels."""
    model = resnet18(norm=norm)
    assert count(model) == 11_689_512 - 990 * (512 + 1) - 2 * 64 * 7 * 7
    model = resnet18(num_classes=7, in_channels=3, norm=norm)
    assert model(torch.rand(4, 3, 28, 28)).shape == (4, 7)


def test_norms():
    for name, kind in {"group": nn.GroupNorm, "batch": nn.BatchNorm2d}.items():
        norms = [m for m in resnet18(norm=name).modules() if "Norm" in type(m).__name__]
        assert len(norms) == 20
        assert all(type(norm) is kind for norm in norms)
    with pytest.raises(BadInput, match="'layer', but must be 'group' or 'batch'"):
        resnet18(norm="layer")


def test_only_group_norm_treats_every_image_alone():
    images = torch.rand(6, 1, 28, 28, dtype=torch.float64)
    difference = {}
    for norm in ("group", "batch"):
        torch.manual_seed(0)
        model = resnet18(norm=norm).double()  # in training mode
        together, alone = model(images), torch.cat([model(i) for i in images.split(3)])
        difference[norm] = (together - alone).abs().max().item()
    assert difference["group"] < 1e-12
    assert difference["batch"] > 1e-3


def test_gpt2_has_the_shape_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPT2_124M)
    # GPT-2's published size, whose output layer shares the weights of the embedding
    assert count(model) - model.head.weight.numel() == 124_439_808
    assert list(model.buffers()) == []


def test_a_token_sees_only_what_comes_before_it():
    torch.manual_seed(0)
    model = GPT(SMOKE)
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] += 1
    same = model(tokens) == model(changed % 256)
    assert same[:, :10].all()
    assert not same[:, 10:].all(dim=-1).any()


def test_init_weights_gives_a_meta_model_the_same_weights():
    expected = GPT(SMOKE)
    torch.manual_seed(0)
    expected.init_weights()  # once more: building it drew default weights as well
    with torch.device("meta"):
        model = GPT(SMOKE)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    theirs = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_filled_by_name_the_weights_are_as_init_weights_draws_them():
    """Same means and spreads, no two parameters equal, and no seed but the names."""
    drawn, filled = GPT(SMOKE), GPT(SMOKE)
    torch.manual_seed(1)
    fill_by_name(filled)
    for (name, ours), theirs in zip(filled.named_parameters(), drawn.parameters()):
        assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=2e-3), name
        assert ours.std().item() == pytest.approx(theirs.std().item(), abs=2e-3), name
    first, second = (filled.blocks[i].up.weight for i in (0, 1))
    assert not torch.equal(first, second)
    again = GPT(SMOKE)
    fill_by_name(again)
    assert torch.equal(again.blocks[1].up.weight, second)
    fill_by_name(again, seed=1)
    assert not torch.equal(again.blocks[1].up.weight, second)


def test_a_gpt_says_what_is_wrong():
    with pytest.raises(BadInput, match="choose a multiple of the number of heads"):
        GPT(GPTConfig(width=65))
    with pytest.raises(BadInput, match="reads at most 64"):
        GPT(SMOKE)(torch.zeros(1, 65, dtype=torch.long))


LLAMA = Shape(2, 32, 48, 4, 2, 50)


def test_a_llama_has_the_parameters_of_its_shape():
    """Those of Meta's models by hand: https://github.com/meta-llama/llama-models."""
    for shape, published in {
        Shape(32, 4096, 14_336, 32, 8, 128_256): 8_030_261_248,
        Shape(80, 8192, 28_672, 64, 8, 128_256): 70_553_706_496,
    }.items():
        with torch.device("meta"):
            model = Llama(shape)
        assert count(model) == published
        norms = (2 * shape.layers + 1) * shape.width
        assert shape.parameters == published - norms


def test_the_norm_of_llama_is_that_of_pytorch():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    ours, theirs = RMSNorm(8).double(), nn.RMSNorm(8, eps=1e-5).double()
    for norm in (ours, theirs):
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)  # our square is in float32
    grads = [
        torch.autograd.grad(norm(x).pow(3).sum(), [x, norm.weight])
        for norm in (ours, theirs)
    ]
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*grads))


def test_a_token_of_a_llama_sees_what_came_before_it_and_where_it_is():
    torch.manual_seed(0)
    model = Llama(LLAMA)
    one = torch.arange(8)[None]
    other = one.clone()
    other[0, 5] = 40
    same = (model(one) - model(other)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3
    # one layer sees the same tokens in any order, but for where they are
    model, turned = Llama(LLAMA._replace(layers=1)), one.clone()
    turned[0, :7] = one[0, :7].flip(0)
    assert (model(one)[0, -1] - model(turned)[0, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("what", ["selective", "full"])
def test_checkpointed_blocks_compute_the_same_and_keep_their_names(what):
    found = []
    for how in ("none", what):
        torch.manual_seed(0)
        model = Llama(LLAMA)
        checkpoint_blocks(model, how)
        model(torch.arange(8)[None]).square().sum().backward()
        found.append((model.state_dict(), [p.grad for p in model.parameters()]))
    (plain, gradients), (names, again) = found
    assert plain.keys() == names.keys()
    assert all(map(torch.equal, gradients, again))
