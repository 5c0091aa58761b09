"""Write down what one rank does in one run, through hooks that change no result."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from . import zero
from .batches import Batches, cast, row_digests, tensors_of
from .precision import Lifted, without_policies
from .randomness import Draw, Draws, Sources, digest
from .sketches import Sketches, local, sketch, sketch_as_set
from .training import FUNCTIONS, BadInput, Training
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

CALLS = 16  # calls of `train_step` for an update, beyond which an epoch is cut
BY_HAND = 64  # calls without an update, after which none is awaited
STATES = 200  # tensors beside model and optimizer that are looked at


@dataclass
class Update:
    """A call of an optimizer's `step`."""

    step: int
    options: list[dict[str, float]]  # numbers of each group of parameters, as "lr"
    gradients: Sketches  # as the optimizer gets them
    own: Sketches  # after this rank's last backward, before anything is averaged
    aside: Sketches = field(default_factory=dict)  # own ones that it does not step with
    unclipped: Sketches | None = None  # before torch's clipping, if it was called
    norm: float | None = None  # that torch's clipping found
    most: float | None = None  # to which it clips
    clipped_early: int = 0  # calls of torch's clipping that another backward followed
    backwards: int = 0
    shards: Sketches = field(default_factory=dict)  # this rank's part, as it arrived
    shards_used: Sketches = field(default_factory=dict)  # and as the optimizer gets it
    replaced: bool = False  # whether they are other tensors than those of backward
    foreign: int = 0  # parameters of the optimizer that are not the model's
    reduces: bool = False  # whether the optimizer reduces something in its step
    of_torch: bool = True  # whether the optimizer is one of torch's
    lost: int = 0  # rows of data whose gradients were set to zero before this update
    kept: int = 0

    @property
    def rates(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.options if "lr" in group]


@dataclass
class Step:
    """A call of `train_step`."""

    epoch: int
    items: tuple  # of this rank: indices, or contents if there are none
    contents: tuple = ()
    columns: tuple = ()  # contents, were the second dimension that of the items
    raw: tuple = ()  # contents as the data set gives them, before a batch may pad them
    loss: float | None = None
    rows: int = 0  # different ones of the batch's first tensor
    forwarded: int = 0  # of them, those that the model has seen
    evaluating: tuple[str, ...] = ()  # modules in evaluation mode as it went forward
    gathers: bool = False  # whether the step itself communicates
    parameters: Sketches = field(default_factory=dict)
    buffers: Sketches = field(default_factory=dict)
    sets: Sketches = field(default_factory=dict)  # of the buffers, as sets of rows
    state: Sketches = field(default_factory=dict)  # beside model and optimizer
    draws: list[Draw] = field(default_factory=list)
    random_items: list[dict[str, int]] = field(default_factory=list)
    random_step: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Record:
    """What one rank did in one run."""

    rank: int
    start: Sketches
    start_buffers: Sketches
    start_state: Sketches  # beside model and optimizer
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
    rounds: list[str] = field(default_factory=list)  # types below float64 that are left
    expected: frozenset[str] = frozenset()  # findings that the training knows of
    restarts: bool = False  # whether it can save and load
    loose: bool = False  # whether a draw could not be tied to items


Records = list[Record]  # by rank


@dataclass(frozen=True)
class Run:
    """How a rank trains: in a type; with draws pinned, BatchNorm frozen, or neither."""

    dtype: torch.dtype = torch.float64
    pin: bool = True
    freeze: bool = False
    by_chance: bool = False
    epochs: int = 2
    limit: int = 20  # updates of an epoch
    device: str = "cpu"
    shake: float = 0.0  # relative change of the first weights, which shows what rounds
    # Instead of the batch of one process' step: that of a rank of so many; then it ends.
    swap: tuple[int, int, int] | None = None
    stop: int = 0  # after so many steps, and save in `folder`; 0 goes on to the end
    resume: bool = False  # from what is saved in `folder`
    folder: str = ""


