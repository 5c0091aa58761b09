"""How long a training step takes: computing, the optimizer, sending, and fixed prices.

A model of six constants (a `Machine`), to be fitted on one's own machine or read off data
sheets. It knows nothing of input pipelines, stragglers or whether a model fits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from utils.comms import TRIPS
from utils.errors import BadInput

# bf16 without sparsity, from NVIDIA's data sheets; the first name that fits counts
PEAK_FLOPS = {"A100-": 312e12, "A100 ": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12}
PEAK_FLOPS |= {"H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "A10G": 70e12}
PEAK_FLOPS |= {"L40S": 362e12, "L40": 181e12, "L4": 121e12}
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


class Seconds(NamedTuple):
    """A step if all sending hides behind computing, and if none does."""

    hidden: float
    exposed: float


def training_flops(parameters: float, tokens: float) -> float:
    """FLOPs of forward and backward pass: 6 for every parameter and token.

    Attention's scores are left out: they add `12 * layers * width * time` per token.

    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1
    (arXiv 2001.08361).
    """
    return 6 * parameters * tokens


def groups(strategy: str, layers: int) -> int:
    """Groups of parameters that FSDP2 gathers: one per layer, and the rest of the model."""
    return layers + 1 if strategy.startswith("fsdp2") else 0


def messages(
    strategy: str, layers: int, parameters: float = 0, bucket_mb: float = 25
) -> int:
    """Collectives of a step, each trip for itself: an all-reduce makes two.

    FSDP2 and ZeRO-3 make one per trip and group, one of which is each layer. DDP sends
    gradients in float32 in buckets of 25 MiB (`bucket_cap_mb`), ZeRO-1 and ZeRO-2 buckets
    of 5e8 numbers (`reduce_bucket_size`).

    Args:
        strategy: a key of `utils.comms.TRIPS`.
        layers: of the model.
        parameters: of the model; 0 for one that fits into one bucket.
        bucket_mb: of DDP, in MiB.

    Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    and https://www.deepspeed.ai/docs/config-json/
    """
    if strategy.startswith("fsdp2") or strategy == "zero3":
        return TRIPS[strategy] * (layers + 1)
    if strategy == "ddp":
        buckets = math.ceil(4 * parameters / (bucket_mb * 2**20))
    else:
        buckets = math.ceil(parameters / 5e8)
    return TRIPS[strategy] * max(1, buckets)


def predict(work: Work, machine: Machine) -> Seconds:
    """The bounds of a step. On CPUs, whose cores both compute and send, take `exposed`."""
    computing = work.flops / machine.flops + work.state / machine.memory
    computing += work.layers * machine.start + work.groups * machine.group
    sending = work.sent / machine.bandwidth + work.messages * machine.latency
    return Seconds(max(computing, sending), computing + sending)


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """The machine whose steps come nearest, all exposed; no constant is negative.

    Least squares of the relative errors, so that short steps count as much as long ones. A
    constant that the steps do not need (a column of zeros) costs nothing: its rate is inf.

    Raises:
        ValueError: there are fewer steps than constants.
    """
    costs = np.array(works, dtype=float) / np.array(seconds)[:, None]
    scale = costs.max(axis=0)  # FLOPs and messages are eleven digits apart
    if len(works) < (constants := np.count_nonzero(scale)):
        raise ValueError(f"{len(works)} steps cannot tell {constants} constants apart.")
    scale[scale == 0] = 1
    found, _ = nnls(costs / scale, np.ones(len(works)))
    prices = Work(*map(float, found / scale))
    flops, bandwidth, memory = (
        1 / price if price else float("inf")
        for price in (prices.flops, prices.sent, prices.state)
    )
    fixed = prices.messages, prices.layers, prices.groups
    return Machine(flops, bandwidth, *fixed, memory)


def h100_cluster(gpus: int, utilisation: float = 0.4) -> Machine:
    """H100 GPUs, 8 per node, by data sheets; `utilisation` is the share of peak FLOPs.

    989 TFLOPs per second in bf16 (dense), NVLink 450 GB/s each way, and between nodes 8
    network cards of 50 GB/s, which the GPUs of a node share in a ring. A message passes
    gpus - 1 hops of a ring; a hop takes what the all-reduces of 1 MiB in the last source
    took, on B200 GPUs: 3.6 microseconds in a node (36.06 GB/s), 6.1 across (5.37 GB/s).

    Sources: https://www.nvidia.com/en-us/data-center/h100/ and
    https://docs.nvidia.com/dgx/dgxh100-user-guide/ (data sheets),
    https://github.com/stas00/ml-engineering/tree/master/network (all-reduces)
    """
    one_node = gpus <= 8
    hop = 3.6e-6 if one_node else 6.1e-6
    bandwidth = 450e9 if one_node else 400e9
    return Machine(utilisation * PEAK_FLOPS["H100"], bandwidth, (gpus - 1) * hop)


def check_range(parameters: float, gpus: int, tokens: float) -> None:
    """Whether runs of this size were among those that the model was checked against.

    `tokens` are those of one GPU in one pass. Each of the three counts by itself.

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
