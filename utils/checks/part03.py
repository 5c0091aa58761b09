"""Checks of the exercises of part 03: sharding."""

import copy
import os
from collections.abc import Callable

from utils.checks.exercise import Exercise

# Modules that import torch are imported where they are used: other parts do without.
# What ds_config.json leaves to DeepSpeed's defaults, at stage 2; with a small bucket.
STAGE_2 = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000},
}


def _small_gpt():
    """The small GPT on the CPU, its number of parameters, and two texts for it."""
    import torch

    from utils.models import GPT, SMOKE

    os.environ["WORKSHOP_MODE"] = "smoke"  # on CPUs, even if there are GPUs
    torch.manual_seed(0)
    model = GPT(SMOKE)
    return model, sum(p.numel() for p in model.parameters()), torch.ones(2, 64).long()


def _trips(config: dict) -> float:
    """How often a step of DeepSpeed on two ranks moves all parameters past a rank."""
    from torch.optim import AdamW

    from utils import comms, zero

    (model, parameters, texts), deepspeed = _small_gpt(), zero.load_deepspeed()
    deepspeed.init_distributed("gloo")
    optimizer = AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):  # the first step sends more
        with comms.count_comms() as counted:
            engine.backward(engine(texts).square().mean())
            engine.step()
    return counted.sent(2) / (2 * parameters)


def _makes_two_trips(my_config) -> bool:
    from utils.launch import run_ranks

    config = my_config(copy.deepcopy(STAGE_2))
    if config["zero_optimization"]["stage"] != 2:
        return False
    return abs(run_ranks(_trips, 2, config, timeout=120)[0] - 2) < 0.01


def _sent_and_held(wrap) -> tuple[float, float]:
    """Trips of a step on two ranks, and the share of all state that a rank holds."""
    import torch.distributed as dist
    from torch.optim import AdamW

    from utils import comms, memory

    model, parameters, texts = _small_gpt()
    dist.init_process_group("gloo")
    model = wrap(model, dist.init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters())
    with comms.count_comms() as counted:
        model(texts).square().mean().backward()
    optimizer.step()
    held = memory.state_bytes(model, optimizer).total
    return counted.sent(2) / (2 * parameters), held / (16 * parameters)


def _sends_as_ddp_and_holds_half(wrap) -> bool:
    from utils.launch import run_ranks

    trips, share = run_ranks(_sent_and_held, 2, wrap, timeout=120)[0]
    return abs(trips - 2) < 0.01 and abs(share - 1 / 2) < 0.01


