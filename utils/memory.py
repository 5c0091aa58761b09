"""Where memory goes: bytes of state measured per rank, beside the ZeRO formulas."""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.models import Shape


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


def numbers_kept(shape: Shape, checkpointing: str = "none") -> float:
    """Return the numbers that a block keeps for its backward pass, per token and width.

    Of a GPT-2 block 16: what goes into its two norms (2), into the products for queries,
    keys and values (1), these themselves (3), into `out` (1), into the feed-forward network
    (1), into GELU (4) and into `down` (4). Shared keys and values are fewer, and a network
    with gates keeps four tensors of its inner width instead of two. "full" checkpointing
    keeps the block's input; "selective" also what matrix products and attention return.

    The literature counts 34 bytes: these 16 numbers in 16 bit, and two dropout masks of 1
    byte, which the workshop's models lack. Left out: its 5 bytes per head and pair of
    tokens (the table of scores and two copies, which kernels like FlashAttention do not
    keep), and the statistics of norms, one or two numbers per token.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", section 4.1 (arXiv 2205.05198).
    """
    keys_and_values = 2 * shape.kv_heads / shape.heads
    inner = shape.ffn / shape.width * (2 if shape.gated else 1)
    kept = {
        "none": 6 + keys_and_values + 2 * inner,
        "selective": 5 + keys_and_values + inner,
        "full": 1,
    }
    return kept[checkpointing]


def activation_bytes(
    shape: Shape,
    tokens: float,
    checkpointing: str = "none",
    bytes_per_number: int = 2,
    per_word: int = 12,
) -> float:
    """Return the bytes of activations on one device, at the peak of a step.

    What all blocks keep (`numbers_kept`), and the larger of two: the loss, with what goes
    into the last norm and into the output layer; or a block that is computed again, with
    the gradients of its output and of its inner width.

    Args:
        shape: of the model.
        tokens: on this device, texts times their length.
        checkpointing: "none", "selective" or "full".
        bytes_per_number: 2 in 16 bit, 4 in float32.
        per_word: bytes of the loss, per token and entry of the vocabulary. 12: a loss in
            float32 has three such tables when its backward pass begins. 4: one is kept
            after the forward pass. 0: none, as in a loss that is computed piece by piece.
    """
    kept, inner = numbers_kept(shape, checkpointing), shape.ffn / shape.width
    again = numbers_kept(shape) - kept + 1 + inner * (2 if shape.gated else 1)
    number = bytes_per_number * shape.width
    loss = 2 * number + per_word * shape.vocabulary
    return tokens * (kept * shape.layers * number + max(loss, again * number))


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
    is not counted. Works on fake tensors, which hold no memory, too. On a GPU
    its allocator sees more: the work space of kernels.
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
