"""Prove that N workers train like one process, or name the mistake that keeps them from it.

    python -m utils.parity my_training.py

`my_training.py` defines the training by these names; run on its own it may do anything:

    def build_model(): ...                            # a module on the CPU; seed it here
    def build_optimizer(model): ...                   # whatever `train_step` needs
    def make_loader(rank, world_size, epoch): ...     # this rank's batches of an epoch
    def train_step(model, optimizer, batch): ...      # one step; may return the loss
    def wrap(model): ...                              # if not DistributedDataParallel
    SHARDS = True                                     # if each rank is to hold a share

One process and then 2 and 3 train for two epochs on this machine's CPUs, in float64 and
in float32, in processes of their own that talk through gloo. One process is a group of
one, wrapped by the same function. What all of them do is recorded step by step, and each
diagnosis is a small function of these records. Two things are taken out first, as they
can equal one process in no program: dropout, and the draws of an augmentation (which are
tied to the item instead). They are judged in a run of their own. `torch.compile` leaves
a model as it is here, so that each operator is seen.

This file needs torch alone: copy it to wherever your training is. Status of the command:
0 if N workers equal one, 1 if not, or if there is a mistake all the same, 2 if the file
cannot be used.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import multiprocessing as mp
import os
import pickle
import random
import re
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

# float64: relative errors of the first step, and of later ones
FIRST, LATER = 1e-10, 1e-7
ROUNDED = 1e-5  # float32: of the first gradient; what float32 within float64 may cost
LOW = 0.03  # what bfloat16 or float16 may cost
FRESH_SEED = 67280421310721  # of torch's generator in every new process
WIDTH = 64  # numbers that stand for a tensor, see `_sketch`
MASK = 16  # numbers in a draw from which on equal ones are no accident
UNEXPLAINING = {"same noise", "unseeded noise", "same order", "shards nothing"}
HINTS = {  # by a pattern of what torch says of a training that the tool cannot run
    "SyncBatchNorm": "It needs GPUs, and this tool trains on CPUs: leave it out here.",
    r"(?i)\bfloat\b.*\bdouble\b|\bdouble\b.*\bfloat\b": "The tool also trains in "
    "float64: write `.to(next(model.parameters()).dtype)` in place of `.float()`.",
}
FUNCTIONS = {
    "build_model": "build_model()",
    "build_optimizer": "build_optimizer(model)",
    "make_loader": "make_loader(rank, world_size, epoch)",
    "train_step": "train_step(model, optimizer, batch)",
    "wrap": "wrap(model)",
}


class BadInput(Exception):
    """Say in one sentence why a training cannot be judged, and how to mend that."""


@dataclass(frozen=True)
class Training:
    """What is judged, as functions; `python -m utils.parity` takes them from a file.

    Args:
        build_model: returns a module on the CPU, with equal weights at each call; so it
            seeds the generator itself.
        build_optimizer: gets the wrapped model, and returns what `train_step` needs: an
            optimizer, or several, with their schedulers.
        make_loader: gets rank, world size and epoch, and returns this rank's batches, of
            tensors whose first dimension is that of the items. All ranks' batches of a
            step together are to be that of one process.
        train_step: gets wrapped model, optimizer and batch; takes a step, with all that
            belongs to it, and may return the loss.
        wrap: makes a strategy of a model; None is DistributedDataParallel.
        shards: whether each rank is to hold a share of the state only. Not needed for
            FSDP2 and ZeroRedundancyOptimizer.
    """

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], Any]
    make_loader: Callable[[int, int, int], Iterable]
    train_step: Callable[[nn.Module, Any, Any], Any]
    wrap: Callable[[nn.Module], nn.Module] | None = None
    shards: bool = False


class Finding(NamedTuple):
    """A mistake: a short name, what it is and how to mend it, and its evidence."""

    name: str
    sentence: str
    evidence: str


@dataclass
class Report:
    """What `check` found; as text, a few lines.

    Attributes:
        equal: whether N workers equal one process, for each N.
        findings: mistakes, each once; there may be some although N workers equal one.
        lines: how near the runs are, and bytes of state per rank.
    """

    equal: dict[int, bool]
    findings: list[Finding]
    lines: list[str]

    @property
    def ok(self) -> bool:
        """Say whether all are equal, and nothing was found."""
        return all(self.equal.values()) and not self.findings

    @property
    def names(self) -> list[str]:
        """Return the names of the findings."""
        return [finding.name for finding in self.findings]

    def __str__(self) -> str:
        found = [
            f"Looks like: {f.sentence}\n  Evidence: {f.evidence}" for f in self.findings
        ]
        return "\n".join([*self.lines, *found])


# What a rank records. A sketch is a list of at most WIDTH numbers that stands for a tensor.
Sketches = dict[str, list[float]]


@dataclass
class Update:
    """A call of an optimizer's `step`."""

    step: int
    rates: list[float]  # learning rate of each group
    gradients: Sketches  # as the optimizer gets them
    own: Sketches  # after this rank's last backward, before anything is averaged
    unclipped: Sketches | None = None  # before torch's clipping, if it was called
    norm: float | None = None  # that torch's clipping found
    most: float | None = None  # to which it clips
    replaced: bool = False  # whether they are other tensors than those of backward
    lost: int = 0  # rows of data whose gradients were set to zero before this update
    kept: int = 0


@dataclass
class Step:
    """A call of `train_step`."""

    epoch: int
    items: tuple  # of this rank: indices, or contents if there are none
    contents: tuple = ()
    raw: tuple = ()  # contents as the data set gives them, before a batch may pad them
    loss: float | None = None
    rows: int = 0  # different ones of the batch's first tensor
    forwarded: int = 0  # of them, those that the model has seen
    parameters: Sketches = field(default_factory=dict)
    buffers: Sketches = field(default_factory=dict)
    draws: list[tuple[str, int, int]] = field(default_factory=list)
    random_items: list = field(default_factory=list)  # by generator, of its data set


@dataclass
class Record:
    """What one rank did in one run."""

    rank: int
    start: Sketches
    start_buffers: Sketches
    at_wrap: dict[str, bool]  # parameters then, and whether they were trained
    batch_norms: list[str]
    sharded: bool
    orders: list[list[tuple]] = field(default_factory=list)  # items: epoch, step
    contents: list[list[tuple]] = field(default_factory=list)  # of those trained on
    length: int | None = None  # of the data set, if items have indices
    whole: bool = True  # whether `orders` has all items of each epoch
    identified: bool = True  # whether items can be told from each other
    shuffles: bool = False
    steps: list[Step] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    unequal_steps: tuple[int, list[int]] | None = None  # epoch; batches of each rank
    state_bytes: int = 0
    shared_bytes: int = 0  # of them, those that the strategy claims to share
    drew: bool = False  # whether anything random was drawn in a step or by its items
    augmented: bool = False  # by its items
    low: bool = False  # whether a step computes in bfloat16 or float16
    loose: bool = False  # whether a draw could not be tied to items


Records = list[Record]  # by rank


# ------------------------------------------------------------------ recording, in a rank


@functools.lru_cache(maxsize=100)
def _signs(length: int) -> torch.Tensor:
    """Return [length] numbers 1 and -1 that look random and are the same everywhere."""
    mixed = torch.arange(length) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * 2545247474239171083
    return (1 - 2 * ((mixed >> 40) & 1)).to(torch.int8)


@torch.no_grad()
def _sketch(tensor: torch.Tensor) -> list[float]:
    """Return at most WIDTH numbers that stand for a tensor, sharded or not.

    They are sums of its numbers with signs that look random: a linear map that keeps
    lengths nearly (a count sketch), so differences and ratios of sketches are those of
    the tensors, and no mistake can hide in it.

    Source: https://doi.org/10.1016/S0304-3975(03)00400-6
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.to_dense() if whole.is_sparse else whole
    flat = whole.detach().to(torch.float64).flatten()
    if len(flat) <= WIDTH:
        return flat.tolist()
    flat = flat * _signs(len(flat))
    rest = flat[len(flat) // WIDTH * WIDTH :]
    sums = flat[: len(flat) - len(rest)].view(-1, WIDTH).sum(0)
    sums[: len(rest)] += rest
    return sums.tolist()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, batch.values()))
    elif isinstance(batch, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, batch))
    elif _is_dataclass(batch):
        yield from itertools.chain.from_iterable(map(_tensors, vars(batch).values()))


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__")


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return the same batch with its floating point tensors in `dtype`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            changed[key] = _cast(value, dtype)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cast(value, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cast(value, dtype) for value in batch)
    if _is_dataclass(batch):
        changed = copy.copy(batch)
        for key, value in vars(batch).items():  # also of one that is frozen
            object.__setattr__(changed, key, _cast(value, dtype))
        return changed
    return batch


def _digest(*parts: bytes) -> int:
    return int.from_bytes(
        hashlib.blake2b(b"".join(parts), digest_size=6).digest(), "big"
    )


def _row_digests(batch: Any) -> tuple[int, ...]:
    """Return a number for each item of a batch, from all that its tensors hold of it."""
    tensors = [t.detach() for t in _tensors(batch) if t.ndim]
    if not tensors:
        return (_digest(repr(batch).encode()),)
    rows = len(tensors[0])
    parts = [
        t.contiguous().reshape(rows, -1).view(torch.uint8).numpy()
        for t in tensors
        if len(t) == rows and t.numel()
    ]
    return tuple(_digest(*(part[i].tobytes() for part in parts)) for i in range(rows))


def _bytes_of(item: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield what tells an item of a data set from others, before it is collated."""
    parts: Iterable = ()
    if isinstance(item, torch.Tensor):
        yield item.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
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


def _digest_item(item: Any) -> int | None:
    """Return a number for an item of a data set; None if nothing in it can be read."""
    parts = [*_bytes_of(item)]
    sizes = [len(part).to_bytes(8, "big") for part in parts]
    both = itertools.chain.from_iterable(zip(sizes, parts))
    return _digest(*both) if parts else None


class _Generator(NamedTuple):
    """A source of random numbers, and what reads, sets and seeds it."""

    name: str
    owner: Any
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _generator(each: Any) -> _Generator | None:
    """Return `each` as a generator, if it is one of torch, Python or NumPy.

    Not those of all the program, which `_sources` has.
    """
    numpy = sys.modules.get("numpy")
    if each is torch.default_generator or each is random.uniform.__self__:  # type: ignore
        return None
    if isinstance(each, torch.Generator):
        name, get, put = "its torch.Generator", each.get_state, each.set_state
        return _Generator(name, each, get, put, each.manual_seed)
    if isinstance(each, random.Random):
        name = "its random.Random"
        return _Generator(name, each, each.getstate, each.setstate, each.seed)
    if numpy and isinstance(each, numpy.random.RandomState):
        name, get, put = "its RandomState", each.get_state, each.set_state
        return _Generator(name, each, get, put, lambda n: each.seed(n % 2**32))
    if numpy and isinstance(each, numpy.random.Generator):
        bits = each.bit_generator

        def set_bits(state: Any) -> None:
            bits.state = state

        return _Generator(
            "its numpy Generator",
            each,
            lambda: copy.deepcopy(bits.state),
            set_bits,
            lambda n: set_bits(type(bits)(n).state),
        )
    return None


# Those that the training has made itself; a rank trains one at a time.
_own_generators: list[_Generator] = []


def _sources() -> list[_Generator]:
    """Return all generators that the program may draw from."""
    found = [
        _Generator(
            "torch", torch, torch.get_rng_state, torch.set_rng_state, torch.manual_seed
        ),
        _Generator(
            "Python's random", random, random.getstate, random.setstate, random.seed
        ),
    ]
    if numpy := sys.modules.get("numpy"):
        of = numpy.random
        found.append(
            _Generator(
                "NumPy", of, of.get_state, of.set_state, lambda n: of.seed(n % 2**32)
            )
        )
    return found + _own_generators


