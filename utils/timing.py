"""What GPUs need for a step, by data sheets: seconds of computing and of sending."""

import math
from typing import NamedTuple

from utils.comms import RING, Comms

# bf16 without sparsity, from NVIDIA's data sheets; the first name that fits counts
PEAK_FLOPS = {"A100-": 312e12, "A100 ": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12}
PEAK_FLOPS |= {"H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "A10G": 70e12}
PEAK_FLOPS |= {"L40S": 362e12, "L40": 181e12, "L4": 121e12}
# Seconds that a collective takes however small it is, and for each hop from GPU to GPU
FIXED, IN_NODE, ACROSS, IN_NODE_OF_A_TREE = 8.4e-6, 3.4e-6, 14e-6, 4e-6


class Ring(NamedTuple):
    """What a ring gives each of its ranks: bytes per second, and seconds per collective."""

    bandwidth: float
    latency: float


def training_flops(
    parameters: float,
    tokens: float,
    attention: tuple[float, float, float] = (0, 0, 0),
    checkpointing: str = "none",
) -> float:
    """Return the FLOPs of forward and backward: 6 for every parameter and token.

    Args:
        parameters: in matrices; a lookup in an embedding computes nothing.
        tokens: of the batch.
        attention: layers, width and length of a text, for `12 * layers * width * length`
            per token: scores and their sums, all of them, also where a mask hides half.
        checkpointing: "full" computes each forward pass twice, 8 instead of 6, and 16
            instead of 12; "selective" and "none" compute no matrix product twice.

    Sources: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1
    (arXiv 2001.08361), and for attention Chowdhery et al. 2022, "PaLM", appendix B
    (arXiv 2204.02311).
    """
    recomputed = 4 / 3 if checkpointing == "full" else 1
    return recomputed * (6 * parameters + 12 * math.prod(attention)) * tokens


def h100_ring(gpus: int, nodes: int | None = None) -> Ring:
    """Return a ring of H100 GPUs, by data sheets and NCCL's own estimate of its hops.

    NVLink moves 450 GB/s each way. Between nodes each GPU has a network card of 50 GB/s,
    and a ring uses the cards of all its GPUs. An all-gather or a reduce-scatter goes around
    once, with a hop from GPU to GPU. The microseconds are what NCCL expects, to choose an
    algorithm (its protocol "Simple"); they are no measurement.

    Args:
        gpus: in the ring.
        nodes: that they are spread over, equally; by default as few as hold them, 8 each.

    Sources: https://www.nvidia.com/en-us/data-center/h100/ and
    https://docs.nvidia.com/dgx/dgxh100-user-guide/ (data sheets), and NCCL 2.30.7,
    https://github.com/NVIDIA/nccl/blob/5067397c2676d5aed50042fc39e5c8ee96eb0027/src/graph/tuning.cc
    (`hwLatencies`, `baseLatencies`, and how they add up)
    """
    nodes = nodes or math.ceil(gpus / 8)
    bandwidth = 450e9 if nodes == 1 else min(450e9, 50e9 * gpus / nodes)
    return Ring(bandwidth, FIXED + (gpus - nodes) * IN_NODE + (nodes - 1) * ACROSS)


def allreduce_latency(gpus: int, nodes: int) -> float:
    """Return the seconds that NCCL expects of an all-reduce beside its bytes.

    The smaller of two: around a ring twice, which NCCL counts 1.4 times over several nodes,
    or up and down a tree, whose depth grows with the logarithm of the nodes. A tree also
    moves 8 to 22% fewer bytes per second, which is left out, as are NVLink's own sums.

    Source: as `h100_ring`, `tuning.cc`, lines 409 to 416 and 647 to 650.
    """
    around = 2 * ((gpus - nodes) * IN_NODE + (nodes - 1) * ACROSS)
    ring = (FIXED + around) * (1.4 if nodes > 1 else 1)
    depth = (gpus / nodes - 1) * IN_NODE_OF_A_TREE + int(math.log2(nodes)) * ACROSS
    return min(ring, FIXED + 2 * depth)


def on_h100_rings(counted: Comms, ranks_per_node: int = 8) -> dict[str, float]:
    """Return seconds of the collectives of each kind, one after another, on H100 GPUs.

    Node 0 has ranks 0 to `ranks_per_node` - 1, and so on.

    Args:
        counted: of one rank; its process groups say which ring each collective takes.
        ranks_per_node: GPUs of a node, all of them in the job.

    Returns:
        By the collective's name, a key of `RING`.
    """
    seconds: dict[str, float] = {}
    for ranks, group in counted.groups.items():
        nodes = len({rank // ranks_per_node for rank in ranks})
        ring = h100_ring(len(ranks), nodes)
        for name, payload in group.payload.items():
            latency = ring.latency
            if name == "allreduce":
                latency = allreduce_latency(len(ranks), nodes)
            took = RING[name](len(ranks)) * payload / ring.bandwidth
            seconds[name] = seconds.get(name, 0) + took + group.calls[name] * latency
    return seconds
