"""What ranks send each other: collectives and bytes counted, beside the formulas."""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.errors import BadInput


@dataclass
class Comms:
    """Collectives that one rank took part in.

    calls: how often, by name, a key of `RING` ("allreduce", "broadcast", "allgather", ...).
    payload: bytes of the tensors that the rank handed in, by name.
    groups: the same for each process group on its own, by the ranks that are in it.
    """

    calls: Counter = field(default_factory=Counter)
    payload: Counter = field(default_factory=Counter)
    groups: dict[tuple[int, ...], "Comms"] = field(default_factory=dict)

    def sent(self, world_size: int) -> float:
        """Return the bytes that each rank sent, if every collective runs over a ring.

        The payload is measured; what a ring makes of it is `RING`. In a broadcast or a
        reduce the ranks send unequal amounts: there it is the mean over the ranks.
        """
        return sum(RING[name](world_size) * n for name, n in self.payload.items())

    def leaving_node(self, ranks_per_node: int) -> float:
        """Return the bytes that leave each node, if collectives run over a ring, in order.

        Node 0 has ranks 0 to `ranks_per_node` - 1, and so on. The groups that this rank is
        in stand for all groups, as in a mesh: of a ring's links, the fraction that leads to
        another node counts, once for each rank of a node.
        """
        total = 0.0
        for ranks, counted in self.groups.items():
            nodes = [rank // ranks_per_node for rank in ranks]
            leaving = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1]))
            total += ranks_per_node * leaving / len(ranks) * counted.sent(len(ranks))
        return total

    def _add(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self.payload[name] += nbytes


class count_comms(TorchDispatchMode):
    """Count the collectives that this thread starts inside a `with` block.

    `with count_comms() as comms:` gives a `Comms`. Collectives of c10d and of the
    functional API that have an entry in `RING` are seen, others (a barrier, a receive)
    are not. The backward pass counts too, with what DDP's reducer starts from C++; on a
    GPU it runs in a thread of its own, into which autograd copies the modes of this
    thread, such as this class (`ATen/ThreadLocalState.h`). Every operation passes through
    Python meanwhile: time nothing inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comms = Comms()

    def __enter__(self) -> Comms:
        super().__enter__()
        return self.comms

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: then we see what it sends
        namespace, name = func._schema.name.split("::")
        joined = name.replace("_", "")
        short = next((kind for kind in RING if joined.startswith(kind)), None)
        if namespace in ("c10d", "_c10d_functional") and short:
            handed_in = _sent(namespace, short, args)
            tensors = [x for x in tree_leaves(handed_in) if _is_tensor(x)]
            nbytes = sum(t.numel() * t.itemsize for t in tensors)
            ranks = _ranks(func._schema, args)
            self.comms._add(short, nbytes)
            self.comms.groups.setdefault(ranks, Comms())._add(short, nbytes)
        return func(*args, **(kwargs or {}))


def allreduce_bytes(payload: int, world_size: int) -> float:
    """Return the bytes that each rank sends when `payload` bytes are all-reduced in a ring.

    2 (N - 1) / N times the payload: a reduce-scatter and an all-gather, each of which
    sends (N - 1) / N of it. Where only the ranks add, no algorithm sends less. Switches
    that add (NVIDIA's SHARP) can halve it: each rank sends its payload once.

    Sources: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", https://doi.org/10.1016/j.jpdc.2008.09.002; Graham et al.
    2016, "Scalable Hierarchical Aggregation Protocol (SHArP)",
    https://doi.org/10.1109/COMHPC.2016.006
    """
    return 2 * (world_size - 1) / world_size * payload


def _ring_fraction(world_size: int) -> float:
    return (world_size - 1) / world_size


# Bytes that a ring sends per rank, in units of the payload: of an all-gather that is
# one shard, of all others the whole tensor. The first name that fits counts.
RING = {
    "allreduce": lambda n: 2 * _ring_fraction(n),
    "allgather": lambda n: n - 1,
    "reducescatter": _ring_fraction,
    "broadcast": _ring_fraction,
    "reduce": _ring_fraction,
    "alltoall": _ring_fraction,
    "scatter": _ring_fraction,
    "gather": _ring_fraction,
    "send": lambda n: 1,
}
# How often a strategy moves all parameters (or gradients) past a rank in one step.
# A reduce-scatter or an all-gather is one trip over the network, an all-reduce is both.
TRIPS = {
    "ddp": 2,  # all-reduce gradients
    "zero1": 2,  # reduce gradients to their owners, all-gather parameters
    "zero2": 2,
    "zero3": 3,  # all-gather for forward and again for backward, reduce-scatter
    "fsdp2": 3,  # reshard_after_forward=True; by default the root's group makes 2
    "fsdp2-keep": 2,  # reshard_after_forward=False: gathered once
}


def predict(strategy: str, parameter_bytes: int, world_size: int) -> float:
    """Return bytes sent per rank and step: trips times (N - 1) / N times the parameters.

    `strategy` is a key of `TRIPS`; gradients are taken to have the parameters' type.
    Left out: a few bytes per step for the loss and the gradient norm.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7 (arXiv 1910.02054).

    Raises:
        BadInput: there is no such strategy.
    """
    if strategy not in TRIPS:
        raise BadInput(f"No strategy {strategy!r}: choose from {', '.join(TRIPS)}.")
    return TRIPS[strategy] * _ring_fraction(world_size) * parameter_bytes


# Of c10d these take the tensor for the result first, and what is sent second.
_OUTPUT_FIRST = ("allgather", "reducescatter", "alltoall", "scatter", "gather")


def _sent(namespace: str, kind: str, args: tuple):
    return args[1 if namespace == "c10d" and kind in _OUTPUT_FIRST else 0]


def _ranks(schema, args: tuple) -> tuple[int, ...]:
    """Return the ranks of the process group that is among the arguments of a collective."""
    names = ("process_group", "group_name")
    group = next(x for a, x in zip(schema.arguments, args) if a.name in names)
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]  # torch's own str
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)