def _find_generators(roots: Iterable[Any]) -> list[_Generator]:
    """Return the generators that objects hold, or the modules of functions."""
    found, seen = [], set()
    waiting = [(root, 0) for root in roots]
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen or depth > 5 or isinstance(each, (torch.Tensor, type)):
            continue
        seen.add(id(each))
        if generator := _generator(each):
            found.append(generator)
        elif isinstance(each, functools.partial):
            waiting += [(part, depth) for part in (each.func, *each.args)]
        elif inspect.isfunction(each):
            if not (each.__module__ or "").startswith(("torch", "numpy")):
                with contextlib.suppress(ValueError):  # a variable that is not set yet
                    cells = inspect.getclosurevars(each)
                    waiting += [(v, depth + 1) for v in cells.globals.values()]
                    waiting += [(v, depth + 1) for v in cells.nonlocals.values()]
        elif isinstance(each, dict):
            some = itertools.islice(each.values(), 1000)
            waiting += [(value, depth + 1) for value in some]
        elif isinstance(each, (list, tuple)):
            waiting += [(value, depth + 1) for value in each[:100]]
        elif inspect.ismethod(each):
            waiting += [(part, depth) for part in (each.__self__, each.__func__)]
        elif not inspect.ismodule(each):
            waiting.append((getattr(each, "__dict__", {}), depth))
    return found


def _number(state: Any) -> int:
    """Return a short number for the state of a generator."""
    if isinstance(state, torch.Tensor):
        return zlib.crc32(state.numpy().tobytes())
    if isinstance(state, dict):
        return _number(tuple(state.values()))
    if isinstance(state, tuple):
        return hash(tuple(map(_number, state)))
    if hasattr(state, "tobytes"):
        return zlib.crc32(state.tobytes())
    return zlib.crc32(repr(state).encode()) if isinstance(state, str) else hash(state)


def _generators() -> dict[str, int]:
    """Return a number for the state of each generator, by its name."""
    states: dict[str, int] = {}
    for source in _sources():
        state = source.get()
        if source.name == "Python's random":  # 625 numbers, hashed as one
            state = hash(state[:2])
        states[source.name] = hash((states.get(source.name), _number(state)))
    return states


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let draws within depend on `seed` alone, and change nothing outside."""
    sources = _sources()
    states = [source.get() for source in sources]
    for source in sources:
        source.seed(seed)
    try:
        yield
    finally:
        for source, state in zip(sources, states):
            source.set(state)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Draws(TorchDispatchMode):
    """Pin what torch draws in a step, or, in a run for the noise, note it.

    Pinned, dropout keeps everything (its mask gets its expected value), and another draw
    depends on epoch, step and, if it has a row for each item of the batch, on the item.
    """

    def __init__(self, pin: bool):
        super().__init__()
        self.pin = pin
        self.parameters: list[torch.Tensor] = []
        self.begin(0, 0, ())

    def begin(self, epoch: int, step: int, items: tuple) -> None:
        self.at, self.items, self.calls = (epoch, step), items, 0
        self.drew = self.loose = self.low = False
        self.noted: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            kind = getattr(result, "dtype", None)
            self.low |= kind in (torch.bfloat16, torch.float16)
            return result
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") or "philox" in name:
            # tagged for a dropout that it leaves to another operator here
            return func(*args, **kwargs)
        self.drew = True
        if self.pin:
            return self._pinned(func, name, args, kwargs)
        drawn = func(*args, **kwargs)
        tensor = drawn[-1] if isinstance(drawn, tuple) else drawn
        local = _local(tensor)
        # what is full of one number says nothing, and integers may be an order of items
        is_noise = local.is_floating_point() or local.dtype == torch.bool
        # noise on weights has to be equal on all ranks
        is_noise &= not self._on_weights(args, local)
        if is_noise and local.numel() >= MASK and (local != local.flatten()[0]).any():
            content = local.detach().contiguous().flatten().view(torch.uint8)
            digest = zlib.crc32(content.numpy().tobytes())
            self.noted.append((name, local.numel(), digest))
        return drawn

    def _on_weights(self, args: tuple, drawn: torch.Tensor) -> bool:
        """Return whether a draw is for a parameter or its gradient."""
        weights = [_local(p) for p in self.parameters]
        if args and isinstance(args[0], torch.Tensor):  # drawn into, or like it
            also = [_local(p.grad) for p in self.parameters if p.grad is not None]
            pointers = {tensor.data_ptr() for tensor in [*weights, *also]}
            return _local(args[0]).data_ptr() in pointers
        is_of_items = drawn.ndim > 0 and len(drawn) == len(self.items)
        return not is_of_items and drawn.shape in {weight.shape for weight in weights}

    def _pinned(self, func, name: str, args: tuple, kwargs: dict) -> Any:
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli_" and not isinstance(args[-1], torch.Tensor):
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        self.calls += 1
        kwargs = {k: None if k == "generator" else v for k, v in kwargs.items()}
        by_row = name not in ("randperm", "multinomial")
        with _seeded(_digest(repr((*self.at, self.calls)).encode())):
            drawn = func(*args, **kwargs)
        rows = drawn.ndim and len(drawn) == len(self.items) and by_row
        rows = rows and not self._on_weights(args, _local(drawn))
        if not rows:
            self.loose |= drawn.numel() > 1
            return drawn
        per_item = []
        for item in self.items:
            with _seeded(_digest(repr((self.at[0], self.calls, item)).encode())):
                per_item.append(func(*args, **kwargs)[0].clone())
        return drawn.copy_(torch.stack(per_item))


def _behind(dataset: Any, index: Any) -> Any:
    """Return the index into the data set of which `dataset` may be a subset."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return index


class _Items:
    """A map-style data set whose draws are pinned to the item, or noted."""

    def __init__(self, dataset: Any, epoch: int, pin: bool):
        self.dataset, self.epoch, self.pin = dataset, epoch, pin
        known = {id(source.owner) for source in _own_generators}
        found = _find_generators([dataset])
        _own_generators.extend(each for each in found if id(each.owner) not in known)
        self.drew = False
        self.noted: list = []
        self.contents: list[int | None] = []  # of the items since somebody has looked

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if not self.pin:
            before = _generators()
            item = self.dataset[index]
            after = _generators()
            used = {
                name: before[name] for name in after if before.get(name) != after[name]
            }
            self.noted.append(used)
            self.contents.append(_digest_item(item))
            return item
        number = int(_behind(self.dataset, index))
        with _seeded(_digest(repr((self.epoch, number)).encode())):
            before = _generators()
            item = self.dataset[index]
            self.drew |= _generators() != before
        self.contents.append(_digest_item(item))
        return item


class _Batches:
    """A loader's batches of one epoch, with the items of each."""

    def __init__(self, loader: Iterable, epoch: int, pin: bool, limit: int):
        self.items: _Items | None = None
        self.indices: list[tuple] | None = None
        self.shuffles = self.drew = self.loose = False
        self.length: int | None = None
        self.calls = 0
        if type(loader) is DataLoader and not isinstance(
            loader.dataset, IterableDataset
        ):
            sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
            self.shuffles = isinstance(sampler, RandomSampler) or (
                getattr(sampler, "shuffle", False) is True
            )
            batches = loader.batch_sampler
            if batches is not None:
                loader = self._rebuilt(
                    loader, list(itertools.islice(batches, 10**6)), epoch, pin, limit
                )
        self.loader = iter(loader)

    def _rebuilt(self, loader, batches: list, epoch: int, pin: bool, limit: int):
        """Return the same loader in this process, with its order known before it begins."""
        dataset = whole = loader.dataset
        while isinstance(whole, Subset):
            whole = whole.dataset
        self.length = len(whole)
        self.indices = [
            tuple(int(_behind(dataset, index)) for index in batch) for batch in batches
        ]
        if pin or loader.worker_init_fn is None:
            self.items = dataset = _Items(dataset, epoch, pin)
        if loader.num_workers and not pin:  # as torch seeds its workers
            seed = int(torch.empty((), dtype=torch.int64).random_())
            for source in _sources()[1:3]:
                source.seed(seed)
        return DataLoader(
            dataset,
            batch_sampler=batches[: limit + 1],
            collate_fn=loader.collate_fn,
            generator=torch.Generator(),  # it draws a number of which nothing depends
        )

    def next(self) -> Any:
        """Return the next batch, or None."""
        if self.items is None or not self.items.pin:
            before = _generators()
            batch = next(self.loader, None)
            self.drew = _generators() != before
            return batch
        self.calls += 1
        with _seeded(_digest(repr((self.items.epoch, self.calls)).encode())):
            before = _generators()
            batch = next(self.loader, None)
            self.loose |= _generators() != before  # drawn as items were collated
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


class _Recorder:
    """Write down what a rank does, through hooks of torch: it changes no result."""

    def __init__(self, draws: _Draws):
        self.draws = draws
        self.model = nn.Module()
        self.own: Sketches = {}
        self.incoming: dict[str, torch.Tensor] = {}
        self.backward: dict[int, torch.Tensor] = {}  # gradients, by id of the parameter
        self.names: dict[int, str] = {}
        self.unclipped: Sketches | None = None
        self.norm: float | None = None
        self.most: float | None = None
        self.updates: list[Update] = []
        self.optimizers: list = []
        self.depth = self.bytes = self.optimizer_bytes = self.step = 0
        self.seen: set = set()  # rows of data, in this step
        self.forwards: list[set] = []  # rows of data, since the last update
        self.first_kept = 0
        self.handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self.hooked: set[int] = set()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def watch(self, model: nn.Module) -> None:
        """Hook parameters that are new, or trained only now; called before every step."""
        self.model = model
        for name, parameter in _named(self.model):
            self.names[id(parameter)] = name
            new = id(parameter) not in self.hooked and parameter.requires_grad
            if new and not isinstance(parameter, DTensor):
                self.hooked.add(id(parameter))
                parameter.register_hook(self._arriving(id(parameter)))
                parameter.register_post_accumulate_grad_hook(
                    self._accumulated(id(parameter))
                )
        self.draws.parameters = [parameter for _, parameter in _named(self.model)]

    # The names are those of now: a wrap may have given others.
    def _arriving(self, number: int) -> Callable:
        def note(gradient: torch.Tensor) -> None:
            self.incoming[self.names[number]] = gradient.detach()

        return note

    def _accumulated(self, number: int) -> Callable:
        def note(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            name = self.names[number]
            before, now = self.own.get(name), _sketch(parameter.grad)
            arrived = self.incoming.pop(name, None)
            # What had been there is gone, although no optimizer has used it.
            there = before and math.hypot(*before) > 1e-8 * math.hypot(*now)
            if there and arrived is not None and _sketch(arrived) == now:
                self.first_kept = max(0, len(self.forwards) - 1)
            self.own[name] = now
            self.backward[number] = parameter.grad

        return note

    def forward(self, module, args, kwargs) -> None:
        """Hook the wrapped model: note which rows of the batch it is given."""
        if torch.is_grad_enabled() and module.training:
            first = next(_tensors([args, kwargs]), None)
            self.forwards.append(
                set(_row_digests(first)) if first is not None else set()
            )
            self.seen |= self.forwards[-1]

    def note_clipping(self, parameters: Iterable) -> None:
        """Note what gradients are like before torch clips them, first in a step."""
        parameters = (
            [parameters] if isinstance(parameters, torch.Tensor) else parameters
        )
        with_grad = [p for p in parameters if p.grad is not None]
        sketches = {self.name(p): _sketch(p.grad) for p in with_grad}
        self.unclipped = sketches | (self.unclipped or {})

    def name(self, parameter: torch.Tensor) -> str:
        return self.names.get(id(parameter), f"parameter of shape {[*parameter.shape]}")

    @staticmethod
    def _has_closure(args: tuple, kwargs: dict) -> bool:
        """Return whether `step` computes the gradients itself; it is in `args`, too."""
        return any(map(callable, args[1:])) or callable(kwargs.get("closure"))

    def _before_update(self, optimizer, args, kwargs) -> None:
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)
        self.depth += 1
        if self.depth == 1:  # one that another one calls is recorded with it
            # behind hooks of the program's own, which may average in there
            self.last = optimizer.register_step_pre_hook(self._record_update)

    def _record_update(self, optimizer, args, kwargs) -> None:
        if not self._has_closure(args, kwargs):
            self._record_gradients(optimizer)

    def _record_gradients(self, optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in parameters if p.grad is not None]
        gradients = {self.name(p): _sketch(p.grad) for p in trained}
        kept = set().union(*self.forwards[self.first_kept :])
        lost = set().union(*self.forwards[: self.first_kept]) - kept
        self.updates.append(
            Update(
                step=self.step,
                rates=[float(group["lr"]) for group in optimizer.param_groups],
                gradients=gradients,
                own={name: self.own[name] for name in gradients if name in self.own},
                unclipped=self.unclipped,
                norm=self.norm,
                most=self.most,
                replaced=any(
                    p.grad is not self.backward.get(id(p), p.grad) for p in trained
                ),
                lost=len(lost),
                kept=len(kept),
            )
        )
        self._count_bytes()

    def _after_update(self, optimizer, args, kwargs) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.last.remove()
            if self._has_closure(args, kwargs):
                self._record_gradients(optimizer)
            self.own, self.backward, self.unclipped = {}, {}, None
            self.norm = self.most = None
            self.forwards, self.first_kept = [], 0
            self._count_bytes()

    def _count_bytes(self) -> None:
        """Note the most bytes on this rank: parameters, gradients, state of optimizers."""
        of_model: dict[int, torch.Tensor] = {}
        of_optimizers: dict[int, torch.Tensor] = {}
        for _, parameter in _named(self.model):
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    of_model[id(tensor)] = tensor
        for optimizer in self.optimizers:
            for state in list(getattr(optimizer, "state", {}).values()):
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        of_optimizers[id(value)] = value
        whole = _size(of_model | of_optimizers)
        self.bytes = max(self.bytes, whole)
        self.optimizer_bytes = max(self.optimizer_bytes, _size(of_optimizers))