def _shards_in_nodes_of_four(wrap: Callable) -> bool:
    """Whether rank 0 of 8, with the wrap of an answer, sends what HSDP (2 x 4) sends."""
    # here, not above: they take seconds to import, which other exercises need not
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from utils.comms import allreduce_bytes, count_comms
    from utils.memory import local_bytes
    from utils.models import GPT, SMOKE

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        model = GPT(SMOKE)
        whole = local_bytes(model.parameters())
        model = wrap(model)
        held = local_bytes(model.parameters())
        with count_comms() as counted:
            model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    finally:
        dist.destroy_process_group()
    across = counted.groups.pop((0, 4), None)
    return (
        held == whole / 4
        and counted.groups.keys() == {(0, 1, 2, 3)}
        and across is not None
        and across.calls.keys() == {"allreduce"}
        and across.sent(2) == allreduce_bytes(whole // 4, 2)
    )


def _counts_parameter_bytes(answer) -> bool:
    from torch import nn  # here, as below: every lesson imports this module

    small, half = nn.Linear(3, 5), nn.Linear(3, 5).bfloat16()
    mixed = nn.Sequential(nn.Linear(2, 2).double(), nn.LayerNorm(7))
    return [answer(model) for model in (small, half, mixed)] == [80, 40, 104]


def _lowers_the_peak(answer) -> bool:
    from utils.checks.sharding import lowers_the_peak

    return lowers_the_peak(answer)


def _takes_five_all_gathers(answer) -> bool:
    from utils.checks.sharding import holds_its_share, simulate

    step = simulate(answer)
    wanted = {"allgather": 5, "reducescatter": 3}
    return step.calls == wanted and holds_its_share(step)


def _tells_shards_from_copies(answer) -> bool:
    from utils.checks.sharding import tells_shards_from_copies

    return tells_shards_from_copies(answer)


EXERCISES = {
    # 03-fsdp-deepspeed/01_where_memory_goes.ipynb
    "parameter bytes": Exercise(
        _counts_parameter_bytes,
        "Add up numel() times the bytes of one number, which is its element_size().",
    ),
    "state of 70B": Exercise(
        lambda answer: abs(answer - 4.375) < 0.05,
        "16 bytes per parameter, and at stage 3 all of them are divided by 256.",
    ),
    "floor of stage 1": Exercise(
        lambda answer: abs(answer - 280) < 1,
        "Parameters and gradients stay whole, and take 2 bytes each.",
    ),
    "sgd": Exercise(
        lambda f: all(
            abs(
                f(stage, n) - sum(4 / n if stage >= first else 4 for first in (1, 2, 3))
            )
            < 1e-9
            for stage in range(4)
            for n in (1, 2, 8)
        ),
        "Three times 4 bytes; the stage says which of them are divided by world_size.",
    ),
    "smaller groups": Exercise(
        _lowers_the_peak,
        "Blocks are the largest groups left: wrap what is in them, and wrap the model too.",
    ),
    # 03-fsdp-deepspeed/02_fsdp2.ipynb
    "five all-gathers": Exercise(
        _takes_five_all_gathers,
        "Two blocks can share a group, and the group of the model itself is gathered once.",
    ),
    "bytes of FSDP2": Exercise(
        lambda answer: abs(answer - 2 * 7 / 8 * 4e9) < 1e6,
        "One all-gather and one reduce-scatter, each (N - 1) / N of 4e9 bytes.",
    ),
    "batch per worker": Exercise(
        lambda answer: answer == 16,
        "Eight times 12 is the global batch, and it has to stay: divide it by six.",
    ),
    "is it sharded": Exercise(
        _tells_shards_from_copies,
        "Compare state_bytes with memory.predict, all three parts, and allow for padding.",
    ),
    # 03-fsdp-deepspeed/03_deepspeed_zero.ipynb
    "DeepSpeed batch": Exercise(
        lambda answer: answer == 4 * 8 * 16,
        "Texts per pass, times passes per step, times GPUs.",
    ),
    "lowest stage": Exercise(
        lambda answer: answer == 1,
        "Work out 2 + 2 + 12 bytes with the last part, or more, divided by 4.",
    ),
    "two trips": Exercise(
        _makes_two_trips,
        "Stay at stage 2, and switch off what all-reduces gradients in full by default.",
    ),
    "ZeRO-3 chart": Exercise(
        lambda answer: abs(answer - 10) < 1e-6,
        "Stage 3 divides all three by the same number: 2, 2 and 12 bytes stay.",
    ),
    # 03-fsdp-deepspeed/04_two_dimensions.ipynb
    "replicate traffic": Exercise(
        lambda answer: abs(answer - 2 * 3 / 4 * 1e9) < 1e6,
        "An all-reduce over 4 ranks, of what one rank holds of the 4e9 bytes.",
    ),
    "tensor traffic": Exercise(
        lambda f: all(
            abs(
                f(layers, tokens, width, n)
                - 4 * layers * 2 * (n - 1) / n * tokens * width * 2
            )
            < 1e-6
            for layers, tokens, width, n in ((4, 384, 64, 2), (32, 8192, 4096, 8))
        ),
        "Four all-reduces per block, two of them backward; each is two trips.",
    ),
    "two nodes of four": Exercise(
        _shards_in_nodes_of_four,
        "The last dimension of a mesh runs over neighbours, and fully_shard replicates "
        "over the first. Return the model.",
    ),
    # 03-fsdp-deepspeed/05_choosing_a_strategy.ipynb
    "which row": Exercise(
        lambda answer: answer == "fsdp2",
        "Call choose(13e9, 16, gpu_gb=40, layers=40), and look at what fsdp2-keep holds.",
    ),
    "two trips, half the state": Exercise(
        _sends_as_ddp_and_holds_half,
        "fully_shard every block, then the model; what makes it gather a second time?",
    ),
    "traffic ratio": Exercise(
        lambda answer: abs(answer - 1.5) < 1e-6,
        "Count trips over the network: the number of GPUs is in both, and cancels.",
    ),
    "smallest": Exercise(
        lambda f: (
            [f(7e9, 80e9), f(7e9, 56e9), f(7e9, 8e9), f(1e9, 16e9)] == [2, 2, 16, 1]
        ),
        "16 * parameters / gpus has to be at most the budget: try 1, 2, 4, ...",
    ),
}
