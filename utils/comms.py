"""What the ranks send each other: collectives and bytes counted, beside the formulas."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Comms:
    """Collectives that one rank took part in.

    calls: how often, by name ("allreduce", "broadcast", "allgather", ...).
    payload: bytes of the tensors that the rank handed in, by name.
    """

    calls: Counter = field(default_factory=Counter)
    payload: Counter = field(default_factory=Counter)


class count_comms(TorchDispatchMode):
    """Count the collectives that this thread starts inside a `with` block.

    `with count_comms() as comms:` gives a `Comms`. Collectives of c10d and of the
    functional API are seen, also those that DDP's reducer starts from C++ during the
    backward pass on a CPU; on a GPU that pass runs in another thread, and a DDP
    communication hook counts instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comms = Comms()

    def __enter__(self) -> Comms:
        super().__enter__()
        return self.comms

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _NOT_SENDING:
            tensors = [x for x in tree_leaves(_sent(name, args)) if _is_tensor(x)]
            short = name.replace("_", "").removesuffix("base").removesuffix("coalesced")
            self.comms.calls[short] += 1
            self.comms.payload[short] += sum(t.numel() * t.itemsize for t in tensors)
        return func(*args, **(kwargs or {}))


def allreduce_bytes(payload: int, world_size: int) -> float:
    """Bytes each rank sends when `payload` bytes are all-reduced over a ring.

    2 (N - 1) / N times the payload: a reduce-scatter and an all-gather, each of which
    sends (N - 1) / N of it. No algorithm sends less.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    return 2 * (world_size - 1) / world_size * payload


_NOT_SENDING = ("wait_tensor", "barrier", "monitored_barrier_")
# Collectives whose first argument is where the result goes; the second is what is sent.
_OUTPUT_FIRST = ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base")


def _sent(name: str, args: tuple):
    return args[1] if name.rstrip("_") in _OUTPUT_FIRST else args[0]


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)
