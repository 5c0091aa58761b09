"""ResNet-18 with one input channel and GroupNorm."""

import pytest
import torch
from torch import nn

from utils.models import resnet18


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_number_of_parameters(norm):
    """torchvision's 11,689,512, less 990 classes and two input channels."""
    model = resnet18(norm=norm)
    assert count(model) == 11_689_512 - 990 * (512 + 1) - 2 * 64 * 7 * 7
    assert f"{count(model) / 1e6:.2f}M" == "11.18M"


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes(norm, channels):
    model = resnet18(num_classes=7, in_channels=channels, norm=norm)
    assert model(torch.rand(4, channels, 28, 28)).shape == (4, 7)


def test_norms():
    for name, kind in {"group": nn.GroupNorm, "batch": nn.BatchNorm2d}.items():
        norms = [m for m in resnet18(norm=name).modules() if "Norm" in type(m).__name__]
        assert len(norms) == 20
        assert all(type(norm) is kind for norm in norms)
    with pytest.raises(ValueError, match="'layer', but must be 'group' or 'batch'"):
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


def test_same_seed_same_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in resnet18().parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
