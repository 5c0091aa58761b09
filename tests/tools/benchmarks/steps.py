"""Steps beside each other in one process group: DDP, FSDP2, ZeRO-3; tuned GPT-2; growth."""

import itertools
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

from tests import scripts, sharding
from tests.tools.benchmarks.ratios import (
    MET,
    MISSED,
    NOT_DECIDED,
    interleave,
    interval,
    ratio,
)
from tests.tools.benchmarks.rows import Row
from utils.checks.sharding import simulate
from utils.datasets import digits, text
from utils.launch import run_ranks
from utils.models import GPT, GPT2_124M, GPTConfig, resnet18
from utils.timing import PEAK_FLOPS
from utils.zero import load_deepspeed

# 6.5 million parameters: large enough that the work is not all overhead.
CONFIG = GPTConfig(layers=8, heads=8, width=256)
# Ranks send the same bytes whatever the batch: a large one gives them more work for it.
IMAGES = 64, 512
TEXTS = 8, 64


def seconds_of(step) -> float:
    """Return the seconds of one step, from all ranks ready to all ranks done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def mean_loss(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def scaling(global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds per step of two ranks with DDP, and of one, over the same images."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images, labels = (part[:global_batch] for part in digits().tensors)
    step = scripts.load(scripts.TRAIN_DDP).train_step
    torch.manual_seed(0)
    models = resnet18(), resnet18()
    models[1].load_state_dict(models[0].state_dict())
    wrapped = DDP(models[1], gradient_as_bucket_view=True)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=3e-4, fused=True) for m in models
    ]
    losses = [], []

    def alone() -> None:
        if rank == 0:
            losses[0].append(step(models[0], optimizers[0], images, labels))

    def both() -> None:
        share = images.chunk(2)[rank], labels.chunk(2)[rank]
        losses[1].append(mean_loss(step(wrapped, optimizers[1], *share)))

    def time_of(step):
        steps = 3 if global_batch < 100 else 1  # short ones are timed together
        return lambda: sum(seconds_of(step) for _ in range(steps)) / steps

    alone()
    both()
    if rank == 0:
        assert abs(losses[0][0].item() - losses[1][0]) < 1e-5, "not the same training"
    return interleave(time_of(both), time_of(alone))


def strategies(global_batch: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return seconds of steps of one GPT: DDP beside FSDP2, FSDP2 beside ZeRO-3."""
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = text(block_size=CONFIG.block_size)

    def build():
        torch.manual_seed(0)
        return GPT(CONFIG)

    def loss_of(model):
        each = global_batch // world_size
        mine = range(rank * each, (rank + 1) * each)
        inputs, targets = (torch.stack(part) for part in zip(*(data[i] for i in mine)))
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def stepper(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step():
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step

    model = build()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        config=sharding.zero_config(3, global_batch // world_size),
    )

    def zero_step():
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return loss

    steps = {
        "DDP": stepper(DDP(build())),
        "FSDP2": stepper(sharding.shard(build())),
        "ZeRO-3": zero_step,
    }
    first = [mean_loss(step()) for step in steps.values()]
    assert max(first) - min(first) < 1e-5, "not the same training"
    names = list(steps)
    return {
        f"{names[i + 1]} over {names[i]}": interleave(
            partial(seconds_of, steps[names[i]]),
            partial(seconds_of, steps[names[i + 1]]),
        )
        for i in (0, 1)
    }


def saving(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the seconds that training waits for a checkpoint of FSDP2, written at once
    and in the background; then those of 10 steps with one checkpoint, written whole."""
    dist.init_process_group("gloo")
    script, numbers = scripts.load(sharding.TRAIN_FSDP2), itertools.count()
    background = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = sharding.shard(GPT(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = text(block_size=CONFIG.block_size)[: TEXTS[0] // dist.get_world_size()]
    args = Namespace(checkpoint_dir=folder, keep=1)

    def take(steps: int) -> None:
        for _ in range(steps):
            script.train_step(model, optimizer, *batch, 1.0)

    def save(group):
        number = next(numbers)
        return script.save_checkpoint(
            model, optimizer, number, 1, folder, background=group
        )

    def stands_still(group) -> float:
        writing = []
        seconds = seconds_of(lambda: writing.append(save(group)))
        script.finish(writing[0], args)
        return seconds

    def with_steps(group) -> float:
        def steps() -> None:
            writing = save(group)
            take(10)
            script.finish(writing, args)

        return seconds_of(steps)

    take(1)  # the optimizer has a state then
    return [
        interleave(partial(measured, None), partial(measured, background))
        for measured in (stands_still, with_steps)
    ]


def saving_rows() -> list[Row]:
    """Return the rows of what --async-save gains."""
    with tempfile.TemporaryDirectory() as folder:
        still, steps = run_ranks(saving, 2, Path(folder))[0]
    of = "a checkpoint of FSDP2 on 2 ranks, a GPT with 6.4 million parameters"
    return [
        Row.of_ratio(
            16,
            f"time that training stands still for {of}: --async-save over without",
            ratio(*still),
            at_most=0.5,
            note=f"{np.median(still[1]):.2f} s and {np.median(still[0]):.2f} s",
        ),
        Row.of_ratio(
            16,
            f"10 steps and {of}, until it is written: --async-save over without",
            ratio(*steps),
            note=f"{np.median(steps[1]):.1f} s and {np.median(steps[0]):.1f} s; here the "
            "thread that writes takes its time from the cores that train",
        ),
    ]


def gpt2(
    device: str = "cpu", texts: int = 1, tokens: int = 64, config: GPTConfig = GPT2_124M
) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of a step of GPT-2 124M's shape, tuned and naive.

    Tuned: flash attention and a fused AdamW; on a GPU also compiled, and in bf16.
    """
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    model = GPT(config).to(device)
    data = torch.randint(0, config.vocab_size, (texts, tokens), device=device)
    models = model, torch.compile(model) if on_gpu else model
    optimizers = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False),
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    )
    backends = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION

    def loss_of(tuned: bool) -> torch.Tensor:
        bf16 = torch.autocast(device, torch.bfloat16, enabled=tuned and on_gpu)
        with sdpa_kernel(backends[tuned]), bf16:
            logits = models[tuned](data).flatten(0, 1)
            return F.cross_entropy(logits.float(), data.flatten())

    def step(tuned: bool) -> float:
        start = time.perf_counter()
        loss_of(tuned).backward()
        optimizers[tuned].step()
        optimizers[tuned].zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    difference = abs(loss_of(True).item() - loss_of(False).item())
    assert difference < (0.05 if on_gpu else 1e-5), "not the same training"
    return interleave(lambda: step(True), lambda: step(False))