def _size(tensors: dict[int, torch.Tensor]) -> int:
    """Return the bytes that are on this rank."""
    return sum(t.numel() * t.element_size() for t in map(_local, tensors.values()))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in model.named_parameters()
    ]


def _sketch_buffers(model: nn.Module) -> Sketches:
    """Sketch buffers of the state: others are caches that may differ in shape."""
    kept = {name.removeprefix("module.") for name in model.state_dict(keep_vars=True)}
    named = [(n.removeprefix("module."), b) for n, b in model.named_buffers()]
    return {n: _sketch(_bounded(b)) for n, b in named if n in kept}


def _bounded(buffer: torch.Tensor) -> torch.Tensor:
    """Return the same with 1 and -1 for infinities, as in a mask of attention."""
    if not buffer.is_floating_point():
        return buffer
    return torch.nan_to_num(buffer, nan=math.nan, posinf=1.0, neginf=-1.0)


def _freeze(module: nn.Module) -> None:
    """Let BatchNorm use its running statistics, whatever mode the program sets."""

    def off(module, args):
        module.was_training, module.training = module.training, False

    def back(module, args, result):
        module.training = module.was_training

    for each in module.modules():
        if (
            isinstance(each, nn.modules.batchnorm._BatchNorm)
            and each.running_mean is not None
        ):
            each.register_forward_pre_hook(off)
            each.register_forward_hook(back)


@contextlib.contextmanager
def _watched_clipping(recorder: _Recorder) -> Iterator[None]:
    """Let torch's functions that clip tell `recorder` what they found."""
    module, kept = nn.utils.clip_grad, {}

    def watch(original: Callable) -> Callable:
        def clip(parameters, *args, **kwargs):
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            recorder.note_clipping(parameters)
            norm = original(parameters, *args, **kwargs)
            if norm is not None:
                norm_here = norm.full_tensor() if isinstance(norm, DTensor) else norm
                recorder.norm = float(norm_here)
                recorder.most = float(args[0] if args else kwargs["max_norm"])
            return norm

        return clip

    # A program may have imported the functions already: then its own module has them.
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        kept[name] = original = getattr(module, name)
        watched = watch(original)
        setattr(module, name, watched)
        setattr(nn.utils, name, watched)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(module, name, original)
            setattr(nn.utils, name, original)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in `dtype`, until the end or another choice within."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fresh_generators(run: "_Run", rank: int) -> None:
    """Draw as in a new process: torch the same in all of them, the others not.

    Functions may be of a module that is imported once and has seeded them then: so only a
    file, which every run executes, meets those others as chance has left them.
    """
    torch.manual_seed(FRESH_SEED)
    for source in _sources()[1:3]:
        number = random.SystemRandom().getrandbits(32) if run.by_chance else rank
        source.seed(number)


# Generators of functions that live on between runs, and their states at first.
_first_states: dict[int, tuple[Any, Any]] = {}


def _rewind(generators: list[_Generator]) -> None:
    """Let generators of the training begin as in its first run."""
    for each in generators:
        here = each.owner, each.get()
        kept = _first_states.setdefault(id(each.owner), here)
        each.set(kept[1])


@dataclass(frozen=True)
class _Run:
    """How a rank trains: in a type; with draws pinned, BatchNorm frozen, or neither."""

    dtype: torch.dtype
    pin: bool = True
    freeze: bool = False
    by_chance: bool = False


def _train(
    load: Callable[[], Training],
    run: _Run,
    epochs: int,
    limit: int,
    say: Callable[[str], None],
) -> Record:
    """Train on this rank of a group that exists, and record it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo")
    _own_generators.clear()
    _fresh_generators(run, rank)
    draws = _Draws(run.pin)
    recorder = _Recorder(draws)
    with (
        _watched_clipping(recorder),
        contextlib.closing(recorder),
        _default_dtype(torch.float32),
    ):
        say("in build_model")
        training = load()
        functions = [getattr(training, name) for name in FUNCTIONS]
        _own_generators[:] = _find_generators(functions)
        _rewind(_own_generators)
        model = training.build_model()
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise BadInput(f"build_model() returned a {kind}: let it return a module.")
        model = model.to(run.dtype)
        if run.freeze:
            _freeze(model)
        recorder.watch(model)  # before a strategy adds hooks of its own
        say("in wrap")
        wrapped = (training.wrap or DistributedDataParallel)(model)
        if not isinstance(wrapped, nn.Module):
            kind = type(wrapped).__name__
            raise BadInput(f"wrap(model) returned a {kind}: let it return a module.")
        torch.set_default_dtype(run.dtype)
        at_wrap = {name: p.requires_grad for name, p in _named(wrapped)}
        say("in build_optimizer")
        optimizer = training.build_optimizer(wrapped)
        recorder.watch(wrapped)
        wrapped.register_forward_pre_hook(recorder.forward, with_kwargs=True)
        norms = [
            name.removeprefix("module.")
            for name, each in wrapped.named_modules()
            if isinstance(each, nn.modules.batchnorm._BatchNorm)
        ]
        record = Record(
            rank=rank,
            start={name: _sketch(p) for name, p in _named(wrapped)},
            start_buffers=_sketch_buffers(wrapped),
            at_wrap=at_wrap,
            batch_norms=norms,
            sharded=training.shards,
        )
        for epoch in range(epochs):
            say(f"in make_loader, epoch {epoch}")
            loader = training.make_loader(rank, world_size, epoch)
            if not isinstance(loader, Iterable):
                raise BadInput(
                    f"make_loader(...) returned a {type(loader).__name__}: let it return "
                    "what yields this rank's batches."
                )
            _train_epoch(
                training, wrapped, optimizer, record, recorder, loader, epoch, run.dtype,
                limit, control, say,
            )  # fmt: skip
            if record.unequal_steps:
                break
        if world_size == 1 and not record.steps:
            raise BadInput(
                "make_loader(0, 1, 0) gives no batch: let one process have them all."
            )
        record.updates = recorder.updates
        record.state_bytes = record.shared_bytes = recorder.bytes
        record.sharded |= any(isinstance(p, DTensor) for _, p in _named(wrapped))
        zero = any(
            type(each).__name__ == "ZeroRedundancyOptimizer"
            for each in recorder.optimizers
        )
        if zero and not record.sharded:  # it shares its own state, and no parameter
            record.sharded, record.shared_bytes = True, recorder.optimizer_bytes
    say("at the end")
    return record


def _train_epoch(
    training,
    wrapped,
    optimizer,
    record,
    recorder,
    loader,
    epoch,
    dtype,
    limit,
    control,
    say,
) -> None:
    draws, order = recorder.draws, []
    batches = _Batches(loader, epoch, draws.pin, limit)
    record.shuffles |= batches.shuffles
    record.length = batches.length
    record.contents.append([])
    while True:
        number = len(order)
        say(f"at step {number} of epoch {epoch}")
        batch = batches.next()
        mine = torch.tensor([float(batch is not None)])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, control)
        dist.all_reduce(most, dist.ReduceOp.MAX, control)
        if least != most:  # whoever trains on would wait for the others for ever
            _count_batches(record, batches, batch, number, epoch, limit, control)
            break
        if batch is None or number == limit:
            break
        contents = items = _row_digests(batch)
        raw = batches.raw()
        if batches.indices:
            items = batches.indices[number]
        else:
            record.identified &= not batches.drew and any(
                tensor.ndim for tensor in _tensors(batch)
            )
        record.augmented |= batches.drew
        record.drew |= batches.drew
        record.loose |= batches.loose
        order.append(items)
        record.contents[-1].append(contents)
        batch = _cast(batch, dtype)
        recorder.watch(wrapped)
        recorder.step, recorder.seen = len(record.steps), set()
        draws.begin(epoch, number, items)
        seed = _digest(repr((epoch, number)).encode())
        pinned = _seeded(seed) if draws.pin else contextlib.nullcontext()
        step = Step(epoch, items, contents, raw)
        if batches.items:
            step.random_items, batches.items.noted = batches.items.noted, []
        with pinned:
            before = _generators()
            with draws:
                loss = training.train_step(wrapped, optimizer, batch)
            other = {n: v for n, v in _generators().items() if n != "torch"}
            record.loose |= any(before.get(name) != v for name, v in other.items())
        record.drew |= draws.drew or record.loose
        record.loose |= draws.loose
        record.low |= draws.low
        if isinstance(loss, (int, float, torch.Tensor)):
            loss = torch.as_tensor(loss).detach()
            step.loss = float(loss) if loss.numel() == 1 else None
        first = next((t for t in _tensors(batch) if t.ndim), None)
        rows = set(_row_digests(first)) if first is not None else set()
        # a step that changes what it forwards leaves no rows to count, but by accident
        step.rows = len(rows)
        step.forwarded = len(recorder.seen) if recorder.seen <= rows else 0
        step.draws = draws.noted
        step.parameters = {name: _sketch(p) for name, p in _named(wrapped)}
        step.buffers = _sketch_buffers(wrapped)
        record.steps.append(step)
    record.whole &= batches.indices is not None or len(order) < limit
    record.orders.append(batches.indices or order)


def _count_batches(record, batches, batch, number, epoch, limit, control) -> None:
    if batches.indices is not None:
        count = len(batches.indices)
    else:
        rest = sum(1 for _ in itertools.islice(batches.loader, limit))
        count = number + (batch is not None) * (1 + rest)
    counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([float(count)]), control)
    record.unequal_steps = epoch, [int(each) for each in counts]


def record(
    training: Training,
    dtype: torch.dtype = torch.float64,
    epochs: int = 2,
    steps: int = 20,
) -> Record:
    """Train on this rank of a process group that exists, and return what it did.

    For what has a launcher of its own; `check` starts ranks itself. All ranks call it.
    """
    return _train(lambda: training, _Run(dtype), epochs, steps, lambda where: None)


def _vector(sketches: Sketches, names: Iterable[str]) -> torch.Tensor:
    numbers = itertools.chain.from_iterable(sketches[name] for name in names)
    return torch.tensor([*numbers], dtype=torch.float64)


def _relative(ours: Sketches, theirs: Sketches) -> float:
    """Return the length of the difference over that of `theirs`, each as one vector."""
    if set(ours) != set(theirs):
        return math.inf
    a, b = _vector(ours, theirs), _vector(theirs, theirs)
    size = ((a - b).norm() / (b.norm() or 1.0)).item()
    return math.inf if math.isnan(size) else size


class Distances(NamedTuple):
    """Relative errors: the length of the difference over that of one process' values."""

    losses: float  # the mean over ranks, of all steps
    gradient: float  # of the first update
    parameters: float  # after the last step