class Recorder:
    """Hooks of a model and of all optimizers, and what they have seen."""

    def __init__(self, draws: Draws, on_update: Callable[[], None] = lambda: None):
        self.draws, self.on_update = draws, on_update
        self.model = nn.Module()
        self.engine: Any = None  # DeepSpeed's, whose optimizers are its own affair
        self.incoming: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.hooked: set[int] = set()
        self.updates: list[Update] = []
        self.optimizers: list = []
        self.foreign: dict[str, torch.Tensor] = {}  # parameters outside of the model
        self.depth = self.bytes = self.optimizer_bytes = self.step = 0
        self.seen: set = set()  # rows of data, in this step
        self.evaluating: tuple[str, ...] = ()
        self._forget()
        self.handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def _forget(self) -> None:
        """Begin what leads to the next update."""
        self.own: Sketches = {}
        self.shards: Sketches = {}
        self.backward: dict[int, torch.Tensor] = {}  # gradients, by id of the parameter
        self.unclipped: Sketches | None = None
        self.norm: float | None = None
        self.most: float | None = None
        self.clips: list[int] = []  # backward passes before each
        self.backwards, self.arriving = 0, False
        self.forwards: list[set] = []  # rows of data
        self.first_kept = 0

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def watch(self, model: nn.Module) -> None:
        """Hook parameters that are new, or trained only now; called before every step."""
        if zero.is_engine(model) and self.engine is not model:
            self.engine = model
            # some build their optimizer's state by a step without gradients
            self.updates, self.optimizers, self.foreign = [], [], {}
            of_engine = zero.on_update(model, self._before_engine, self._after_engine)
            self.handles.append(of_engine)
        self.model = model
        for name, parameter in named(self.model):
            self.names[id(parameter)] = name
            if id(parameter) in self.hooked or not parameter.requires_grad:
                continue
            number = id(parameter)
            self.hooked.add(number)
            after = self._sharded
            if not isinstance(parameter, DTensor):
                arriving = functools.partial(self._arriving, number)
                self.handles.append(parameter.register_hook(arriving))
                after = self._accumulated
            hook = functools.partial(after, number)
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.draws.parameters = [parameter for _, parameter in named(self.model)]

    def watch_forward(self, model: nn.Module) -> None:
        self.handles += [
            model.register_forward_pre_hook(self._forward, with_kwargs=True),
            model.register_forward_hook(self._forwarded, always_call=True),
        ]

    # The names are those of now: a wrap may have given others.
    def _arriving(self, number: int, gradient: torch.Tensor) -> None:
        self._count_backward()
        if not self.engine:  # which takes gradients away as they arrive
            self.incoming[self.names[number]] = gradient.detach()

    def _count_backward(self) -> None:
        self.backwards += not self.arriving
        self.arriving = self.draws.returned = True

    def _accumulated(self, number: int, parameter: nn.Parameter) -> None:
        if self.engine:
            return
        assert parameter.grad is not None
        name = self.names[number]
        before, now = self.own.get(name), sketch(parameter.grad)
        arrived = self.incoming.pop(name, None)
        # What had been there is gone, although no optimizer has used it.
        there = before and _norm(before) > 1e-8 * _norm(now)
        if there and arrived is not None and sketch(arrived) == now:
            self.first_kept = max(0, len(self.forwards) - 1)
        self.own[name] = now
        self.backward[number] = parameter.grad

    def _sharded(self, number: int, parameter: nn.Parameter) -> None:
        self._count_backward()
        if parameter.grad is not None:
            self.shards[self.names[number]] = sketch(local(parameter.grad))

    def _forward(self, module, args, kwargs) -> None:
        """Note which rows of the batch the model is given, and in which mode it is."""
        self.draws.inside += 1
        if not torch.is_grad_enabled():
            return
        names = (name.removeprefix("module.") for name, m in module.named_modules()
                 if not m.training)  # fmt: skip
        self.evaluating = self.evaluating or tuple(names)
        self.arriving = False
        first = next(tensors_of([args, kwargs]), None)
        rows = row_digests(first, self.draws.axis) if first is not None else ()
        self.draws.went_forward(len(rows))
        if module.training:
            self.forwards.append(set(rows))
            self.seen |= self.forwards[-1]

    def _forwarded(self, module, args, result) -> None:
        self.draws.inside -= 1

    def note_clipping(self, parameters: Iterable) -> None:
        """Note what gradients are like before torch clips them, first in a step."""
        with_grad = [p for p in parameters if p.grad is not None]
        sketches = {self.name(p): sketch(p.grad) for p in with_grad}
        self.unclipped = sketches | (self.unclipped or {})
        self.clips.append(self.backwards)

    def name(self, parameter: torch.Tensor) -> str:
        return self.names.get(id(parameter), f"parameter of shape {[*parameter.shape]}")

    @staticmethod
    def _has_closure(args: tuple, kwargs: dict) -> bool:
        """Return whether `step` computes the gradients itself; it is in `args`, too."""
        return any(map(callable, args[1:])) or callable(kwargs.get("closure"))

    def _before_engine(self) -> None:
        self.depth += 1  # the optimizers within are recorded with it
        trained = [p for _, p in named(self.model) if p.requires_grad]
        found = {self.name(p): zero.gradient(p) for p in trained}
        inner = zero.optimizer_of(self.engine)
        self.updates.append(
            Update(
                step=self.step,
                options=[*map(_numbers, inner.param_groups)],
                gradients={n: sketch(g) for n, g in found.items() if g is not None},
                own={},
                backwards=self.backwards,
                of_torch=type(inner).__module__.startswith("torch."),
            )
        )

    def _after_engine(self) -> None:
        self.depth -= 1
        self._forget()
        self._count_bytes()
        self.on_update()

    def _before_update(self, optimizer, args, kwargs) -> None:
        if self.engine:
            return
        if not any(optimizer is each for each in self.optimizers):
            self._meet(optimizer)
        self.depth += 1
        if self.depth == 1:  # one that another one calls is recorded with it
            self.collectives = self.draws.collectives
            # behind hooks of the program's own, which may average in there
            self.last = optimizer.register_step_pre_hook(self._record_update)

    def _meet(self, optimizer) -> None:
        """Take in an optimizer, and parameters of it that are not the model's."""
        self.optimizers.append(optimizer)
        number = len(self.optimizers)
        of_all = [p for group in optimizer.param_groups for p in group["params"]]
        for k, parameter in enumerate(of_all):
            if id(parameter) not in self.names:
                name = f"parameter {k} of optimizer {number}, not of the model"
                self.names[id(parameter)], self.foreign[name] = name, parameter

    def _record_update(self, optimizer, args, kwargs) -> None:
        self.collectives = self.draws.collectives
        if not self._has_closure(args, kwargs):
            self._record_gradients(optimizer)

    def _record_gradients(self, optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in parameters if p.grad is not None]
        gradients = {self.name(p): sketch(p.grad) for p in trained}
        kept = set().union(*self.forwards[self.first_kept :])
        lost = set().union(*self.forwards[: self.first_kept]) - kept
        sharded = {
            self.name(p): p.grad
            for p in trained
            if isinstance(p, DTensor) and p.grad is not None
        }
        self.updates.append(
            Update(
                step=self.step,
                options=[*map(_numbers, optimizer.param_groups)],
                gradients=gradients,
                own={name: self.own[name] for name in gradients if name in self.own},
                aside={n: s for n, s in self.own.items() if n not in gradients},
                unclipped=self.unclipped,
                norm=self.norm,
                most=self.most,
                clipped_early=sum(count < self.backwards for count in self.clips),
                backwards=self.backwards,
                shards={n: self.shards[n] for n in sharded if n in self.shards},
                shards_used={n: sketch(local(g)) for n, g in sharded.items()},
                replaced=any(
                    p.grad is not self.backward.get(id(p), p.grad) for p in trained
                ),
                foreign=sum(self.name(p) in self.foreign for p in parameters),
                of_torch=type(optimizer).__module__.startswith("torch."),
                lost=len(lost),
                kept=len(kept),
            )
        )
        self._count_bytes()

    def _after_update(self, optimizer, args, kwargs) -> None:
        if self.engine:
            return
        self.depth -= 1
        if self.depth == 0:
            self.last.remove()
            if self._has_closure(args, kwargs):
                self._record_gradients(optimizer)
            else:
                self.updates[-1].reduces = self.draws.collectives > self.collectives
            self._forget()
            self._count_bytes()
            self.on_update()

    def _count_bytes(self) -> None:
        """Note the most bytes on this rank: parameters, gradients, state of optimizers."""
        if self.engine:  # whose gradients are in buffers of its own
            of_engine = _size({id(t): t for t in zero.state(self.engine)})
            self.bytes = max(self.bytes, of_engine)
            return
        of_model: dict[int, torch.Tensor] = {}
        of_optimizers: dict[int, torch.Tensor] = {}
        for _, parameter in named(self.model):
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

    def begin_step(self, number: int, model: nn.Module) -> None:
        self.watch(model)
        self.step, self.seen, self.evaluating = number, set(), ()


