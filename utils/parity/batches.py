"""A training's batches: which items each one holds, and in which order they come."""

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from .randomness import Sources, digest, raw_bytes
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

LISTED = 100_000  # batches of an epoch, up to which all of them are listed before


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch: in lists, mappings and dataclasses, too."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from itertools.chain.from_iterable(map(tensors_of, batch.values()))
    elif isinstance(batch, (list, tuple)):
        yield from itertools.chain.from_iterable(map(tensors_of, batch))
    elif _is_dataclass(batch):
        yield from itertools.chain.from_iterable(map(tensors_of, vars(batch).values()))


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__")


def cast(batch: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return the same batch on a device, with its floating point tensors in `dtype`."""
    if isinstance(batch, torch.Tensor):
        batch = batch.to(device)
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = cast(value, dtype, device)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cast(value, dtype, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(cast(value, dtype, device) for value in batch)
    if _is_dataclass(batch):
        changed = copy.copy(batch)
        for key, value in vars(batch).items():  # also of one that is frozen
            object.__setattr__(changed, key, cast(value, dtype, device))
        return changed
    return batch


def row_digests(batch: Any, axis: int = 0) -> tuple[int, ...]:
    """Return a number for each item of a batch, from all that its tensors hold of it."""
    tensors = [t.detach() for t in tensors_of(batch) if t.ndim > axis]
    if not tensors:
        return (digest(repr(batch).encode()),)
    rows = tensors[0].shape[axis]
    parts = []
    for tensor in tensors:
        if tensor.shape[axis] == rows and tensor.numel():
            whole = raw_bytes(tensor.movedim(axis, 0))
            size = len(whole) // rows
            parts.append([whole[k * size : (k + 1) * size] for k in range(rows)])
    return tuple(digest(*(part[k] for part in parts)) for k in range(rows))


def _bytes_of(item: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield what tells an item of a data set from others, before it is collated."""
    parts: Iterable = ()
    if isinstance(item, torch.Tensor):
        yield raw_bytes(item)
    elif isinstance(item, (bool, int, float, str, bytes)):
        yield repr(item).encode()
    elif isinstance(item, Mapping):
        parts = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    elif getattr(getattr(item, "dtype", None), "kind", "") == "O":
        parts = item.tolist()  # its bytes are addresses
    elif hasattr(item, "tobytes"):  # an array, or an image
        yield item.tobytes()
    else:
        parts = getattr(item, "__dict__", {}).values()
    for part in parts if depth < 5 else ():
        yield from _bytes_of(part, depth + 1)


def item_digest(item: Any) -> int | None:
    """Return a number for an item of a data set; None if nothing in it can be read."""
    parts = [*_bytes_of(item)]
    sizes = [len(part).to_bytes(8, "big") for part in parts]
    both = itertools.chain.from_iterable(zip(sizes, parts))
    return digest(*both) if parts else None


def _behind(dataset: Any, index: Any) -> Any:
    """Return the index into the data set of which `dataset` may be a subset."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return index


class Items:
    """A map-style data set whose draws are pinned to the item, or noted."""

    def __init__(self, dataset: Any, epoch: int, pin: bool, sources: Sources):
        self.dataset, self.epoch, self.pin, self.sources = dataset, epoch, pin, sources
        sources.add([dataset])
        self.drew = False
        self.noted: list[dict[str, int]] = []  # generators that an item used, before it
        self.contents: list[int | None] = []  # of the items since somebody has looked

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        states = self.sources.states
        if not self.pin:
            before = states()
            item = self.dataset[index]
            used = {name for name, number in states().items() if before[name] != number}
            self.noted.append({name: before[name] for name in used})
            self.contents.append(item_digest(item))
            return item
        number = int(_behind(self.dataset, index))
        with self.sources.seeded(digest(repr((self.epoch, number)).encode())):
            before = states()
            item = self.dataset[index]
            self.drew |= states() != before
        self.contents.append(item_digest(item))
        return item


class Batches:
    """A loader's batches of one epoch, with the items of each.

    Attributes:
        indices: by step, of the items, if it is a DataLoader of a map-style data set.
        whole: whether `indices` are those of all the epoch.
        shuffles: whether the loader is seen to shuffle.
        length: of the data set, if items have indices.
        drew: whether anything random was drawn for the last batch.
        loose: whether it was drawn as items were collated, and belongs to none.
    """

    def __init__(
        self, loader: Iterable, epoch: int, pin: bool, most: int, sources: Sources
    ):
        self.sources = sources
        self.items: Items | None = None
        self.indices: list[tuple] | None = None
        self.whole = True
        self.shuffles = self.drew = self.loose = False
        self.length: int | None = None
        self.calls = 0
        # A subclass that collates in its own way, as of graphs, is one all the same.
        if (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
        ):
            sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
            self.shuffles = isinstance(sampler, RandomSampler) or (
                getattr(sampler, "shuffle", False) is True
            )
            if loader.batch_sampler is not None:
                loader = self._rebuilt(loader, epoch, pin, most)
        self.loader = iter(loader)

    def _rebuilt(self, loader: Any, epoch: int, pin: bool, most: int) -> DataLoader:
        """Return the same loader in this process, with its order known before it begins."""
        try:  # a sampler may be endless, and say so by a length of billions
            count = len(loader.batch_sampler)
        except (TypeError, NotImplementedError):
            count = LISTED + 1
        take = LISTED if count <= LISTED else most + 1
        batches = list(itertools.islice(loader.batch_sampler, take))
        self.whole = len(batches) < take or count == take
        dataset = whole = loader.dataset
        while isinstance(whole, Subset):
            whole = whole.dataset
        self.length = len(whole)
        self.indices = [
            tuple(int(_behind(dataset, index)) for index in batch) for batch in batches
        ]
        if pin or loader.worker_init_fn is None:
            self.items = dataset = Items(dataset, epoch, pin, self.sources)
        if loader.num_workers and not pin:  # as torch seeds its workers
            seed = int(torch.empty((), dtype=torch.int64).random_())
            for source in self.sources.all()[1:3]:
                source.seed(seed)
        return DataLoader(
            dataset,
            batch_sampler=batches[: most + 1],
            collate_fn=loader.collate_fn,
            generator=torch.Generator(),  # it draws a number of which nothing depends
        )

    def next(self) -> Any:
        """Return the next batch, or None."""
        states = self.sources.states
        if self.items is None or not self.items.pin:
            before = states()
            batch = next(self.loader, None)
            self.drew = states() != before
            return batch
        self.calls += 1
        with self.sources.seeded(digest(repr((self.items.epoch, self.calls)).encode())):
            before = states()
            batch = next(self.loader, None)
            self.loose |= states() != before
        self.drew = self.loose or self.items.drew
        return batch

    def raw(self) -> tuple[int, ...]:
        """Return a number for each item of the last batch, before it was collated.

        Nothing if there is no data set, or one of items that cannot be read.
        """
        if self.items is None:
            return ()
        found, self.items.contents = self.items.contents, []
        known = tuple(number for number in found if number is not None)
        return known if len(known) == len(found) else ()
