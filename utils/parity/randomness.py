"""Where a training's random numbers come from, and how they are pinned to its items."""

import contextlib
import copy
import ctypes
import functools
import hashlib
import inspect
import itertools
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from .sketches import local
from torch.utils._python_dispatch import TorchDispatchMode

FRESH_SEED = 67280421310721  # of torch's generator in every new process
MASK = 16  # numbers in a draw from which on equal ones are no accident


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return what a tensor holds, without NumPy."""
    whole = tensor.detach().cpu()
    kept = (whole.to_dense() if whole.layout != torch.strided else whole).contiguous()
    return ctypes.string_at(kept.data_ptr(), kept.numel() * kept.element_size())


def digest(*parts: bytes) -> int:
    """Return a number of 48 bits that stands for bytes."""
    return int.from_bytes(
        hashlib.blake2b(b"".join(parts), digest_size=6).digest(), "big"
    )


class Generator(NamedTuple):
    """A source of random numbers, and what reads, sets and seeds it."""

    name: str
    owner: Any
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]


def as_generator(each: Any) -> Generator | None:
    """Return `each` as a generator, if it is one of torch, Python or NumPy.

    Not those of all the program, which every `Sources` has.
    """
    numpy = sys.modules.get("numpy")
    if each is torch.default_generator or each is random.uniform.__self__:  # type: ignore
        return None
    if isinstance(each, torch.Generator):
        name, get, put = "its torch.Generator", each.get_state, each.set_state
        return Generator(name, each, get, put, each.manual_seed)
    if isinstance(each, random.Random):
        name = "its random.Random"
        return Generator(name, each, each.getstate, each.setstate, each.seed)
    if numpy and isinstance(each, numpy.random.RandomState):
        name, get, put = "its RandomState", each.get_state, each.set_state
        return Generator(name, each, get, put, lambda n: each.seed(n % 2**32))
    if numpy and isinstance(each, numpy.random.Generator):
        bits = each.bit_generator

        def set_bits(state: Any) -> None:
            bits.state = state

        return Generator(
            "its numpy Generator",
            each,
            lambda: copy.deepcopy(bits.state),
            set_bits,
            lambda n: set_bits(type(bits)(n).state),
        )
    return None


def find_generators(roots: Iterable[Any]) -> list[Generator]:
    """Return the generators that objects hold, or the modules of functions."""
    found, seen = [], set()
    waiting = [(root, 0) for root in roots]
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen or depth > 5 or isinstance(each, (torch.Tensor, type)):
            continue
        seen.add(id(each))
        if generator := as_generator(each):
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
        return zlib.crc32(raw_bytes(state))
    if isinstance(state, dict):
        return _number(tuple(state.values()))
    if isinstance(state, tuple):
        return hash(tuple(map(_number, state)))
    if hasattr(state, "tobytes"):
        return zlib.crc32(state.tobytes())
    return zlib.crc32(repr(state).encode()) if isinstance(state, str) else hash(state)


class Sources:
    """All generators that a training may draw from: torch's, Python's, NumPy's, its own."""

    def __init__(self):
        self.own: list[Generator] = []
        self._first: list[tuple[Generator, Any]] = []

    def all(self) -> list[Generator]:
        """Return torch's generator, Python's, NumPy's if it is there, and the own ones."""
        torchs = torch.get_rng_state, torch.set_rng_state, torch.manual_seed
        pythons = random.getstate, random.setstate, random.seed
        found = [
            Generator("torch", torch, *torchs),
            Generator("Python's random", random, *pythons),
        ]
        if numpy := sys.modules.get("numpy"):
            of = numpy.random

            def seed(number: int) -> None:
                of.seed(number % 2**32)

            found.append(Generator("NumPy", of, of.get_state, of.set_state, seed))
        return found + self.own

    def begin(self, rank: int, by_chance: bool) -> None:
        """Draw as in a new process: torch the same in all of them, the others not.

        Functions may be of a module that is imported once and has seeded them then: so only
        a file, which every run executes, meets those others as chance has left them.
        """
        self.own = []
        torch.manual_seed(FRESH_SEED)
        for source in self.all()[1:3]:
            number = random.SystemRandom().getrandbits(32) if by_chance else rank
            source.seed(number)

    def add(self, roots: Iterable[Any]) -> None:
        """Take in the generators that a training has made itself."""
        known = {id(source.owner) for source in self.own}
        new = [g for g in find_generators(roots) if id(g.owner) not in known]
        self.own += new
        self._first += [(each, each.get()) for each in new]

    def end(self) -> None:
        """Leave the own generators as they were: functions live on between runs."""
        for each, state in self._first:
            each.set(state)
        self._first = []

    def states(self) -> dict[str, int]:
        """Return a number for the state of each generator, by its name."""
        states: dict[str, int] = {}
        for source in self.all():
            state = source.get()
            if source.name == "Python's random":  # 625 numbers, hashed as one
                state = hash(state[:2])
            states[source.name] = hash((states.get(source.name), _number(state)))
        return states

    def places(self) -> dict[str, int]:
        """Return how far Python's and NumPy's generator are, as far as that is seen.

        It is the place in the 624 numbers that a Mersenne Twister makes at a time.
        """
        found = {"Python's random": random.getstate()[1][-1]}
        if numpy := sys.modules.get("numpy"):
            state = numpy.random.get_state()
            found["NumPy"] = int(state[2]) if state[0] == "MT19937" else 0
        return found

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Let draws within depend on `seed` alone, and change nothing outside."""
        sources = self.all()
        states = [source.get() for source in sources]
        for source in sources:
            source.seed(seed)
        try:
            yield
        finally:
            for source, state in zip(sources, states):
                source.set(state)


class Draw(NamedTuple):
    """What a step drew in a run with its noise: which, how many numbers, their content."""

    name: str
    size: int
    content: int


class Draws(TorchDispatchMode):
    """Pin what a step draws, or, in a run for the noise, note it.

    Pinned, dropout keeps everything: a mask of bernoulli numbers that is divided by their
    probability at once gets its expected value. What has a row for
    each item of the batch, or of the micro-batch that is next, is drawn for each item: it
    depends on the item, the epoch, and how often that has been drawn for it. All else is
    the same on all ranks, and is `loose`: nobody knows what it belongs to.
    """

    def __init__(self, sources: Sources, pin: bool, items: int, shared: bool):
        super().__init__()
        self.sources, self.pin, self.axis, self.shared = sources, pin, items, shared
        self.parameters: list[torch.Tensor] = []
        self.epoch, self.drawn_for = -1, Counter()
        self.collectives = 0  # that reduce, of the whole run
        self.begin(0, 0, ())

    def begin(self, epoch: int, step: int, items: tuple) -> None:
        """Begin a step with these items."""
        if epoch != self.epoch:
            self.drawn_for.clear()
        self.epoch, self.step, self.items, self.calls = epoch, step, items, 0
        self.drew = self.loose = self.gathers = False
        # a mask that was just drawn: with which probability, and if all was tied before
        self.mask: tuple[torch.Tensor, Any, bool] | None = None
        self.noted: list[Draw] = []
        # items whose gradients have arrived, and those on their way
        self.done = self.in_flight = self.inside = 0
        self.returned = False
        self.assumed: set[int] = set()  # rows of a micro-batch that is still to come

    def went_forward(self, rows: int) -> None:
        """Note that the model is given so many items."""
        self._advance()
        self.loose |= bool(self.assumed - {rows})
        self.assumed.clear()
        self.in_flight = max(self.in_flight, rows)

    def end(self) -> None:
        """End a step: what was drawn for a micro-batch that never came is loose."""
        self.loose |= bool(self.assumed)

    def _advance(self) -> None:
        if self.returned:
            self.done += self.in_flight
            self.in_flight, self.returned = 0, False

    def belongs_to(self, rows: int, numbers: int) -> tuple:
        """Return the items that a draw with so many rows is for; none if it is unknown."""
        self._advance()
        if self.shared or not rows:
            return ()
        if rows == len(self.items):
            return self.items
        if self.done + rows > len(self.items):
            return ()
        # A single number is one for the batch, but where the model goes item by item.
        if numbers == 1 and not self.done:
            return ()
        if self.inside and rows != self.in_flight:
            return ()
        if not self.inside:
            self.assumed.add(rows)
        return self.items[self.done : self.done + rows]

    def _rows(self, drawn) -> int:
        return drawn.shape[self.axis] if drawn.ndim > self.axis else 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.collectives += "reduce" in func.overloadpacket.__name__
            self.gathers |= "gather" in func.overloadpacket.__name__
        name = func.overloadpacket.__name__
        mask, self.mask = self.mask, None
        if mask and name == "div_" and args[0] is mask[0] and args[1] == mask[1]:
            mask[0].fill_(mask[1])  # it was dropout's, and is 1 when divided
            self.loose = mask[2]
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name.startswith("_scaled_dot_product") or "philox" in name:
            # tagged for a dropout that it leaves to another operator here
            return func(*args, **kwargs)
        self.drew = True
        if self.pin:
            before = self.loose
            drawn = self._pinned(func, name, args, kwargs)
            if name == "bernoulli_":
                p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
                self.mask = drawn, p, before
            return drawn
        drawn = func(*args, **kwargs)
        self._note(name, args, drawn[-1] if isinstance(drawn, tuple) else drawn)
        return drawn

    def _note(self, name: str, args: tuple, drawn: torch.Tensor) -> None:
        tensor = local(drawn)
        # what is full of one number says nothing, and integers may be an order of items
        is_noise = tensor.is_floating_point() or tensor.dtype == torch.bool
        # what is drawn for weights, or for no item, has to be equal on all ranks
        is_noise &= not self._on_weights(args, tensor)
        is_noise &= bool(self.inside or self.belongs_to(self._rows(tensor), 2))
        if (
            is_noise
            and tensor.numel() >= MASK
            and (tensor != tensor.flatten()[0]).any()
        ):
            content = zlib.crc32(raw_bytes(tensor))
            self.noted.append(Draw(name, tensor.numel(), content))

    def _on_weights(self, args: tuple, drawn: torch.Tensor) -> bool:
        """Return whether a draw is for a parameter or its gradient."""
        weights = [local(p) for p in self.parameters]
        if args and isinstance(args[0], torch.Tensor):  # drawn into, or like it
            also = [local(p.grad) for p in self.parameters if p.grad is not None]
            pointers = {tensor.data_ptr() for tensor in [*weights, *also]}
            return local(args[0]).data_ptr() in pointers
        is_of_items = self._rows(drawn) == len(self.items)
        return not is_of_items and drawn.shape in {weight.shape for weight in weights}

    def _pinned(self, func, name: str, args: tuple, kwargs: dict) -> Any:
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        kwargs = {k: None if k == "generator" else v for k, v in kwargs.items()}
        with self.sources.seeded(self._seed_of_step()):
            drawn = func(*args, **kwargs)
        items = self.belongs_to(self._rows(drawn), drawn.numel())
        if not items or name == "randperm" or self._on_weights(args, local(drawn)):
            self.loose |= drawn.numel() > 1
            return drawn
        rows = [
            self._row(func, name, args, kwargs, tuple(drawn.shape), k, item)
            for k, item in enumerate(items)
        ]
        return drawn.copy_(torch.stack(rows, self.axis))

    def _row(
        self, func, name, args, kwargs, shape: tuple, k: int, item: Any
    ) -> torch.Tensor:
        """Draw for one item, from its own row of what the draw depends on."""
        rows = self._rows(args[0]) if args and isinstance(args[0], torch.Tensor) else 0
        if rows > k:
            args = tuple(
                each.narrow(self.axis, k, 1)
                if isinstance(each, torch.Tensor) and self._rows(each) == rows
                else each
                for each in args
            )
        # One row alone: torch draws otherwise for 16 numbers and more than for fewer.
        args = tuple(self._one(each, shape) for each in args)
        kwargs = {key: self._one(each, shape) for key, each in kwargs.items()}
        with self.sources.seeded(self._seed_of(name, item)):
            return func(*args, **kwargs).select(self.axis, 0).clone()

    def _one(self, size: Any, shape: tuple) -> Any:
        """Return the size of a draw for one item, if this is the size of a draw."""
        if not isinstance(size, (list, tuple)) or tuple(size) != shape:
            return size
        return [1 if axis == self.axis else each for axis, each in enumerate(shape)]

    def _seed_of_step(self) -> int:
        self.calls += 1
        return digest(repr((self.epoch, self.step, self.calls)).encode())

    def _seed_of(self, name: str, item: Any) -> int:
        self.drawn_for[name, item] += 1
        count = self.drawn_for[name, item]
        return digest(repr((self.epoch, name, item, count)).encode())

    @contextlib.contextmanager
    def of_numpy(self) -> Iterator[None]:
        """Pin what a step draws by NumPy's functions, if NumPy is there, as torch's."""
        numpy = sys.modules.get("numpy")
        if not numpy or not self.pin:
            yield
            return
        kept = {
            name: function
            for name, function in vars(numpy.random).items()
            if inspect.isbuiltin(function) or inspect.ismethod(function)
            if isinstance(getattr(function, "__self__", None), numpy.random.RandomState)
            if name not in ("seed", "get_state", "set_state", "shuffle", "permutation")
        }
        for name, function in kept.items():
            setattr(numpy.random, name, self._pinned_of_numpy(name, function, numpy))
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(numpy.random, name, function)

    def _pinned_of_numpy(self, name: str, function: Callable, numpy) -> Callable:
        def draw(*args, **kwargs):
            self.drew = True
            before = numpy.random.get_state()
            drawn = function(*args, **kwargs)
            if not isinstance(drawn, numpy.ndarray) or drawn.ndim <= self.axis:
                return drawn
            items = self.belongs_to(drawn.shape[self.axis], drawn.size)
            if not items:
                self.loose |= drawn.size > 1
                return drawn
            numpy.random.set_state(before)
            rows = []
            for item in items:
                with self.sources.seeded(self._seed_of(f"numpy {name}", item)):
                    rows.append(function(*args, **kwargs).take(0, self.axis))
            return numpy.stack(rows, self.axis)

        return draw