def _norm(numbers: list[float]) -> float:
    return sum(number * number for number in numbers) ** 0.5


def _numbers(group: dict) -> dict[str, float]:
    """Return the numbers of a group of parameters by their names, betas apart."""
    found = {}
    for name, value in group.items():
        if name == "params":
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        for k, each in enumerate(values):
            if isinstance(each, torch.Tensor) and each.numel() == 1:
                each = each.item()
            if isinstance(each, (int, float)) and not isinstance(each, bool):
                found[name if values is not value else f"{name}[{k}]"] = float(each)
    return found


def _size(tensors: dict[int, torch.Tensor]) -> int:
    """Return the bytes that are on this rank."""
    return sum(t.numel() * t.element_size() for t in map(local, tensors.values()))


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by their names in the model that was wrapped."""
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in model.named_parameters()
    ]


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers of the state: others are caches that may differ in shape."""
    kept = {name.removeprefix("module.") for name in model.state_dict(keep_vars=True)}
    all_named = ((n.removeprefix("module."), b) for n, b in model.named_buffers())
    return {name: _bounded(buffer) for name, buffer in all_named if name in kept}


def _bounded(buffer: torch.Tensor) -> torch.Tensor:
    """Return the same with 1 and -1 for infinities, as in a mask of attention."""
    if not buffer.is_floating_point():
        return buffer
    return torch.nan_to_num(buffer, nan=torch.nan, posinf=1.0, neginf=-1.0)