def flops(texts: int, tokens: int, config: GPTConfig = GPT2_124M) -> int:
    """Return the FLOPs of a step's matrix products, counted without memory."""
    with torch.device("meta"):
        model, data = GPT(config), torch.zeros(texts, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(data).flatten(0, 1), data.flatten()).backward()
    return counter.get_total_flops()


def gpt2_on_gpu(texts: int = 4, tokens: int = 1024) -> list[Row]:
    """Return tuned over naive on a GPU, and the share of its arithmetic that tuned uses."""
    tuned, naive = gpt2("cuda", texts, tokens)
    found = [
        Row.of_ratio(
            11,
            "GPT-2 124M shape, tokens per second: tuned over naive, one GPU",
            ratio(tuned, naive),
            at_least=6,
            note="bf16, torch.compile, fused AdamW and flash attention; "
            f"{texts * tokens / np.median(tuned):,.0f} tokens/s",
        )
    ]
    gpu = torch.cuda.get_device_name()
    peak = next((PEAK_FLOPS[name] for name in PEAK_FLOPS if name in gpu), None)
    if peak:
        used = flops(texts, tokens) / tuned / peak
        low, high = interval(used)
        found.append(
            Row(
                11,
                f"GPT-2 124M shape, model FLOPs utilisation of one GPU ({gpu})",
                "at least 40%",
                f"{np.median(used):.0%}",
                f"{low:.0%} to {high:.0%}",
                verdict=MET if low >= 0.4 else MISSED if high < 0.4 else NOT_DECIDED,
                note=f"of {peak / 1e12:.0f} TFLOPs per second, by the data sheet",
                data={"utilisation": used.tolist()},
            )
        )
    return found


