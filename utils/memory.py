"""Where memory goes: bytes of state measured per rank, beside the ZeRO formulas."""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class State(NamedTuple):
    """Bytes of parameters, gradients and optimizer state."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


# Bytes per parameter with Adam, which keeps two averages. All in fp32: 16.
FP32 = State(4, 4, 8)
# Mixed precision as in the ZeRO paper: 16-bit parameters and gradients; the optimizer
# keeps its averages and a master copy of the parameters in fp32. Also 16.
MIXED = State(2, 2, 12)
# FSDP2's mixed precision stores everything in fp32 and only computes in 16 bit: FP32.
# DeepSpeed keeps a master copy also where parameters are fp32 already: 20.
DEEPSPEED_FP32 = State(4, 4, 12)
# The ZeRO stage from which on each part is divided by the number of ranks.
SHARDED_FROM = State(parameters=3, gradients=2, optimizer=1)


def predict(
    parameters: int, world_size: int, stage: int, per_parameter: State = FP32
) -> State:
    """Return the bytes of state on each rank by the formulas of the ZeRO paper.

    Stage 0 is data parallelism (DDP): every rank holds everything. Stage 1 divides the
    optimizer state by the number of ranks, stage 2 also the gradients, stage 3 (and
    FSDP2) also the parameters. Left out are padding, the group of parameters that is
    gathered at the moment, communication buffers and activations.

    Source: Rajbhandari et al. 2020, "ZeRO", section 5 (arXiv 1910.02054).

    Raises:
        ValueError: the stage is not 0, 1, 2 or 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"The ZeRO stage is {stage}, but must be 0, 1, 2 or 3.")
    return State(
        *(
            parameters * each / (world_size if stage >= sharded_from else 1)
            for each, sharded_from in zip(per_parameter, SHARDED_FROM)
        )
    )


def activation_bytes(
    tokens: int,
    width: int,
    layers: int,
    vocabulary: int = 0,
    bytes_per_number: int = 2,
    checkpointing: bool = False,
) -> int:
    """Return the bytes of activations that a step of a GPT holds on one device.

    A layer keeps 16 numbers per token and unit of width for its backward pass: what goes
    into its two norms (2), into `qkv` (1), into attention (3), into `out` (1), into `up`
    (1), into GELU (4) and into `down` (4). With checkpointing every layer keeps its input
    only (1), and one at a time is computed again, with the other 15. After the layers come
    the last norm and the output layer (2), and the loss, which keeps a float32 for each
    token and entry of the vocabulary; 0 leaves that out.

    The paper counts 34 bytes per token, layer and width: these 16 numbers in 16 bit, and
    two dropout masks of 1 byte, which `utils.models.GPT` lacks. Left out as well: its 5
    bytes per head and pair of tokens (the table of scores and two copies, which kernels
    like FlashAttention do not keep), the norms' statistics, and gradients.

    Args:
        tokens: on this device, texts times their length.
        bytes_per_number: 2 in 16 bit, 4 in float32.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", sections 4.1 and 5 (arXiv 2205.05198).
    """
    numbers = (layers + 15 if checkpointing else 16 * layers) + 2
    return tokens * (bytes_per_number * width * numbers + 4 * vocabulary)


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of tensors on this rank; of a DTensor, its local shard counts."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.itemsize for t in local if t is not None)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the bytes of state that this rank holds: a model on a device, DDP or FSDP2.

    Adam's step counters, 4 bytes per tensor, are left out: `predict` has none. Call it
    between `backward` and `zero_grad`, when all three parts exist.
    """
    parameters = list(model.parameters())
    return State(
        local_bytes(parameters),
        local_bytes(p.grad for p in parameters),
        local_bytes(moments(optimizer)),
    )


class count_memory(TorchDispatchMode):
    """Follow the bytes of all tensors that this process makes in a `with` block.

    `live` is what exists now, `peak` the most there was; what existed before the block
    is not counted. Works on fake tensors, which hold no memory, too. On a GPU,
    `follow_memory` sees more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self):
        # FSDP2 frees and regrows its buffers in place, which is no operation of torch: so
        # a method of torch is replaced.
        self._resize = torch.UntypedStorage.resize_
        counter = self

        def resize(storage, size):
            result = counter._resize(storage, size)
            counter._update(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: then we see what it does locally
        seen = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.device.type == "meta":
                continue  # a shape, without memory
            storage = tensor.untyped_storage()
            if id(storage) not in seen and id(storage) not in self._sizes:
                self._sizes[id(storage)] = 0
                weakref.finalize(storage, self._forget, id(storage))
                self._update(storage)
        return result

    def _update(self, storage) -> None:
        if id(storage) in self._sizes:
            self.live += storage.nbytes() - self._sizes[id(storage)]
            self._sizes[id(storage)] = storage.nbytes()
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class _Allocator:
    """What the allocator of a GPU says, with the interface of `count_memory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def __exit__(self, *error) -> None:
        self.peak = torch.cuda.max_memory_allocated(self._device) - self._before


def follow_memory(device: torch.device):
    """Follow `live` and `peak` of a `with` block, in bytes beyond what was there before.

    On a GPU its allocator says them (the peak at the end of the block), and sees the work
    space of kernels, too. On a CPU it is a `count_memory`.
    """
    return _Allocator(device) if device.type == "cuda" else count_memory()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state (of Adam, two averages), no counters."""
    return [
        t
        for state in optimizer.state.values()
        for name, t in state.items()
        if isinstance(t, torch.Tensor) and name != "step"
    ]


def _tensors(tree) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
