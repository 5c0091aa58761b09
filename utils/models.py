"""The models that every lesson trains."""

from functools import partial

from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

NORMS = {"group": partial(nn.GroupNorm, 32), "batch": nn.BatchNorm2d}


def resnet18(num_classes: int = 10, in_channels: int = 1, norm: str = "group"):
    """torchvision's ResNet-18 (11 million parameters) with random weights.

    Takes images of shape [batch, in_channels, height, width] and returns logits of shape
    [batch, num_classes]. Two changes to torchvision's model: the first convolution takes
    `in_channels` channels, and `norm="group"` (the default) is GroupNorm with 32 groups,
    which treats every image alone. `norm="batch"` is the original BatchNorm: it averages
    over the images of one rank, so results depend on how many ranks there are.

    Sources: He et al. 2015 (arXiv 1512.03385); Wu and He 2018 (arXiv 1803.08494).

    Raises:
        ValueError: `norm` is neither "group" nor "batch".
    """
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}, but must be 'group' or 'batch'.")
    model = torchvision_resnet18(num_classes=num_classes, norm_layer=NORMS[norm])
    first = model.conv1
    model.conv1 = nn.Conv2d(
        in_channels, 64, first.kernel_size, first.stride, first.padding, bias=False
    )
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
