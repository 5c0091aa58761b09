"""The datasets that the lessons train on.

Every image dataset is a torch Dataset of pairs (image, label): image a float32 tensor of
shape [channels, height, width] with values from 0 to 1, label an integer from 0 to 9.
Text is a Dataset of pairs (tokens, the tokens that follow them). `write_shards` writes
images to stream, as many as you want.
"""

from torch.utils.data import Dataset

from utils.datasets.batches import check_batch_size, share_of_batch
from utils.datasets.by_value import ByValue
from utils.datasets.downloaded import cifar10, fashion_mnist, mnist
from utils.datasets.shards import path_or_digits, write_shards
from utils.datasets.shipped import digits, text
from utils.errors import BadInput

__all__ = [
    "DATASETS",
    "ByValue",
    "check_batch_size",
    "cifar10",
    "digits",
    "fashion_mnist",
    "load",
    "mnist",
    "path_or_digits",
    "share_of_batch",
    "text",
    "write_shards",
]

DATASETS = {f.__name__: f for f in (digits, mnist, fashion_mnist, cifar10)}


def load(name: str, split: str = "train") -> Dataset:
    """Return the dataset called `name`, one of the keys of DATASETS.

    Raises:
        BadInput: there is no dataset of that name.
    """
    if name not in DATASETS:
        raise BadInput(
            f"There is no dataset {name!r}: choose one of {', '.join(DATASETS)}."
        )
    return DATASETS[name](split)