def exponent(sizes, costs) -> float:
    """Return the slope of log cost over log size: 1 where cost grows like the size."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def growth() -> list[Row]:
    """Return how bytes grow with workers (simulated), and seconds with sizes."""
    workers = (2, 4, 8)
    all_ranks = []

    def wrap(model, mesh):
        return sharding.shard(model, mesh=mesh)

    for n in workers:
        simulated = simulate(wrap, sharding.CONFIG, n)
        all_ranks.append(n * simulated.comms.sent(n))
    by_workers = exponent([n - 1 for n in workers], all_ranks)

    widths, rows = (128, 256, 512), (8, 32, 128)
    models = {width: GPT(GPTConfig(layers=4, width=width)) for width in widths}
    parameters = [
        sum(p.numel() for p in model.parameters()) for model in models.values()
    ]

    def step(width: int, texts: int):
        model, tokens = models[width], torch.randint(0, 256, (texts, 64))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def seconds() -> float:
            start = time.perf_counter()
            for _ in range(2):
                logits = model(tokens).flatten(0, 1)
                F.cross_entropy(logits, tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return time.perf_counter() - start

        return seconds

    return [
        Row(
            12,
            "growth of bytes sent by all ranks with workers less one (2, 4, 8; simulated)",
            "the formula's exponent, 1",
            f"{by_workers:.3f}",
            note="exact",
            data={"workers": workers, "bytes": all_ranks},
        ),
        growth_of(
            "a step with parameters (1x, 4x, 16x)",
            parameters,
            [step(width, rows[0]) for width in widths],
            note="below 1 where overhead and better use of the caches count",
        ),
        growth_of(
            "a step with rows (1x, 4x, 16x)", rows, [step(widths[0], n) for n in rows]
        ),
    ]


def growth_of(what: str, sizes, steps, note: str = "", rounds: int = 12) -> Row:
    """Return the exponent of each round through the sizes, up and down in turns.

    The control is the exponent between two neighbours in time of one size, as if they were
    as far apart as the smallest size and the largest.
    """
    measured = []
    for number in range(-1, rounds):  # one to warm up
        if number % 2:
            measured.append([step() for step in steps])
        else:
            measured.append([step() for step in steps[::-1]][::-1])
    seconds = np.array(measured[1:])  # [round, size]
    exponents = [exponent(sizes, each) for each in seconds]
    # Where a round ends, the next begins: 0 goes down to the smallest, 1 up to the largest.
    last = [-(number % 2) for number in range(rounds - 1)]
    again = [
        np.log(seconds[n + 1, end] / seconds[n, end]) for n, end in enumerate(last)
    ]
    low, high = interval(exponents)
    control = interval(np.array(again) / np.log(sizes[-1] / sizes[0]))
    return Row(
        12,
        f"growth of {what}",
        "the formula's exponent, 1",
        f"{np.median(exponents):.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{control[0]:.2f} to {control[1]:.2f}, of 0",
        note=note,
        data={"sizes": list(sizes), "seconds": seconds.tolist()},
    )


def rows() -> list[Row]:
    """Return rows 8, 9, 11, 12 and 16 of the table."""
    found = saving_rows()
    for images in IMAGES:
        two, one = run_ranks(scaling, 2, images)[0]
        found.append(
            Row.of_ratio(
                8,
                "samples per second: DDP on 2 ranks over 1, one thread each, "
                f"global batch of {images} images",
                ratio(two, one),
                at_least=1.7,
                note=f"{np.median(one):.2f} s and {np.median(two):.2f} s per step",
            )
        )
    for texts in TEXTS:
        for name, (a, b) in run_ranks(strategies, 2, texts)[0].items():
            found.append(
                Row.of_ratio(
                    9,
                    f"step time of a GPT with 6.4 million parameters: {name}, "
                    f"global batch of {texts * CONFIG.block_size} tokens",
                    ratio(a, b),
                    at_most=1.5,
                    note=f"{np.median(a):.2f} s and {np.median(b):.2f} s per step",
                )
            )
    tuned, naive = gpt2()
    found.append(
        Row.of_ratio(
            11,
            "GPT-2 124M shape, tokens per second: tuned over naive, CPU",
            ratio(tuned, naive),
            at_least=1.2,
            note="fused AdamW and flash attention, over a loop of operations and the "
            f"whole matrix of attention; {64 / np.median(tuned):.0f} tokens/s",
        )
    )
    if torch.cuda.is_available():
        found += gpt2_on_gpu()
    return found + growth()