def distances(alone: Record, together: Records) -> Distances:
    """Return how far ranks are from one process; the farthest of them counts."""
    first, last = alone.updates[0], alone.steps[-1]
    if any(len(rank.steps) != len(alone.steps) for rank in together):
        return Distances(math.inf, math.inf, math.inf)
    losses = [[step.loss for step in rank.steps] for rank in together]
    mean = torch.tensor(losses, dtype=torch.float64).mean(0)
    theirs = torch.tensor([step.loss for step in alone.steps], dtype=torch.float64)
    return Distances(
        ((mean - theirs).norm() / theirs.norm()).item(),
        max(_relative(r.updates[0].gradients, first.gradients) for r in together),
        max(_relative(r.steps[-1].parameters, last.parameters) for r in together),
    )


# ------------------------------------------------------------- processes and a deadline


@dataclass(frozen=True)
class _Payload:
    """A training on its way to a rank: the path of a file, or pickled functions."""

    path: str | None = None
    pickled: bytes = b""

    def load(self) -> Training:
        if not self.path:
            return pickle.loads(self.pickled)
        spec = importlib.util.spec_from_file_location("training_to_judge", self.path)
        if not spec or not spec.loader:
            raise BadInput(
                f"{self.path} is not a file of Python: its name ends in .py."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        sys.argv = [self.path]  # as if it were started without options
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise BadInput(
                f"{self.path} cannot be imported: {what}. What a script does at its top "
                'level belongs under `if __name__ == "__main__":`.'
            ) from problem
        return _from_module(module, self.path)


def _from_module(module: Any, path: str) -> Training:
    found = {}
    for name, call in FUNCTIONS.items():
        function = getattr(module, name, None)
        if function is None and name == "wrap":
            continue
        if function is None:
            raise BadInput(f"{path} defines no {name}: add `def {call}`.")
        if not callable(function):
            raise BadInput(f"{name} in {path} is not a function: make it `def {call}`.")
        arguments = call[len(name) + 1 : -1].split(", ") if call[-2] != "(" else []
        with contextlib.suppress(ValueError):  # some callables show no signature
            try:
                inspect.signature(function).bind(*arguments)
            except TypeError:
                raise BadInput(
                    f"{name} in {path} takes other arguments: make it `def {call}`."
                ) from None
        found[name] = function
    return Training(**found, shards=bool(getattr(module, "SHARDS", False)))


def _payload(training: Training | str | Path) -> _Payload:
    if isinstance(training, Training):
        try:  # cloudpickle also sends functions of a notebook
            from cloudpickle import dumps
        except ImportError:
            from pickle import dumps
        try:
            return _Payload(pickled=dumps(training))
        except Exception as problem:
            raise BadInput(
                f"The functions cannot be sent to other processes ({problem}): define "
                "them in a file and give its path, or install cloudpickle."
            ) from problem
    path = Path(training)
    if not path.is_file():
        raise BadInput(f"There is no file {path}: name the file with your training.")
    return _Payload(path=str(path.resolve()))


class _Failure(NamedTuple):
    """How a group of ranks ended before its time."""

    kind: str  # "bad", "raised", "died" or "hangs"
    sentence: str


Runs = dict[str, Record]  # of one rank


def _runs_of_rank(payload: _Payload, epochs: int, limit: int, say) -> Runs:
    """Make all runs of one training on this rank; the first shows which are needed."""

    def train(name: str, run: _Run) -> Record:
        say.name = name
        return _train(payload.load, run, epochs, limit, say)

    runs = {"float64": train("float64", _Run(torch.float64))}
    if runs["float64"].batch_norms:
        run = _Run(torch.float64, freeze=True)
        runs["frozen"] = train("float64, BatchNorm frozen", run)
    runs["float32"] = train("float32", _Run(torch.float32))
    drew = torch.tensor([float(runs["float64"].drew)])
    dist.all_reduce(drew, dist.ReduceOp.MAX)
    if drew:
        run = _Run(torch.float32, pin=False, by_chance=bool(payload.path))
        runs["noise"] = train("float32 with noise", run)
        if dist.get_world_size() == 1:
            runs["noise again"] = train("float32 with noise", run)
    return runs


class _Say:
    """Tell the process that started this rank where it stands."""

    def __init__(self, pipe):
        self.pipe, self.name = pipe, ""

    def __call__(self, where: str) -> None:
        self.pipe.send_bytes(pickle.dumps(("at", f"{where} ({self.name})")))


def _be_rank(
    rank: int, world_size: int, store: str, payloads: list[_Payload], epochs: int,
    limit: int, timeout: float, pipe,
) -> None:  # fmt: skip
    """Do what a process does: join the group, train, and send the records."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile leaves modules as they are
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # what N ranks print several times over
    os.dup2(quiet, 2)
    say = _Say(pipe)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),  # the deadline comes first
        )
        found = [_runs_of_rank(payload, epochs, limit, say) for payload in payloads]
        answer: tuple = ("done", found)
    except BadInput as problem:
        answer = ("bad", str(problem))
    except (Exception, SystemExit) as problem:
        what = " ".join(f"{type(problem).__name__}: {problem}".split())
        answer = ("raised", f"{what}{_line_of(problem)}")
    pipe.send_bytes(pickle.dumps(answer))
    pipe.recv_bytes()  # stays, so that no other rank sees it go; it is ended from outside


def _line_of(problem: BaseException) -> str:
    """Return the last line of the training's own code that led to an exception."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if "site-packages" not in frame.filename and frame.filename != __file__:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _group(
    payloads: list[_Payload], world_size: int, epochs: int, limit: int, timeout: float
) -> list[list[Runs]] | _Failure:
    """Train in `world_size` processes: by rank, the runs of each training.

    A rank that raises or dies ends them all, and so do `timeout` seconds in which none
    begins a step.
    """
    context = mp.get_context("forkserver")
    ranks, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                store = f"{folder}/store"
                args = (
                    rank,
                    world_size,
                    store,
                    payloads,
                    epochs,
                    limit,
                    timeout,
                    there,
                )
                process = context.Process(target=_be_rank, args=args, daemon=False)
                ranks.append(process)
                process.start()
                there.close()  # so that this end sees the end of a rank that dies
                pipes.append(here)
            return _collect(ranks, pipes, timeout)
        finally:
            for process in ranks:
                if process.pid:
                    process.kill()
                    process.join()


def _collect(ranks: list, pipes: list, timeout: float) -> list[list[Runs]] | _Failure:
    places, results = ["at its start"] * len(ranks), {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ranks):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = connection.wait(waiting, timeout=max(0, deadline - time.monotonic()))
        if not ready:
            late = [r for r in range(len(ranks)) if r not in results]
            where = "; ".join(f"rank {r} of {len(ranks)} is {places[r]}" for r in late)
            return _Failure(
                "hangs", f"no rank has moved for {timeout:g} seconds: {where}"
            )
        deadline = time.monotonic() + timeout
        for pipe in list[Any](ready):
            rank = pipes.index(pipe)
            of = f"rank {rank} of {len(ranks)}"
            try:
                kind, *rest = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                ranks[rank].join()
                code = ranks[rank].exitcode
                return _Failure(
                    "died", f"{of} died with exit code {code} {places[rank]}"
                )
            if kind == "at":
                places[rank] = rest[0]
            elif kind == "done":
                results[rank] = rest[0]
            elif kind == "bad":
                return _Failure("bad", rest[0])
            else:
                for other, process in enumerate(ranks):  # whose end others notice
                    process.join(timeout=0.2)
                    if process.exitcode is not None:
                        died = f"rank {other} of {len(ranks)} died with exit code"
                        where = f"{process.exitcode} {places[other]}"
                        return _Failure("died", f"{died} {where}")
                return _Failure("raised", f"{of} raised {places[rank]}: {rest[0]}")
    return [results[rank] for rank in range(len(ranks))]


# ------------------------------------------- diagnoses: small functions of the records


class _Difference(NamedTuple):
    """Where N workers leave one process."""

    step: int
    update: int | None  # the optimizer's step, if its gradients differ first
    what: str
    size: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}, by {self.size:.1e} of its size"


def _length(sketches: Sketches) -> float:
    return math.hypot(*itertools.chain.from_iterable(sketches.values()))


def _apart(ours: Sketches, theirs: Sketches) -> tuple[float, str]:
    """Return the largest relative difference of a tensor, and its name.

    A tensor counts as at least 1e-4 of the length of all: gradients that are zero but
    for rounding differ as much as they like.
    """
    if odd := sorted(set(ours) ^ set(theirs)):
        return math.inf, odd[0]
    floor, worst = 1e-4 * _length(theirs), (0.0, "")
    for name, numbers in theirs.items():
        if len(ours[name]) != len(numbers):
            return math.inf, name
        scale = max(math.hypot(*numbers), floor) or 1.0
        size = math.dist(ours[name], numbers) / scale
        worst = max(worst, (math.inf if math.isnan(size) else size, name))
    return worst


@dataclass
class _Case:
    """Ranks of one number of workers beside one process, and where they differ.

    `one` and `ranks` are of the run to look for causes in: where there is BatchNorm, the
    one in which it uses its running statistics. `live` is as the program is written.
    """

    alone: Runs
    together: list[Runs]

    def __post_init__(self):
        key = "frozen" if "frozen" in self.alone else "float64"
        self.one, self.ranks = self.alone[key], [runs[key] for runs in self.together]
        self.n = len(self.ranks)
        records = [self.one, *self.ranks]
        own_indices = len({record.length for record in records}) > 1
        if own_indices:
            steps = [step for record in records for step in record.steps]
            before = all(
                step.raw for step in steps
            )  # else a batch may have padded them
            self.one, *self.ranks = (_by_content(each, before) for each in records)
        # What differs by chance cannot be pinned: not even one index has one content.
        self.odd_items = _odd_items(self.one, self.ranks)
        self.loose = self.one.loose or any(rank.loose for rank in self.ranks)
        self.loose |= bool(self.odd_items) and self.one.augmented
        self.loose |= own_indices and self.one.drew
        self.low = self.one.low
        self.near = LOW if self.low else ROUNDED
        self.differs = _difference(self.one, self.ranks)
        self.live_one = self.alone["float64"]
        self.live_ranks = [runs["float64"] for runs in self.together]
        self.live = _difference(self.live_one, self.live_ranks)
        self.items_differ = _items_differ(self.one, self.ranks)

    def same_items(self, step: int) -> bool:
        return self.items_differ is None or step < self.items_differ

    @property
    def updates(self) -> list[list[Update]]:
        """Return the updates of all ranks, one after another."""
        return [list(each) for each in zip(*(record.updates for record in self.ranks))]

    def right(self, update: int) -> bool:
        """Return whether the gradients of this update are those of one process."""
        if update >= len(self.one.updates):
            return False
        theirs = self.one.updates[update].gradients
        apart = (_apart(each.gradients, theirs)[0] for each in self.updates[update])
        return max(apart) < LATER and self.same_items(self.one.updates[update].step)

    def judged(self) -> list[int]:
        """Return the updates that are wrong, or cannot be compared as the items differ."""
        return [u for u in range(len(self.updates)) if not self.right(u)]


