"""A notebook's dataset in the processes of a `DataLoader`."""

from collections.abc import Iterator
from typing import Any

import cloudpickle
from torch.utils.data import IterableDataset


class ByValue(IterableDataset):
    """An iterable dataset that travels with the code of its class.

    A `DataLoader` sends its dataset to processes that start afresh ("spawn",
    "forkserver"). They import the class, which fails for one of a notebook.

    Source: https://github.com/cloudpipe/cloudpickle
    """

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __getstate__(self) -> bytes:
        return cloudpickle.dumps(self.dataset)

    def __setstate__(self, code: bytes) -> None:
        self.dataset = cloudpickle.loads(code)