def _state_of(root: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors that are held beside model and optimizers: an average, a teacher."""
    known = {id(t) for t in itertools.chain(model.parameters(), model.buffers())}
    found: dict[str, torch.Tensor] = {}
    waiting, seen = [("", root, 0)], set()
    while waiting and len(found) < STATES:
        name, each, depth = waiting.pop(0)
        if id(each) in seen or depth > 3 or each is model:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if id(each) not in known:
                found[name] = each
        elif isinstance(each, nn.Module):
            own = itertools.chain(each.named_parameters(), each.named_buffers())
            waiting += [(f"{name}.{n}", t, depth) for n, t in own]
        elif isinstance(each, torch.optim.Optimizer) or callable(each):
            continue
        elif isinstance(each, dict):
            waiting += [(f"{name}.{k}", v, depth + 1) for k, v in each.items()]
        elif isinstance(each, (list, tuple)):
            waiting += [(f"{name}[{k}]", v, depth + 1) for k, v in enumerate(each)]
        elif not type(each).__module__.startswith(("torch", "deepspeed")):
            held = getattr(each, "__dict__", {}).items()
            waiting += [(f"{name}.{k}", v, depth + 1) for k, v in held]
    return {name.lstrip("."): tensor for name, tensor in found.items()}


def _freeze(module: nn.Module) -> None:
    """Let BatchNorm use its running statistics, whatever mode the program sets."""

    def off(module, args):
        module.was_training, module.training = module.training, False

    def back(module, args, result):
        module.training = module.was_training

    for each in module.modules():
        if _is_batch_norm(each) and each.running_mean is not None:
            each.register_forward_pre_hook(off)
            each.register_forward_hook(back)


@torch.no_grad()
def _shake(model: nn.Module, by: float) -> None:
    """Change each weight by chance, and by so much of its size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.mul_(1 + by * noise)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _batch_norms(model: nn.Module) -> list[str]:
    return [
        name.removeprefix("module.")
        for name, each in model.named_modules()
        if _is_batch_norm(each)
    ]


def _held(model: nn.Module, beside: Any) -> dict[str, Any]:
    """Return sketches of what is held before training."""
    state = _state_of(beside, model)
    return {
        "start": {name: sketch(p) for name, p in named(model)},
        "start_buffers": {n: sketch(b) for n, b in _buffers(model).items()},
        "start_state": {n: sketch(_bounded(t)) for n, t in state.items()},
    }


def _note(step: Step, model: nn.Module, beside: Any, recorder: Recorder) -> None:
    """Write down what is held after a step."""
    trained = dict(named(model)) | recorder.foreign
    step.parameters = {name: sketch(p) for name, p in trained.items()}
    for name, buffer in _buffers(model).items():
        step.buffers[name], step.sets[name] = sketch(buffer), sketch_as_set(buffer)
    state = _state_of(beside, model)
    step.state = {n: sketch(_bounded(t)) for n, t in state.items()}


@contextlib.contextmanager
def _watched_clipping(recorder: Recorder) -> Iterator[None]:
    """Let torch's functions that clip tell `recorder` what they found."""
    module, kept = nn.utils.clip_grad, {}

    def watch(original: Callable) -> Callable:
        def clip(parameters, *args, **kwargs):
            if isinstance(parameters, torch.Tensor):
                parameters = [parameters]
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


def _is_module(each: Any, call: str) -> nn.Module:
    if not isinstance(each, nn.Module):
        kind = type(each).__name__
        raise BadInput(f"{call} returned a {kind}: let it return a module.")
    return each


class Trainer:
    """One run of one rank of a group that exists: `train` returns its record.

    Args:
        load: returns the training; called once, before anything else.
        run: how to train.
        say: is told where this rank stands.
    """

    def __init__(
        self, load: Callable[[], Training], run: Run, say: Callable[[str], None]
    ):
        self.load, self.run, self.say = load, run, say
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.control: Any = dist.new_group(backend="gloo")
        self.sources = Sources()

    def train(self) -> Record:
        """Train for all epochs."""
        self.sources.begin(self.rank, self.run.by_chance)
        self.say("in build_model")
        self.training = self.load()
        items, shared = self.training.items, self.training.shared_noise
        self.draws = Draws(self.sources, self.run.pin, items, shared)
        self.lifted = Lifted(self.run.dtype == torch.float64)
        self.recorder = Recorder(self.draws)
        with (
            contextlib.closing(self.recorder),
            _watched_clipping(self.recorder),
            _default_dtype(torch.float32),
            contextlib.ExitStack() as stack,
        ):
            stack.callback(self.sources.end)
            stack.enter_context(zero.in_float64(self.lifted.active))
            self._build()
            if self.lifted.active:  # before FSDP2 looks at them, in its first forward
                stack.enter_context(without_policies())
            first, done = self._load() if self.run.resume else (0, 0)
            for epoch in range(first, self.run.epochs):
                if not self._train_epoch(epoch, done if epoch == first else 0):
                    break
            self._finish()
        self.say("at the end")
        return self.record

    def _build(self) -> None:
        training, run = self.training, self.run
        self.sources.add(getattr(training, name) for name in FUNCTIONS)
        model = _is_module(training.build_model(), "build_model()")
        for name, tensor in itertools.chain(named(model), model.named_buffers()):
            if tensor.is_complex():
                raise BadInput(
                    f"`{name}` is complex, which the tool does not compare: keep it as "
                    "real numbers, `torch.view_as_real`, and view it in `forward`."
                )
        model = model.to(run.device, run.dtype)
        if run.freeze:
            _freeze(model)
        if run.shake:
            _shake(model, run.shake)
        self.recorder.watch(model)  # before a strategy adds hooks of its own
        self.say("in wrap")
        torch.set_default_dtype(run.dtype)  # also of what wrap adds to the model
        # DeepSpeed's engine casts what it is given; other wraps keep to the default type
        with self.lifted if zero.is_loaded() else contextlib.nullcontext():
            wrapped = (training.wrap or DistributedDataParallel)(model)
        self.model = _is_module(wrapped, "wrap(model)")
        at_wrap = {name: p.requires_grad for name, p in named(self.model)}
        self.say("in build_optimizer")
        self.optimizer = training.build_optimizer(self.model)
        self.recorder.watch(self.model)
        self.recorder.watch_forward(self.model)
        self.record = Record(
            rank=self.rank,
            **_held(self.model, self.optimizer),
            at_wrap=at_wrap,
            batch_norms=_batch_norms(self.model),
            sharded=training.shards,
            expected=training.expected,
            restarts=bool(training.save and training.load),
        )

    def _load(self) -> tuple[int, int]:
        """Load what was saved; return the epoch, and how many of its batches are done."""
        assert self.training.load
        self.say("in load")
        place = self.training.load(self.run.folder, self.model, self.optimizer)
        try:
            epoch, step = map(int, place)
        except (TypeError, ValueError):
            raise BadInput(
                f"load(...) returned {place!r}: let it return the epoch and the number of "
                "its batches that are done, as `save` was given them."
            ) from None
        self.record = replace(self.record, **_held(self.model, self.optimizer))
        return epoch, step

    def _batches(self, rank: int, world_size: int, epoch: int) -> Batches:
        loader = self.training.make_loader(rank, world_size, epoch)
        if not isinstance(loader, Iterable):
            raise BadInput(
                f"make_loader(...) returned a {type(loader).__name__}: let it return "
                "what yields this rank's batches."
            )
        most = CALLS * self.run.limit
        return Batches(loader, epoch, self.run.pin, most, self.sources)

    def _train_epoch(self, epoch: int, done: int) -> bool:
        """Train until batches end, or enough updates were made; return if all goes on."""
        record, run = self.record, self.run
        self.say(f"in make_loader, epoch {epoch}")
        batches = self._batches(self.rank, self.world_size, epoch)
        record.shuffles |= batches.shuffles
        record.length = batches.length
        record.contents.append([])
        order: list[tuple] = []
        with self.sources.seeded(0):  # it draws nothing that the training would notice
            for _ in range(done):
                batches.next()
                batches.raw()
        updates, cut = len(self.recorder.updates), False
        while True:
            number = done + len(order)
            self.say(f"at step {number} of epoch {epoch}")
            if run.swap and len(record.steps) == run.swap[2]:
                batches = self._batches(run.swap[0], run.swap[1], epoch)
                for _ in range(number):
                    batches.next()
            batch = batches.next()
            made = len(self.recorder.updates) - updates
            enough = made >= run.limit or number >= CALLS * run.limit
            # without any, weights may be changed by hand: each step is one
            enough |= not self.recorder.updates and number >= max(run.limit, BY_HAND)
            here = torch.tensor([float(batch is not None), float(enough)])
            least, most = here.clone(), here.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, self.control)
            dist.all_reduce(most, dist.ReduceOp.MAX, self.control)
            if least[0] != most[0] and not most[1]:
                # whoever trains on would wait for the others for ever
                self._count_batches(batches, batch, epoch, number)
                break
            if batch is None or most[1]:
                cut = bool(most[1])
                break
            self._step(batches, batch, epoch, number)
            order.append(record.steps[-1].items)
            if run.swap and len(record.steps) > run.swap[2]:
                return False
            if len(record.steps) == run.stop:
                self._save(epoch, number + 1)
                return False
        record.whole &= batches.whole and (batches.indices is not None or not cut)
        record.orders.append(batches.indices or order)
        return record.unequal_steps is None

    def _save(self, epoch: int, done: int) -> None:
        assert self.training.save
        self.say("in save")
        os.makedirs(self.run.folder, exist_ok=True)
        dist.barrier(self.control)
        self.training.save(self.run.folder, self.model, self.optimizer, epoch, done)

    def _step(self, batches: Batches, batch: Any, epoch: int, number: int) -> None:
        record, draws, run = self.record, self.draws, self.run
        contents = items = row_digests(batch, self.training.items)
        raw = batches.raw()
        if batches.indices:
            items = batches.indices[number]
        else:
            record.identified &= not batches.drew and any(
                tensor.ndim for tensor in tensors_of(batch)
            )
        record.augmented |= batches.drew
        record.loose |= batches.loose
        record.contents[-1].append(contents)
        batch = cast(batch, run.dtype, run.device)
        self.recorder.begin_step(len(record.steps), self.model)
        draws.begin(epoch, number, items)
        step = Step(epoch, items, contents, row_digests(batch, 1), raw)
        if batches.items:
            step.random_items, batches.items.noted = batches.items.noted, []
        loss = self._call(step, batch, epoch, number)
        record.drew |= batches.drew or draws.drew
        record.loose |= draws.loose
        if isinstance(loss, (int, float, torch.Tensor)):
            loss = torch.as_tensor(loss).detach()
            step.loss = float(loss) if loss.numel() == 1 else None
        first = next((t for t in tensors_of(batch) if t.ndim), None)
        rows = set(row_digests(first, draws.axis)) if first is not None else set()
        seen = self.recorder.seen
        # a step that changes what it forwards leaves no rows to count, but by accident
        step.rows, step.forwarded = len(rows), len(seen) if seen <= rows else 0
        step.draws, step.evaluating = draws.noted, self.recorder.evaluating
        step.gathers = draws.gathers
        _note(step, self.model, self.optimizer, self.recorder)
        record.steps.append(step)

    def _call(self, step: Step, batch: Any, epoch: int, number: int) -> Any:
        """Call `train_step`, with what it draws pinned or noted."""
        sources, draws = self.sources, self.draws
        seed = digest(repr((epoch, number)).encode())
        pinned = sources.seeded(seed) if self.run.pin else contextlib.nullcontext()
        with pinned, draws.of_numpy():
            before, places = sources.states(), sources.places()
            with draws, self.lifted:
                loss = self.training.train_step(self.model, self.optimizer, batch)
            draws.end()
            after = sources.states()
            used = {n for n, v in after.items() if n != "torch" and before.get(n) != v}
            for name in used & before.keys():
                now = sources.places().get(name, 0)
                step.random_step[name] = before[name], (now - places.get(name, 0)) % 624
        self.record.drew |= bool(used)
        self.record.loose |= bool(used)
        self.record.rounds = sorted(self.lifted.left)
        return loss

    def _count_batches(self, batches: Batches, batch: Any, epoch: int, n: int) -> None:
        if batches.indices is not None:
            count = len(batches.indices)
        else:
            rest = sum(1 for _ in itertools.islice(batches.loader, self.run.limit))
            count = n + (batch is not None) * (1 + rest)
        counts = [torch.zeros(1) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([float(count)]), self.control)
        self.record.unequal_steps = epoch, [int(each) for each in counts]

    def _finish(self) -> None:
        record, recorder = self.record, self.recorder
        if self.world_size == 1 and not record.steps and not self.run.resume:
            raise BadInput(
                "make_loader(0, 1, 0) gives no batch: let one process have them all."
            )
        record.updates = recorder.updates
        record.state_bytes = record.shared_bytes = recorder.bytes
        record.sharded |= any(isinstance(p, DTensor) for _, p in named(self.model))
        shared = any(
            type(each).__name__ == "ZeroRedundancyOptimizer"
            for each in recorder.optimizers
        )
        if shared and not record.sharded:  # it shares its own state, and no parameter
            record.sharded, record.shared_bytes = True, recorder.optimizer_bytes