def _by_content(record: Record, before: bool) -> Record:
    """Return the same record with items told by their contents, `before` collating."""
    whole = [*map(len, record.contents)] == [*map(len, record.orders)]
    contents = [step.raw if before else step.contents for step in record.steps]
    steps = [
        replace(step, items=own, contents=own, raw=())
        for step, own in zip(record.steps, contents)
    ]
    epochs = range(len(record.contents))
    return replace(
        record,
        orders=[[step.items for step in steps if step.epoch == e] for e in epochs],
        steps=steps,
        whole=record.whole and whole,
        identified=record.identified and not record.augmented,
    )


def _odd_items(one: Record, ranks: Records) -> list[tuple[int, Any]]:
    """Return rank and index of items that have other contents than in one process."""
    known, odd = {}, []
    for record in (one, *ranks):
        for step in record.steps:
            contents = step.raw or step.contents
            if one.length is not None and len(step.items) == len(contents):
                for item, content in zip(step.items, contents):
                    if known.setdefault((step.epoch, item), content) != content:
                        odd.append((record.rank, item))
    return odd


def _difference(one: Record, ranks: Records) -> _Difference | None:
    """Return the first difference of gradients, parameters or buffers, in that order."""
    for rank in ranks:
        for ours, theirs in (
            (rank.start, one.start),
            (rank.start_buffers, one.start_buffers),
        ):
            size, name = _apart(ours, theirs)
            if size > FIRST:
                return _Difference(0, None, f"`{name}` before training", size)
    for number, step in enumerate(one.steps):
        tolerance = FIRST if number == 0 else LATER
        updates = [u for u, update in enumerate(one.updates) if update.step == number]
        for rank in ranks:
            if number >= len(rank.steps):
                return _Difference(number, None, "the number of steps", math.inf)
            theirs_here = [u for u in rank.updates if u.step == number]
            for u in updates:
                if u >= len(rank.updates) or len(theirs_here) != len(updates):
                    return _Difference(number, None, "the number of updates", math.inf)
                size, name = _apart(rank.updates[u].gradients, one.updates[u].gradients)
                if size > tolerance:
                    return _Difference(number, u, f"the gradient of `{name}`", size)
            ours_here = rank.steps[number]
            size, name = _apart(ours_here.parameters, step.parameters)
            if size > max(tolerance, LATER):
                return _Difference(number, None, f"parameter `{name}`", size)
            size, name = _apart(ours_here.buffers, step.buffers)
            if size > max(tolerance, LATER):
                return _Difference(number, None, f"buffer `{name}`", size)
    if any(len(rank.steps) != len(one.steps) for rank in ranks):
        return _Difference(len(one.steps), None, "the number of steps", math.inf)
    return None


def _flat(order: Iterable[tuple]) -> Counter:
    return Counter(itertools.chain.from_iterable(order))


def _items_differ(one: Record, ranks: Records) -> int | None:
    """Return the first step in which all ranks do not see the items of one process."""
    for number, step in enumerate(one.steps):
        if any(number >= len(rank.steps) for rank in ranks):
            return number
        if _flat(rank.steps[number].items for rank in ranks) != Counter(step.items):
            return number
    return None


def find_unequal_steps(case: _Case) -> Finding | None:
    """Find ranks that have unequal numbers of batches."""
    found = case.ranks[0].unequal_steps
    if not found and all(rank.whole for rank in case.live_ranks):  # beyond the trained
        by_epoch = enumerate(zip(*(rank.orders for rank in case.live_ranks)))
        counted = ((epoch, [*map(len, orders)]) for epoch, orders in by_epoch)
        found = next((each for each in counted if len(set(each[1])) > 1), None)
    if not found:
        return None
    epoch, counts = found
    return Finding(
        "unequal batches",
        "ranks have unequal numbers of batches, so one waits for the others for ever: "
        "give all ranks equally many (`drop_last=True`)",
        f"{case.n} ranks have {counts} batches in epoch {epoch}",
    )


def find_repeated_items(case: _Case) -> Finding | None:
    """Find items that the ranks of an epoch see twice, or never."""
    records = [case.one, *case.ranks]
    if not all(record.identified for record in records) or _cannot_be_shared(case):
        return None
    for epoch in range(min(len(record.orders) for record in records)):
        if case.ranks[0].unequal_steps and not case.ranks[0].whole:
            return None
        alone = _flat(case.one.orders[epoch])
        together = sum((_flat(rank.orders[epoch]) for rank in case.ranks), Counter())
        more, never = together - alone, alone - together
        if not all(record.whole for record in records):
            never = Counter()  # they may come later in this epoch
            if max(alone.values(), default=0) > 1:
                return None
            more = Counter({i: c - 1 for i, c in together.items() if c > 1})
        if not more and not never:
            continue
        twice, missing = more.total(), never.total()
        what = "items are seen twice or never"
        mend = "deal with a DistributedSampler (rank, world size, equal seeds)"
        if together == Counter({item: case.n * c for item, c in alone.items()}):
            what = "every rank sees every item"
        elif not missing:
            mend += (
                "; it repeats items to give all ranks equally many: `drop_last=True`"
            )
        return Finding(
            "items",
            f"{what}: {mend}",
            f"epoch {epoch}, {case.n} ranks: of {alone.total()} items of one process, "
            f"{missing} are never seen, and {twice} are seen too often",
        )
    return None


def find_odd_items(case: _Case) -> Finding | None:
    """Find an index that means another item on another rank."""
    if not case.odd_items or case.loose:
        return None
    rank, item = case.odd_items[0]
    return Finding(
        "items",
        "an index means another item on another rank: make the same data set on all",
        f"item {item} of rank {rank} of {case.n} is not item {item} elsewhere, and so are "
        f"{len(case.odd_items)} that were seen",
    )


def find_same_order(case: _Case) -> Finding | None:
    """Find epochs that all have one order."""

    def fixed(record: Record) -> bool:
        return len(record.orders) > 1 and record.orders[0] == record.orders[1]

    records = [case.one, *case.ranks]
    if not all(record.identified for record in records) or len(case.one.steps) < 4:
        return None
    if not all(map(fixed, case.ranks)):
        return None
    if fixed(case.one) and not all(record.shuffles for record in records):
        return None  # it does not want to shuffle
    return Finding(
        "same order",
        "items come in the same order in every epoch: call `sampler.set_epoch(epoch)`",
        f"rank 0 of {case.n} sees {_few(_flat_list(case.ranks[0].orders[0]))} first in "
        "epoch 0 and in epoch 1"
        + ("" if fixed(case.one) else ", while one process sees another order in each"),
    )


def _flat_list(order: list[tuple]) -> list:
    return [*itertools.chain.from_iterable(order)]


def _few(items: list) -> str:
    return "items " + ", ".join(str(item) for item in items[:4])


def find_global_batch(case: _Case) -> Finding | None:
    """Find a global batch of another size than that of one process."""
    orders, alone = case.ranks[0].orders, case.one.orders
    if not orders or not orders[0] or not alone[0] or case.ranks[0].unequal_steps:
        return None
    ours = sum(len(rank.steps[0].items) for rank in case.ranks)
    theirs = len(case.one.steps[0].items)
    if _cannot_be_shared(case):
        return Finding(
            "global batch",
            f"{case.n} ranks cannot share a batch of {theirs} equally: choose a batch "
            "size, and a number of items, that every world size divides, or another N",
            f"a step takes {theirs} items in one process, and {ours} on {case.n} ranks",
        )
    if ours <= theirs or len(orders[0]) >= len(alone[0]):
        return None
    return Finding(
        "global batch",
        "the global batch grows with the number of workers: divide the batch size by the "
        "world size, or compare with one process that has the larger batch",
        f"a step takes {theirs} items in one process, and {ours} on {case.n} ranks "
        f"({len(alone[0])} steps in an epoch, and {len(orders[0])})",
    )


def _cannot_be_shared(case: _Case) -> bool:
    if not case.one.steps or not all(rank.steps for rank in case.ranks):
        return False
    ours = sum(len(rank.steps[0].items) for rank in case.ranks)
    theirs = len(case.one.steps[0].items)
    return ours == case.n * (theirs // case.n) < theirs


def find_other_order(case: _Case) -> Finding | None:
    """Find items that are seen once, but in other steps than in one process."""
    at = case.items_differ
    others = (
        find_repeated_items,
        find_same_order,
        find_global_batch,
        find_unequal_steps,
    )
    if at is None or at >= len(case.one.steps) or any(find(case) for find in others):
        return None
    if not all(record.identified for record in [case.one, *case.ranks]):
        return None
    if any(at >= len(rank.steps) for rank in case.ranks):
        return None
    theirs = Counter(case.one.steps[at].items)
    ours = _flat(rank.steps[at].items for rank in case.ranks)
    return Finding(
        "other order",
        "each item is seen once, but in other steps than in one process: deal item i of a "
        "common order to rank i % N",
        f"step {at}: {(theirs - ours).total()} of {theirs.total()} items of one process "
        f"are not in that step of {case.n} ranks",
    )


def find_start(case: _Case) -> Finding | None:
    """Find weights or buffers that differ before training."""
    first = case.ranks[0]
    for kind, key in (("weights", "start"), ("buffers", "start_buffers")):
        for rank in case.ranks:
            size, name = _apart(getattr(rank, key), getattr(first, key))
            if size > FIRST:
                return Finding(
                    "start",
                    f"{kind} differ between ranks before training: seed every rank "
                    "equally before the model is built, or broadcast from rank 0",
                    f"`{name}` of rank {rank.rank} is {size:.1e} from that of rank 0",
                )
        size, name = _apart(getattr(first, key), getattr(case.one, key))
        if size > FIRST:
            return Finding(
                "start",
                f"{kind} at the start depend on the number of workers, or on chance: "
                "seed the generator in `build_model`",
                f"`{name}` on {case.n} ranks is {size:.1e} from that of one process",
            )
    return None


def _label(applied: list, own: list, whole: float, near: float) -> str:
    """Say how the gradient of one tensor on each rank was made of the ranks' own ones."""
    applied = [torch.tensor(a, dtype=torch.float64) for a in applied]
    mine = torch.tensor(own, dtype=torch.float64)
    mean = mine.mean(0)
    scale = max(mean.norm().item(), mine.norm(dim=1).mean().item(), 1e-4 * whole)
    near *= scale

    def all_are(expected: Iterable[torch.Tensor]) -> bool:
        return all((a - e).norm() < near for a, e in zip(applied, expected))

    n = len(own)
    if all_are([mean] * n):
        return "mean"
    if all_are([mean * n] * n):
        return "sum"
    if all_are([mean / n] * n):
        return "divided twice"
    differ = max((each - mine[0]).norm().item() for each in mine) > 10 * near
    return "own" if differ and all_are(mine) else "other"


def _labels(
    updates: list[Update], level: str = "gradients", near: float = ROUNDED
) -> dict[str, str]:
    """Return `_label` of each parameter whose own gradients are known.

    A gradient that only some of the ranks have is their own.
    """
    at = [getattr(update, level) or {} for update in updates]
    whole = max((_length(update.own) for update in updates), default=0.0)
    found = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(at)):
        own = [update.own.get(name) for update in updates]
        if all(own) and max(math.hypot(*(each or [])) for each in own) < 1e-8 * whole:
            continue  # zero, but for rounding
        if all(name in each for each in at) and all(own):
            found[name] = _label([each[name] for each in at], own, whole, near)
        elif any(name not in each for each in at) and any(own):
            found[name] = "own"
    return found


