"""How long a training step takes: computing, the optimizer, sending, and fixed prices.

A model of six constants (a `Machine`), to be fitted on one's own machine or read off data
sheets. It knows nothing of input pipelines, stragglers or whether a model fits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from utils.comms import RING, TRIPS, Comms
from utils.errors import BadInput

# bf16 without sparsity, from NVIDIA's data sheets; the first name that fits counts
PEAK_FLOPS = {"A100-": 312e12, "A100 ": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12}
PEAK_FLOPS |= {"H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "A10G": 70e12}
PEAK_FLOPS |= {"L40S": 362e12, "L40": 181e12, "L4": 121e12}
# Of a message over a ring, by protocol: seconds fixed, per hop in a node, per hop across
NCCL_SECONDS = {"Simple": (8.4e-6, 3.4e-6, 14e-6), "LL128": (14e-6, 1.9e-6, 4e-6)}
# What the published runs of notebook 03/05 cover; `check_range` refuses what is outside.
PARAMETERS, GPUS, TOKENS = (0.76e9, 65e9), (8, 512), (4096, 49152)


class Work(NamedTuple):
    """What one rank does in a step: FLOPs, bytes that it sends, messages, and more.

    A message is a collective. Each layer has as many operations to start as another. A
    group is what `fully_shard` gathers and splits at a time, with hooks and copies also
    where nothing is sent. state: bytes of weights, gradients and averages that the
    optimizer goes through.
    """

    flops: float
    sent: float
    messages: float
    layers: float = 0
    groups: float = 0
    state: float = 0


class Machine(NamedTuple):
    """What one rank gets: FLOPs and bytes per second, and seconds per message.

    start: seconds per layer, whose operations take time to start, however small they are.
    group: seconds per group. memory: bytes of state per second in the optimizer.
    """

    flops: float
    bandwidth: float
    latency: float
    start: float = 0
    group: float = 0
    memory: float = float("inf")


class Ring(NamedTuple):
    """What a ring gives each of its ranks: bytes per second, and seconds per message."""

    bandwidth: float
    latency: float


class Seconds(NamedTuple):
    """A step if all sending hides behind computing, and if none does."""

    hidden: float
    exposed: float


def training_flops(
    parameters: float,
    tokens: float,
    attention: tuple[float, float, float] = (0, 0, 0),
    checkpointing: bool = False,
) -> float:
    """Return the FLOPs of forward and backward: 6 for every parameter and token.

    Args:
        parameters: of the model.
        tokens: of the batch.
        attention: layers, width and length of a text, for `12 * layers * width * length`
            per token: scores and their sums, all of them, also where a mask hides half.
        checkpointing: of all layers, which computes each forward pass twice: 8 instead
            of 6, and 16 instead of 12.

    Sources: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1
    (arXiv 2001.08361), and for attention Chowdhery et al. 2022, "PaLM", appendix B
    (arXiv 2204.02311).
    """
    recomputed = 4 / 3 if checkpointing else 1
    return recomputed * (6 * parameters + 12 * math.prod(attention)) * tokens


def groups(strategy: str, layers: int) -> int:
    """Return the number of groups that FSDP2 gathers: one per layer, and the rest."""
    return layers + 1 if strategy.startswith("fsdp2") else 0


def ddp_buckets(layers: int, parameters: float, bucket_mb: float = 25) -> int:
    """Return the number of buckets in which DDP sends a GPT's gradients, in float32.

    DDP closes a bucket once it holds `bucket_mb` MiB (`bucket_cap_mb`), and splits no
    tensor: a matrix that is larger is a bucket by itself. Counted are the matrices of the
    layers, not what stands beside them: vocabulary, norms and biases. Nor is it counted
    that with DDP's own `bucket_cap_mb` the first bucket closes at 1 MiB.

    Args:
        layers: of the model; each has matrices of 3, 1, 4 and 4 times width x width.
        parameters: of the model, all of them in these matrices.
        bucket_mb: in MiB.

    Source: `compute_bucket_assignment_by_size` in
    https://github.com/pytorch/pytorch/blob/v2.15.0/torch/csrc/distributed/c10d/reducer.cpp
    """
    limit, square = bucket_mb * 2**20, 4 * parameters / (12 * layers)
    buckets, filled = 0, 0.0
    for squares in (4, 4, 1, 3) * layers:  # as their gradients come: down, up, out, qkv
        filled += squares * square
        if filled >= limit:
            buckets, filled = buckets + 1, 0.0
    return buckets + bool(filled)


def messages_per_trip(
    strategy: str, layers: int, parameters: float = 0, bucket_mb: float = 25
) -> int:
    """Return the collectives in which all parameters (or gradients) pass a rank once.

    FSDP2 and ZeRO-3 make one per group, one of which is each layer; so does what shards
    like them. DDP sends buckets (see `ddp_buckets`), ZeRO-1 and ZeRO-2 buckets of 5e8
    numbers (`reduce_bucket_size`).

    Args:
        strategy: its name.
        layers: of the model.
        parameters: of the model; 0 for one that fits into one bucket.
        bucket_mb: of DDP, in MiB.

    Source: https://www.deepspeed.ai/docs/config-json/
    """
    if strategy == "ddp":
        return max(1, ddp_buckets(layers, parameters, bucket_mb))
    if strategy in ("zero1", "zero2"):
        return max(1, math.ceil(parameters / 5e8))
    return layers + 1


def messages(
    strategy: str, layers: int, parameters: float = 0, bucket_mb: float = 25
) -> int:
    """Return the collectives of a step, each trip for itself: an all-reduce makes two.

    `strategy` is a key of `utils.comms.TRIPS`; the others as in `messages_per_trip`.
    """
    per_trip = messages_per_trip(strategy, layers, parameters, bucket_mb)
    return TRIPS[strategy] * per_trip


def predict(work: Work, machine: Machine) -> Seconds:
    """Return the bounds of a step. On CPUs, whose cores also send, take `exposed`."""
    computing = work.flops / machine.flops + work.state / machine.memory
    computing += work.layers * machine.start + work.groups * machine.group
    sending = work.sent / machine.bandwidth + work.messages * machine.latency
    return Seconds(max(computing, sending), computing + sending)


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """Return the machine whose steps come nearest, all exposed; no constant is negative.

    Least squares of the relative errors, so that short steps count as much as long ones. A
    constant that the steps do not need (a column of zeros) costs nothing: its rate is inf.

    Raises:
        ValueError: there are fewer steps than constants.
    """
    costs = np.array(works, dtype=float) / np.array(seconds)[:, None]
    scale = costs.max(axis=0)  # FLOPs and messages differ by eleven digits
    if len(works) < (constants := np.count_nonzero(scale)):
        raise ValueError(f"{len(works)} steps cannot tell {constants} constants apart.")
    scale[scale == 0] = 1
    solution, _ = nnls(costs / scale, np.ones(len(works)))
    prices = Work(*map(float, solution / scale))
    flops, bandwidth, memory = (
        1 / price if price else float("inf")
        for price in (prices.flops, prices.sent, prices.state)
    )
    fixed = prices.messages, prices.layers, prices.groups
    return Machine(flops, bandwidth, *fixed, memory)


def h100_ring(gpus: int, nodes: int | None = None, protocol: str = "Simple") -> Ring:
    """Return a ring of H100 GPUs, by data sheets and NCCL's own estimate of a message.

    NVLink moves 450 GB/s each way. Between nodes each GPU has a network card of 50 GB/s,
    and a ring uses the cards of all its GPUs. A message takes a fixed time, and more for
    each hop: from node to node, and from GPU to GPU. NCCL expects so many microseconds to
    choose an algorithm; they are no measurement. "Simple" is its protocol for large
    messages, "LL128" one for smaller ones.

    Args:
        gpus: in the ring.
        nodes: that they are spread over, equally; by default as few as hold them, 8 each.
        protocol: a key of `NCCL_SECONDS`.

    Sources: https://www.nvidia.com/en-us/data-center/h100/ and
    https://docs.nvidia.com/dgx/dgxh100-user-guide/ (data sheets), and NCCL 2.30.7,
    https://github.com/NVIDIA/nccl/blob/5067397c2676d5aed50042fc39e5c8ee96eb0027/src/graph/tuning.cc
    (`hwLatencies`, `baseLatencies`, and how they add up for a ring)
    """
    nodes = nodes or math.ceil(gpus / 8)
    bandwidth = 450e9 if nodes == 1 else min(450e9, 50e9 * gpus / nodes)
    fixed, in_node, across = NCCL_SECONDS[protocol]
    hops = (gpus - nodes) * in_node + (nodes - 1) * across
    return Ring(bandwidth, fixed + hops)


def on_h100_rings(counted: Comms, ranks_per_node: int = 8) -> dict[str, float]:
    """Return seconds of the collectives of each kind, one after another, on `h100_ring`.

    An all-reduce goes around its ring twice, so it pays for two messages. Node 0 has ranks
    0 to `ranks_per_node` - 1, and so on.

    Args:
        counted: of one rank; its process groups say which ring each collective takes.
        ranks_per_node: GPUs of a node, all of them in the job.

    Returns:
        By the collective's name, a key of `RING`.
    """
    seconds: dict[str, float] = {}
    for ranks, group in counted.groups.items():
        ring = h100_ring(len(ranks), len({rank // ranks_per_node for rank in ranks}))
        for name, payload in group.payload.items():
            sent = RING[name](len(ranks)) * payload
            messages = group.calls[name] * (2 if name == "allreduce" else 1)
            took = sent / ring.bandwidth + messages * ring.latency
            seconds[name] = seconds.get(name, 0) + took
    return seconds


def check_range(parameters: float, gpus: int, tokens: float) -> None:
    """Check that runs of this size were among those that the model was checked with.

    `tokens` are those of one GPU in one forward pass. Each of the three counts by itself.

    Raises:
        BadInput: they were not; says which were.
    """
    given = ((parameters, PARAMETERS), (gpus, GPUS), (tokens, TOKENS))
    if not all(low <= each <= high for each, (low, high) in given):
        raise BadInput(
            f"{parameters / 1e9:g} billion parameters on {gpus} GPUs with {tokens:,} "
            "tokens each are outside of what was checked "
            f"({PARAMETERS[0] / 1e9:g} to {PARAMETERS[1] / 1e9:g} billion on {GPUS[0]} to "
            f"{GPUS[1]} GPUs with {TOKENS[0]:,} to {TOKENS[1]:,} tokens): measure a step "
            "instead."
        )