def record(
    training: Training,
    dtype: torch.dtype = torch.float64,
    epochs: int = 2,
    steps: int = 20,
) -> Record:
    """Train on this rank of a process group that exists, and return what it did.

    For what has a launcher of its own; `check` starts ranks itself. All ranks call it.
    """
    run = Run(dtype, epochs=epochs, limit=steps)
    return Trainer(lambda: training, run, lambda where: None).train()


@contextlib.contextmanager
def watch(model: nn.Module, *beside: Any) -> Iterator[Record]:
    """Record any loop that trains `model`, for `judge`: each update counts as a step.

    Within, dropout keeps everything, and a model in float64 computes in float64 throughout.
    Other noise is the loop's own: seed it by the item, or leave it out. Items are told by
    what goes into the model.

    Args:
        model: as it is trained, so wrapped.
        beside: what else has a state: an average of the weights, a teacher.

    Yields:
        This rank's record, which is whole at the end.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    draws = Draws(Sources(), True, 0, False)
    dtype = next(model.parameters()).dtype
    held = _held(model, beside)
    found = Record(rank, **held, at_wrap={}, batch_norms=[], sharded=False)
    found.at_wrap = {name: p.requires_grad for name, p in named(model)}
    found.batch_norms = _batch_norms(model)

    def on_update() -> None:
        items = tuple(sorted(recorder.seen))
        step = Step(0, items, items, evaluating=recorder.evaluating)
        _note(step, model, beside, recorder)
        found.steps.append(step)
        found.drew |= draws.drew
        found.loose |= draws.loose
        recorder.begin_step(len(found.steps), model)
        draws.begin(0, len(found.steps), ())

    recorder = Recorder(draws, on_update)
    recorder.begin_step(0, model)
    recorder.watch_forward(model)
    with (
        contextlib.closing(recorder),
        _watched_clipping(recorder),
        draws,
        zero.in_float64(dtype == torch.float64),
        Lifted(dtype == torch.float64) as lifted,
    ):
        yield found
    found.rounds, found.updates = sorted(lifted.left), recorder.updates
    found.orders = found.contents = [[step.items for step in found.steps]]
    found.identified = all(step.items for step in found.steps)  # if it is called itself
    found.state_bytes = found.shared_bytes = recorder.bytes
    found.sharded = any(isinstance(p, DTensor) for _, p in named(model))