def _labels_beside(case: _Case, u: int) -> dict[str, str]:
    """Do as `_labels`, where ranks' own gradients never exist, as with FSDP2."""
    if u >= len(case.one.updates) or not case.same_items(case.one.updates[u].step):
        return {}
    ours, theirs = case.updates[u][0].gradients, case.one.updates[u].gradients
    (factor,), left = _made_of(ours, [theirs])
    for label, expected in (("sum", case.n), ("divided twice", 1 / case.n)):
        if left < case.near and abs(factor / expected - 1) < 1e-3:
            return dict.fromkeys(theirs, label)
    return {}


def _clips_first(updates: list[Update]) -> bool:
    """Return whether ranks clip what is their own still, and average it then."""
    if not all(update.unclipped for update in updates):
        return False
    before = set(_labels(updates, "unclipped").values())
    apart = max(_apart(u.gradients, updates[0].gradients)[0] for u in updates)
    return "own" in before and before <= {"own", "mean"} and apart < LATER


def _made_of(whole: Sketches, parts: list[Sketches]) -> tuple[list[float], float]:
    """Return factors by which the parts add up to the whole, and the relative error."""
    names = [name for name in whole if all(name in part for part in parts)]
    target = _vector(whole, names)
    if not names or not target.norm():
        return [0.0] * len(parts), math.inf
    matrix = torch.stack([_vector(part, names) for part in parts], 1)
    if not (target.isfinite().all() and matrix.isfinite().all()):
        return [0.0] * len(parts), math.inf
    factors = torch.linalg.pinv(matrix, rtol=1e-9) @ target
    left = (matrix @ factors - target).norm() / target.norm()
    return factors.tolist(), left.item()


def _factors(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _keeps_own(updates: list[Update]) -> bool:
    """Return whether each rank steps with a multiple of its own gradient, clipped say."""
    for rank, update in enumerate(updates):
        factors, left = _made_of(update.gradients, [each.own for each in updates])
        others = [abs(f) for r, f in enumerate(factors) if r != rank]
        if left > ROUNDED or max(others) > ROUNDED * abs(factors[rank]):
            return False
    return True


def _scaled_by(case: _Case, update: int) -> float | None:
    """Return one process' own gradient over the mean of the ranks'; None: unlike it."""
    if update >= len(case.one.updates):
        return None
    updates = case.updates[update]
    factors, left = _made_of(case.one.updates[update].own, [u.own for u in updates])
    if left > ROUNDED or max(factors) - min(factors) > ROUNDED:
        return None
    return sum(factors)


def find_averaging(case: _Case) -> list[Finding]:
    """Find gradients summed, not averaged, or averaged except for some parameters."""
    found: dict[str, Finding] = {}
    for u in case.judged():
        updates = case.updates[u]
        level = "unclipped" if all(each.unclipped for each in updates) else "gradients"
        if _clips_first(updates):
            _clipped_and_summed(case, u, found)
            continue
        labels = _labels(updates, level, case.near)
        if not labels:
            labels = _labels_beside(case, u)
        for finding in _judge_labels(case, u, labels):
            found.setdefault(finding.name, finding)
    if "not averaged" in found:
        found.pop("parameter not averaged", None)
    return [*found.values()]


def _judge_labels(case: _Case, u: int, labels: dict[str, str]) -> Iterator[Finding]:
    updates = case.updates[u]
    if set(labels.values()) == {"other"} and _keeps_own(updates):
        labels = dict.fromkeys(labels, "own")  # but for a scale
    own = [name for name, label in labels.items() if label == "own"]
    rest = [label for label in labels.values() if label not in ("own", "mean")]
    if own and len(own) == len(labels):
        name = own[0]
        sizes = [math.hypot(*each.own[name]) for each in updates if name in each.own]
        yield Finding(
            "not averaged",
            "gradients are not averaged over the ranks: each rank steps with its own "
            "(a wrap that is bypassed, or `no_sync` around the last backward?)",
            f"update {u} on {case.n} ranks: all of {len(own)} gradients are each rank's "
            f"own, as that of `{name}`, of length {_factors(sizes)} on the ranks",
        )
    elif own:
        yield _not_averaged(case, u, own, len(labels))
    if rest and rest.count("sum") == len(rest):
        sums = [name for name, label in labels.items() if label == "sum"]
        if not _divides_its_loss(case, u):
            yield Finding(
                "summed",
                "gradients are summed over the ranks, not averaged: divide by the world "
                "size",
                f"update {u}: the gradient of `{sums[0]}` is "
                f"{_ratio(case, u, sums[0]):.3f} times the mean on {case.n} ranks",
            )
    elif rest and rest.count("divided twice") == len(rest):
        yield Finding(
            "divided twice",
            "gradients are divided by the world size once too often",
            f"update {u}: they are 1/{case.n} of the mean of the ranks' gradients",
        )


def _vector_mean(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).mean(0)


def _ratio(case: _Case, u: int, name: str) -> float:
    updates = case.updates[u]
    level = updates[0].unclipped or updates[0].gradients
    if not all(name in each.own for each in updates):
        mean = _vector_mean([case.one.updates[u].gradients[name]])
    else:
        mean = _vector_mean([each.own[name] for each in updates])
    ours = torch.tensor(level[name], dtype=torch.float64)
    return ((ours @ mean) / (mean @ mean)).item()


def _divides_its_loss(case: _Case, u: int) -> bool:
    """Return whether losses are divided by the world size, so that sums are right."""
    if u < len(case.one.updates) and case.same_items(case.one.updates[u].step):
        scale = _scaled_by(case, u)
        if scale is not None:
            return abs(scale - case.n) < 1e-3
    if not case.one.updates:
        return False
    means = [_length(update.own) for update in case.updates[0]]
    if not any(means):
        return False
    ratio = _length(case.one.updates[0].own) / (sum(means) / case.n or 1.0)
    return ratio > math.sqrt(case.n)


def _not_averaged(case: _Case, u: int, names: list[str], total: int) -> Finding:
    at_wrap = case.ranks[0].at_wrap
    why = "unused or forgotten in averaging"
    if all(name not in at_wrap for name in names):
        why = "made after the model was wrapped"
    elif all(not at_wrap.get(name, True) for name in names):
        why = "frozen when the model was wrapped, and trained later"
    some = ", ".join(f"`{name}`" for name in names[:3])
    updates = case.updates[u]
    mine = [each.gradients.get(names[0]) for each in updates]
    lengths = _factors(math.hypot(*each) if each else 0.0 for each in mine)
    return Finding(
        "parameter not averaged",
        f"no step averages some parameters ({some}): {why}. Wrap the model when it is "
        "complete",
        f"update {u} on {case.n} ranks: {len(names)} of {total} gradients are each "
        f"rank's own; lengths of that of `{names[0]}`: {lengths}",
    )


def _clipped_and_summed(case: _Case, u: int, found: dict[str, Finding]) -> None:
    """Return, where ranks clip first, whether what they have clipped is summed then."""
    updates = case.updates[u]
    if any(each.norm is None or each.most is None for each in updates):
        return
    shares = [min(1.0, each.most / (each.norm + 1e-6)) for each in updates]  # type: ignore
    factors, left = _made_of(updates[0].gradients, [each.own for each in updates])
    if left < ROUNDED and all(abs(f - s) < 1e-3 * s for f, s in zip(factors, shares)):
        found.setdefault(
            "summed",
            Finding(
                "summed",
                "gradients are summed over the ranks, not averaged: divide by the world "
                "size",
                f"update {u}: the ranks' own gradients count {_factors(factors)} times "
                f"(clipped to {_factors(shares)} of their length)",
            ),
        )


def _uses_the_last(updates: list[Update]) -> bool:
    """Return whether ranks step with the last gradients alone, not with kept ones, too."""
    first = updates[0]
    whole, parts = first.unclipped or first.gradients, [each.own for each in updates]
    return _made_of(whole, parts)[1] < ROUNDED


def find_accumulation(case: _Case) -> Finding | None:
    """Find micro-batches whose gradients are dropped before the update."""
    for record in [*case.ranks, case.one]:
        for u, update in enumerate(record.updates):
            beside = case.updates[u : u + 1] if record is not case.one else [[update]]
            dropped = not update.replaced or any(map(_uses_the_last, beside))
            if update.lost and dropped:
                who = f"rank {record.rank} of {case.n}"
                who = "one process" if record is case.one else who
                return Finding(
                    "accumulation",
                    "micro-batches are dropped: gradients are set to zero between the "
                    "backward passes of one update",
                    f"update {u} in {who}: of {update.lost + update.kept} items that went "
                    f"forward, the gradients of {update.lost} were set to zero",
                )
    if case.live is None:
        return None
    for record in [*case.ranks, case.one]:
        for number, step in enumerate(record.steps):
            if 0 < step.forwarded < step.rows:
                whole = case.one.steps[number] if number < len(case.one.steps) else step
                return Finding(
                    "accumulation",
                    "micro-batches are dropped: a part of the batch never goes through "
                    "the model",
                    f"step {number}: of its {step.rows} items, rank {record.rank} "
                    f"of {case.n} trains on {step.forwarded}; one process trains on "
                    f"{whole.forwarded} of {whole.rows}",
                )
    ours, theirs = len(case.ranks[0].updates), len(case.one.updates)
    if ours != theirs and len(case.ranks[0].steps) == len(case.one.steps):
        return Finding(
            "accumulation",
            "the optimizer steps after another number of batches than in one process: "
            "does something count per rank?",
            f"in {len(case.one.steps)} steps, one process updates {theirs} times, and "
            f"each of {case.n} ranks {ours} times",
        )
    return None


def find_clipping(case: _Case) -> Finding | None:
    """Find gradients that are clipped by a rank's own norm, or unlike one process'."""
    for u in case.judged():
        updates = case.updates[u]
        alone = None
        if u < len(case.one.updates) and case.same_items(case.one.updates[u].step):
            alone = case.one.updates[u]
        agree = max(_apart(each.gradients, updates[0].gradients)[0] for each in updates)
        if _clips_first(updates):
            evidence = _clipped_by_own_norms(updates, alone)
        elif all(each.unclipped for each in updates):
            evidence = _clipped_unlike(updates, alone, agree)
        else:
            evidence = _scaled_by_hand(case, updates, alone) if agree < LATER else ""
        if evidence:
            return Finding(
                "clipping",
                "clipping counts per rank: clip when the gradients are averaged, by their "
                "norm over all ranks",
                f"update {u}: {evidence}",
            )
    return None


def _clipped_by_own_norms(updates: list[Update], alone: Update | None) -> str:
    norms = [each.norm for each in updates if each.norm is not None]
    beside = f", one process by {alone.norm:.3g}" if alone and alone.norm else ""
    if not norms:  # clipped by value
        return "the gradients that ranks clip differ between them"
    return f"the ranks clip by norms of their own, {_factors(norms)}{beside}"


def _clipped_unlike(updates: list[Update], alone: Update | None, agree: float) -> str:
    """Find evidence that averaged gradients are clipped, but not as in one process."""
    if set(_labels(updates, "unclipped").values()) != {"mean"}:
        return ""
    lengths = _factors(_length(each.gradients) for each in updates)
    lengths = f"equal gradients have lengths {lengths} on the ranks when clipped"
    if agree > LATER:
        return lengths
    if not alone or not alone.unclipped or not updates[0].unclipped:
        return ""
    before = _apart(updates[0].unclipped, alone.unclipped)[0]
    after = _apart(updates[0].gradients, alone.gradients)[0]
    if before > LATER or after < LATER:
        return ""
    return f"{lengths}, and {_length(alone.gradients):.3g} in one process"


def _scaled_by_hand(case: _Case, updates: list[Update], alone: Update | None) -> str:
    """Find evidence that ranks count by factors, where torch's clipping is not called."""
    if "other" not in _labels(updates).values():
        return ""
    factors, left = _made_of(updates[0].gradients, [each.own for each in updates])
    uneven = max(factors) - min(factors) > 1e-3 * max(map(abs, factors))
    sizes = [len(r.steps[each.step].items) for r, each in zip(case.ranks, updates)]
    if left > ROUNDED or (uneven and len(set(sizes)) > 1):
        return ""
    if uneven:
        counts = _factors(factors)
        return (
            f"the ranks' own gradients count {counts} times, not {1 / case.n:.3g} each"
        )
    if alone:
        by, left = _made_of(alone.gradients, [alone.own])
        apart = abs(sum(factors) - by[0]) > 1e-3 * by[0]
        if left < ROUNDED and by[0] < 1 - 1e-6 and apart:
            ours = f"the mean of the ranks is scaled by {sum(factors):.3g}"
            return f"{ours}, one process' gradient by {by[0]:.3g}"
    return ""


def find_content(case: _Case) -> Finding | None:
    """Find averaged gradients that are not those of the whole batch."""
    at = case.differs
    if not at or at.update is None or not case.same_items(at.step):
        return None
    if case.loose or not case.one.identified or find_accumulation(case):
        return None
    if find_not_finite(case):
        return None
    alone, updates = case.one.updates[at.update], case.updates[at.update]
    factors, left = _made_of(alone.own, [each.own for each in updates])
    counts = [len(rank.steps[at.step].items) for rank in case.ranks]
    if not alone.own or not all(each.own for each in updates):
        return None
    if left > case.near:
        if find_start(case):
            return None
        return Finding(
            "batch statistics",
            "a rank's gradient depends on which items share its batch, so no average of "
            "ranks is that of one process: a statistic of the batch, or a loss that is "
            "not a mean over items",
            f"step {at.step}: the gradients of {case.n} ranks have the same items "
            f"together, but add up to that of one process only to {left:.1e}",
        )
    even = max(factors) - min(factors) < case.near
    if even and abs(sum(factors) - case.n) < 1e-3:
        if set(_labels(updates).values()) == {"mean"}:
            return Finding(
                "divided twice",
                "gradients are divided by the world size once too often: DDP averages, so "
                "leave the loss as it is (and make it a mean over items, not a sum)",
                f"step {at.step}: one process' gradient is {sum(factors):.3f} times the "
                f"mean of {case.n} ranks",
            )
    elif not even and abs(sum(factors) - 1) < 1e-3:
        return Finding(
            "unequal batches",
            "ranks count equally, whatever their batches hold: weight each loss by what it "
            "is a mean of (items, tokens, weights of classes), or drop what is uneven",
            f"step {at.step}: the ranks have {counts} items, and one process' gradient is "
            f"made of theirs by {_factors(factors)}, not {1 / case.n:.3g} each",
        )
    return None


def find_rates(case: _Case) -> Finding | None:
    """Find learning rates that differ between ranks, or from those of one process."""
    if (
        len(case.ranks[0].steps) != len(case.one.steps)
        and not case.ranks[0].unequal_steps
    ):
        return None  # then a schedule of so many steps rightly differs
    ours = [[update.rates for update in rank.updates] for rank in case.ranks]
    alone = [update.rates for update in case.one.updates]
    for u, rates in enumerate(zip(*ours)):
        if any(each != rates[0] for each in rates):
            return Finding(
                "schedule",
                "learning rates differ between ranks: step the scheduler on all of them",
                f"update {u}: {_factors(each[0] for each in rates)} on the ranks",
            )
        if u < len(alone) and not _close(rates[0], alone[u]):
            first, then = (each[u][0] for each in (alone, ours[0]))
            what = (
                "a scheduler counts per rank, or per world size"
                if u
                else ("the learning rate depends on the world size")
            )
            return Finding(
                "schedule",
                f"{what}: for the same global batch, one learning rate fits",
                f"update {u}: {then:.4g} on {case.n} ranks, {first:.4g} in one process",
            )
    return None


def _close(ours: list[float], theirs: list[float]) -> bool:
    pairs = zip(ours, theirs)
    return len(ours) == len(theirs) and all(
        math.isclose(*p, rel_tol=1e-9) for p in pairs
    )


def find_batch_norm(case: _Case) -> Finding | None:
    """Find BatchNorm that takes its statistics of a rank's own items."""
    if not case.live or not case.live_one.batch_norms:
        return None
    first = [rank.steps[0].buffers for rank in case.live_ranks if rank.steps]
    for norm in case.live_one.batch_norms:
        name = f"{norm}.running_mean" if norm else "running_mean"
        if len(first) == case.n and all(name in each for each in first):
            rows = [{name: each[name]} for each in first]
            size = max(_apart(each, rows[0])[0] for each in rows)
            before = {name: case.live_one.start_buffers.get(name, [])}
            if size > LATER and _apart(rows[0], before)[0] > 0:
                return _batch_norm(
                    f"after one step, `{name}` differs by {size:.1e} between {case.n} ranks"
                )
    if not case.differs:
        return _batch_norm(
            f"it differs at {case.live}, and with BatchNorm frozen nowhere"
        )
    return None


def _batch_norm(evidence: str) -> Finding:
    return Finding(
        "batch statistics",
        "BatchNorm normalizes by the statistics of each rank's own share: use GroupNorm, "
        "or SyncBatchNorm on GPUs",
        evidence,
    )


def find_noise(case: _Case) -> Finding | None:
    """Find dropout or augmentation that is the same on two ranks."""
    if any("noise" not in runs for runs in case.together):
        return None
    records = [runs["noise"] for runs in case.together]
    for first, second in itertools.combinations(records, 2):
        pairs = [*zip(first.steps, second.steps)]
        draws = [(a.draws, b.draws) for a, b in pairs if a.draws]
        numbers = sum(size for a, _ in draws for _, size, _ in a)
        ranks = f"ranks {first.rank} and {second.rank} of {case.n}"
        mend = "seed each rank differently once the weights are built, as in `wrap`"
        if draws and all(a == b for a, b in draws):
            masks = sum(len(a) for a, _ in draws)
            return Finding(
                "same noise",
                f"dropout, or other noise in the step, is the same on every rank: {mend}",
                f"{masks} of {masks} draws ({numbers} numbers) are equal on {ranks}",
            )
        used = [name for step in first.steps for name in (step.random_items or [{}])[0]]
        for name in dict.fromkeys(used):
            states = [
                (a.random_items[0][name], b.random_items[0].get(name))
                for a, b in pairs
                if a.random_items and b.random_items and name in a.random_items[0]
            ]
            if len(states) > 1 and all(a == b for a, b in states):
                return Finding(
                    "same noise",
                    f"augmentation is the same on every rank: {mend}",
                    f"{name} draws for the items, and is in the same state on {ranks} at "
                    f"{len(states)} of {len(states)} steps",
                )
    return None


def find_unseeded(case: _Case) -> Finding | None:
    """Find two runs of one process whose noise differs."""
    if "noise again" not in case.alone:
        return None
    first, again = case.alone["noise"], case.alone["noise again"]
    pairs = [*zip(first.steps, again.steps)]
    differ = [k for k, (a, b) in enumerate(pairs) if a.draws != b.draws]
    what = "dropout or other noise"
    if not differ:
        what = "augmentation"
        differ = [
            k for k, (a, b) in enumerate(pairs) if a.random_items != b.random_items
        ]
    if not differ:
        return None
    return Finding(
        "unseeded noise",
        f"{what} is not seeded, so no run can be repeated: seed torch, random and NumPy "
        "in your functions",
        f"two equal runs of one process draw differently in {len(differ)} of "
        f"{len(pairs)} steps",
    )


def find_buffers(case: _Case) -> Finding | None:
    """Find other buffers that each rank computes from its own items."""
    norms = tuple(f"{norm}." for norm in case.one.batch_norms)
    for number, steps in enumerate(zip(*(rank.steps for rank in case.ranks))):
        for rank, step in enumerate(steps):
            for name, numbers in step.buffers.items():
                pair = {name: numbers}, {name: steps[0].buffers.get(name, [])}
                size, _ = _apart(*pair)
                if size > LATER and not name.startswith(norms or ("\0",)):
                    return Finding(
                        "buffers",
                        "a buffer is computed from each rank's own items, and differs "
                        "between ranks: average it, too",
                        f"step {number}: `{name}` of rank {rank} of {case.n} is {size:.1e} "
                        "from that of rank 0",
                    )
    return None


def find_weights(case: _Case) -> Finding | None:
    """Find weights that come apart although equal gradients reach equal optimizers."""
    return _parted(case.ranks, case.n)


def _parted(ranks: Records, n: int) -> Finding | None:
    for number, steps in enumerate(zip(*(rank.steps for rank in ranks))):
        for rank, step in enumerate(steps):
            size, name = _apart(step.parameters, steps[0].parameters)
            if size > LATER:
                return Finding(
                    "weights",
                    "weights come to differ between ranks: does a rank do something that "
                    "the others do not, or draw noise of its own for them?",
                    f"step {number}: `{name}` of rank {rank} of {n} is {size:.1e} "
                    "from that of rank 0",
                )
    return None


def find_weights_apart_by_noise(case: _Case) -> Finding | None:
    """Find weights that differ between ranks where noise is not taken out."""
    if case.live or any("noise" not in runs for runs in case.together):
        return None
    if find_not_finite(case):
        return None
    return _parted([runs["noise"] for runs in case.together], case.n)


def find_shards(case: _Case) -> Finding | None:
    """Find a strategy that claims to shard, where each rank holds the whole state."""
    if not all(rank.sharded for rank in case.ranks):
        return None
    alone = case.one.shared_bytes
    each = [rank.shared_bytes for rank in case.ranks]
    if not alone or sum(each) / case.n < 0.95 * alone:
        return None
    return Finding(
        "shards nothing",
        "the strategy claims to shard and does not: each rank holds the whole state",
        f"bytes of state per rank: {_thousands(each)} on {case.n} ranks, "
        f"{alone:,} in one process",
    )


def find_not_finite(case: _Case) -> Finding | None:
    """Find gradients or weights that are infinite, or no number, in any run."""
    whose = [("one process", case.alone)]
    whose += [(f"rank {k} of {case.n}", runs) for k, runs in enumerate(case.together)]
    by_run = [(who, key, record) for who, runs in whose for key, record in runs.items()]
    for who, key, record in by_run:
        seen = [(f"the gradient of `{name}`", update.step, numbers)
                for update in record.updates
                for name, numbers in (update.gradients | update.own).items()]  # fmt: skip
        seen += [(f"`{name}`", number, numbers)
                 for number, step in enumerate(record.steps)
                 for name, numbers in step.parameters.items()]  # fmt: skip
        for what, number, numbers in seen:
            if not all(map(math.isfinite, numbers)):
                return Finding(
                    "not finite",
                    "a gradient or weight is infinite, or no number: is something divided "
                    "by a number that may be 0, such as a count of items?",
                    f"step {number}: {what} in {who} ({key})",
                )
    return None


def find_nothing_trained(case: _Case) -> Finding | None:
    """Find a training of which no step changes a weight."""
    records = [case.one, *case.ranks]
    for record in records:
        if any(_apart(step.parameters, record.start)[0] for step in record.steps):
            return None
    if not any(record.updates for record in records):
        return Finding(
            "nothing trained",
            "no optimizer takes a step, so there is nothing to compare: call "
            "`optimizer.step()`, or train until it is called (`--steps`)",
            f"in {len(case.one.steps)} steps of {len(case.one.orders)} epochs, in one "
            f"process and on {case.n} ranks",
        )
    return Finding(
        "nothing trained",
        "no step changes a weight: the optimizer was made before the wrap, whose "
        "parameters are new ones. Wrap first (or is the learning rate 0?)",
        f"after {len(case.one.updates)} updates, all {len(case.one.start)} parameters are "
        f"as at the start, in one process and on {case.n} ranks",
    )


def _thousands(numbers: Iterable[int]) -> str:
    return " and ".join(f"{number:,}" for number in dict.fromkeys(numbers))


INDEPENDENT = [
    find_unequal_steps, find_repeated_items, find_odd_items, find_same_order,
    find_global_batch,
    find_other_order, find_start, find_accumulation, find_clipping, find_content,
    find_rates, find_batch_norm, find_noise, find_unseeded, find_buffers, find_shards,
    find_nothing_trained, find_not_finite, find_weights_apart_by_noise,
]  # fmt: skip


def diagnose(case: _Case) -> list[Finding]:
    """Return all mistakes that the records of a number of workers show."""
    found = [find(case) for find in INDEPENDENT]
    found[7:7] = find_averaging(case) if case.live else []
    named = {finding.name: finding for finding in found if finding}
    if case.live and not _explains(case, named) and (weights := find_weights(case)):
        named[weights.name] = weights
    return [*named.values()]


def _explains(case: _Case, names: Iterable[str]) -> bool:
    """Return whether one of the findings may be why N workers differ from one process.

    Noise is the same in the runs that are compared, if it can be pinned.
    """
    aside = {"shards nothing"} if case.loose else set(UNEXPLAINING)
    if case.items_differ is not None:
        aside.discard("same order")
    return bool(set(names) - aside)


# ------------------------------------------------------------------ verdict and command


def _rounded(case: _Case) -> bool:
    """Return whether all that differs is float32 within float64, and that stays small."""
    if case.live is None or not case.live_one.updates:
        return False
    first = [rank.updates[:1] for rank in [case.live_one, *case.live_ranks]]
    if case.low and all(first):  # the more it rounds, the more steps part
        theirs = first[0][0].gradients
        apart = [_relative(update.gradients, theirs) for (update,) in first]
        return max(apart) < LOW and case.items_differ is None
    if case.live.size > ROUNDED:
        return False
    pairs = [
        _apart(ours.parameters, theirs.parameters)[0]
        for rank in case.live_ranks
        for ours, theirs in zip(rank.steps, case.live_one.steps)
    ]
    return max(pairs) < 1e-3 and case.items_differ is None and _first32(case) < ROUNDED


def _first32(case: _Case) -> float:
    """Return how far the first gradients in float32 are apart, 0 without such a run."""
    if "float32" not in case.alone:
        return 0.0
    one = case.alone["float32"].updates
    ours = [runs["float32"].updates for runs in case.together]
    pairs = [(each[0], one[0]) for each in ours if each and one]
    return max((_relative(a.gradients, b.gradients) for a, b in pairs), default=0.0)


def _last32(case: _Case) -> float:
    one = case.alone["float32"].steps[-1].parameters
    ours = [runs["float32"].steps[-1].parameters for runs in case.together]
    return max(_relative(each, one) for each in ours)


def _verdict(case: _Case) -> tuple[bool, list[str]]:
    """Return whether these workers equal one process, and lines that say so."""
    workers = f"{case.n} workers"
    steps, epochs = len(case.live_one.steps), len(case.live_one.orders)
    if case.live and not _rounded(case):
        return False, [
            f"{workers} do not train like one process. First at {case.live}."
        ]
    if _first32(case) > LOW:
        return False, [
            f"{workers} train like one process in float64, but not in float32: the first "
            f"gradients are {_first32(case):.0e} apart."
        ]
    gradients = [
        _apart(ours.gradients, theirs.gradients)[0]
        for rank in case.live_ranks
        for ours, theirs in zip(rank.updates, case.live_one.updates)
    ]
    weights = [
        _apart(ours.parameters, theirs.parameters)[0]
        for rank in case.live_ranks
        for ours, theirs in zip(rank.steps, case.live_one.steps)
    ]
    lines = [
        f"{workers} train like one process: in {steps} steps of {epochs} epochs in "
        f"float64, gradients are at most {max(gradients, default=0):.0e} apart, weights "
        f"{max(weights, default=0):.0e}.",
        f"  In float32, the first gradients are {_first32(case):.0e} apart, the last "
        f"weights {_last32(case):.0e}: only rounding.",
    ]
    if case.live:
        within = "bfloat16 or float16" if case.low else "float32"
        equal = (
            f"{workers} train like one process, as near as {within} within it allows"
        )
        return True, [f"{equal}. They part at {case.live}."]
    return True, lines


def _failed(failure: _Failure, n: int) -> Finding:
    if "Expected to have finished reduction" in failure.sentence:
        said = failure.sentence.partition(" in the prior iteration")[0]
        pattern = r"did not receive grad for rank \d+: ([\d ]+)"
        which = re.search(pattern, failure.sentence)
        return Finding(
            "parameter not averaged",
            "DDP waits for the gradient of a parameter that gets none: it is unused, or "
            "was frozen after the wrap. Freeze before you wrap; "
            "`find_unused_parameters=True` if it is unused in some steps",
            said + (f"; numbers {which[1].strip()} of `parameters()`" if which else ""),
        )
    if failure.kind == "hangs":
        sentence = (
            "a rank hangs: do all ranks call the same collectives, equally often?"
        )
        return Finding("hangs", sentence, failure.sentence)
    sentence = f"with {n} workers a rank fails"
    return Finding("fails", sentence, failure.sentence)


def _judge(groups: dict[int, Any], world_sizes: Iterable[int]) -> Report:
    """Make a report of the runs of one training: by number of workers, and rank."""
    report = Report({}, [], [])
    alone = groups[1][0]
    sizes = [f"{alone['float64'].state_bytes:,} in one process"]
    for n in world_sizes:
        if isinstance(groups[n], _Failure):
            report.equal[n] = False
            report.lines.append(
                f"{n} workers do not train like one process: they fail."
            )
            found = [_failed(groups[n], n)]
        else:
            case = _Case(alone, groups[n])
            report.equal[n], lines = _verdict(case)
            report.lines += lines
            found = diagnose(case)
            if not report.equal[n] and not _explains(case, (f.name for f in found)):
                found.append(_unknown(case))
            each = [runs["float64"].state_bytes for runs in groups[n]]
            sizes.append(f"{_thousands(each)} on {n}")
        known = set(report.names)
        report.findings += [each for each in found if each.name not in known]
    report.lines.append(f"Bytes of state per rank: {', '.join(sizes)}.")
    one = alone["float64"]
    if not one.whole or [*map(len, one.orders)] != [*map(len, one.contents)]:
        trained = max(map(len, one.contents))
        report.lines.append(f"Trained were the first {trained} steps of each epoch.")
    if set(report.names) - UNEXPLAINING - {"unknown"}:  # known with other numbers
        report.findings = [f for f in report.findings if f.name != "unknown"]
    return report


def judge(alone: Record, together: Records) -> Report:
    """Make a report of what `record` returned, for what has a launcher of its own.

    Seeds of noise are not judged: `record` takes noise out.

    Args:
        alone: of one process.
        together: of all ranks, by rank.
    """
    case = _Case({"float64": alone}, [{"float64": each} for each in together])
    found = diagnose(case)
    workers = f"{case.n} workers"
    if case.live and not _rounded(case):
        line = f"{workers} do not train like one process. First at {case.live}."
        if not _explains(case, (finding.name for finding in found)):
            found.append(_unknown(case))
        return Report({case.n: False}, found, [line])
    steps, epochs = len(alone.steps), len(alone.orders)
    what = f"in {steps} steps of {epochs} epochs in float64"
    if case.live:
        what = f"as near as what it rounds allows. They part at {case.live}"
    return Report({case.n: True}, found, [f"{workers} train like one process {what}."])


def _unknown(case: _Case) -> Finding:
    what = "it differs, cause unknown"
    if case.loose or (not case.one.identified and case.one.drew):
        what += "; it draws random numbers that cannot be tied to items: try without"
    elif not case.one.identified:
        what += "; its batches hold no tensors that this tool can read"
    return Finding("unknown", what, str(case.live or "the first gradients in float32"))


def check_all(
    trainings: dict[str, Training | str | Path],
    world_sizes: Iterable[int] = (2, 3),
    epochs: int = 2,
    steps: int = 20,
    timeout: float = 300,
) -> dict[str, Report]:
    """Judge several trainings in one start of processes per world size; as `check`.

    A training that fails fails the others: give those that may to `check`.
    """
    payloads = [_payload(training) for training in trainings.values()]
    groups: dict[int, Any] = {}
    for n in (1, *world_sizes):
        groups[n] = _group(payloads, n, epochs, steps, timeout)
        if isinstance(groups[n], _Failure):
            failure = groups[n]
            if failure.kind == "bad":
                raise BadInput(failure.sentence)
            averaging = _failed(failure, n).name == "parameter not averaged"
            if n == 1 and averaging:
                line = "One process alone fails: so would any number."
                return {
                    name: Report({1: False}, [_failed(failure, n)], [line])
                    for name in trainings
                }
            if n == 1:
                hints = (
                    hint
                    for said, hint in HINTS.items()
                    if re.search(said, failure.sentence)
                )
                raise BadInput(
                    f"One process alone cannot train here: {failure.sentence}. "
                    + next(hints, "Mend that first.")
                )
    return {
        name: _judge(
            {
                n: each if isinstance(each, _Failure) else [ranks[i] for ranks in each]
                for n, each in groups.items()
            },
            world_sizes,
        )
        for i, name in enumerate(trainings)
    }


def check(
    training: Training | str | Path,
    world_sizes: Iterable[int] = (2, 3),
    epochs: int = 2,
    steps: int = 20,
    timeout: float = 300,
) -> Report:
    """Train with one process and with several, and say whether they are equal.

    Args:
        training: the functions, or the path of a file that defines them.
        world_sizes: numbers of workers, each from 2 on.
        epochs: how many are trained; two show whether the order of items changes.
        steps: the most that are trained in an epoch.
        timeout: seconds after which ranks of which none begins a step are said to hang.

    Raises:
        BadInput: the training cannot be used, or fails in one process already.
    """
    world_sizes = tuple(world_sizes)
    if epochs < 1 or steps < 1 or min(world_sizes, default=1) < 2:
        raise BadInput("World sizes begin at 2, and epochs and steps at 1.")
    return check_all({"": training}, world_sizes, epochs, steps, timeout)[""]


def main(arguments: list[str] | None = None) -> int:
    """Judge the file on the command line; returns the status."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.parity",
        description=(__doc__ or "").partition("\n")[0],
        epilog="The file defines " + "; ".join(FUNCTIONS.values()) + " (optional).",
    )
    parser.add_argument("file", help="your training; see the top of this module")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="at most, in an epoch")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds of one step"
    )
    args = parser.parse_args(arguments)
    # one process imports torch, and all ranks are forked from it
    preload = ["torch.distributed.tensor", "torch.nn.parallel"]
    mp.get_context("forkserver").set_forkserver_preload(preload)
    if sys.stderr.isatty():  # else nothing would be seen for half a minute
        sizes = ", ".join(map(str, (1, *args.world_sizes)))
        print(f"Trains in {sizes} processes ...", file=sys.stderr)
    try:
        report = check(
            args.file, args.world_sizes, args.epochs, args.steps, args.timeout
        )
    except BadInput as problem:
        print(f"parity: {problem}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
