"""Checks of the exercises of part 03: sharding."""

import copy
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.checks.exercise import Exercise, join, stands_still
from utils.launch import run_ranks

# Modules that import torch are imported where they are used: other parts do without.
WRONG_TRAFFIC = {  # by how many times the right number it is
    "0.5": "The backward pass has two as well, and an all-reduce is two trips.",
    "0.25": "Count the backward pass, and two trips for each all-reduce.",
    "2": "Activations are in bf16 here, not in float32.",
}
# What ds_config.json leaves to DeepSpeed's defaults, at stage 2; with a small bucket.
STAGE_2: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000},
}


def _small_gpt():
    """Return the small GPT on the CPU, its number of parameters, and two texts for it."""
    import torch

    from utils.models import GPT, SMOKE

    os.environ["WORKSHOP_MODE"] = "smoke"  # on CPUs, even if there are GPUs
    torch.manual_seed(0)
    model = GPT(SMOKE)
    return model, sum(p.numel() for p in model.parameters()), torch.ones(2, 64).long()


def _trips(config: dict) -> float:
    """Return how often a step of DeepSpeed on two ranks moves all parameters by one."""
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


def _makes_two_trips(my_config) -> bool | str:
    config = my_config(copy.deepcopy(STAGE_2))
    if config["zero_optimization"]["stage"] != 2:
        return f"That is stage {config['zero_optimization']['stage']}: stay at stage 2."
    trips = run_ranks(_trips, 2, config, timeout=120)[0]
    return abs(trips - 2) < 0.01 or f"With it, a step makes {trips:.2f} trips."


def _norm_at_stage_3(answer: Callable) -> tuple[float, float, float]:
    """Return what the answer finds, the norm of all weights, and that of this rank's."""
    import torch
    from torch.optim import AdamW

    from utils.zero import load_deepspeed

    (model, _, _), deepspeed = _small_gpt(), load_deepspeed()
    norms = [p.detach().norm() for p in model.parameters()]
    whole = torch.stack(norms).norm().item()
    join()
    deepspeed.init_distributed("gloo")
    changes = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero = STAGE_2["zero_optimization"] | changes
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=AdamW(model.parameters()),
        config=STAGE_2 | {"zero_optimization": zero},
    )
    pieces = [p.ds_tensor.norm() for p in engine.module.parameters()]
    with torch.no_grad():
        found = answer(engine)
    found = float("nan") if found is None else float(found)
    return found, whole, torch.stack(pieces).norm().item()


def _finds_the_norm(answer: Callable) -> bool | str:
    try:
        ranks = run_ranks(_norm_at_stage_3, 2, answer, timeout=120)
    except RuntimeError as error:
        if not stands_still(error):
            raise
        return "One rank stands in an all-gather that the other does not enter."
    for rank, (found, whole, pieces) in enumerate(ranks):
        if abs(found - whole) < 1e-3 * whole:
            continue
        said = f"On rank {rank} it returns {found:.3f}, and the norm is {whole:.3f}."
        if found == 0:
            return f"{said} Outside of a gathering block the parameters are empty."
        if abs(found - pieces) < 1e-3 * whole:
            return f"{said} It is that of the pieces which this rank keeps."
        return said
    return True


def _sent_and_held(wrap) -> tuple[float, float]:
    """Return trips of a step on two ranks, and the share of all state that a rank holds."""
    import torch.distributed as dist
    from torch.optim import AdamW

    from utils import comms, memory

    model, parameters, texts = _small_gpt()
    join()
    model = wrap(model, dist.init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters())
    with comms.count_comms() as counted:
        model(texts).square().mean().backward()
    optimizer.step()
    held = memory.state_bytes(model, optimizer).total
    return counted.sent(2) / (2 * parameters), held / (16 * parameters)


def _sends_as_ddp_and_holds_half(wrap) -> bool | str:
    trips, share = run_ranks(_sent_and_held, 2, wrap, timeout=120)[0]
    if abs(share - 1 / 2) > 0.01:
        return f"A rank of two holds {share:.0%} of the state."
    if trips < 1.99:
        return f"A step makes {trips:.2f} trips, so some gradients are not reduced."
    return trips < 2.01 or f"A rank holds half, but a step makes {trips:.2f} trips."


def _shards_in_nodes_of_four(wrap: Callable) -> bool | str:
    """Return whether rank 0 of 8, with an answer's wrap, sends what HSDP (2 x 4) sends."""
    import torch

    from utils.checks.sharding import fake_ranks
    from utils.comms import allreduce_bytes, count_comms
    from utils.memory import local_bytes
    from utils.models import GPT, SMOKE

    # its mesh is the answer's own, which fake tensors have no values for: computed in full
    with fake_ranks(8):
        model = GPT(SMOKE)
        whole = local_bytes(model.parameters())
        model = wrap(model)
        if model is None:
            return "The function returns nothing: return the wrapped model."
        held = local_bytes(model.parameters())
        with count_comms() as counted:
            model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    if held != whole / 4:
        return f"Each rank holds 1/{whole / held:.3g} of the parameters, not 1/4."
    groups = {ranks for ranks in counted.groups if ranks != (0, 4)}
    if groups != {(0, 1, 2, 3)}:
        return f"Rank 0 shares its pieces with the ranks {sorted(groups)}."
    across = counted.groups.get((0, 4))
    return (
        across is not None
        and across.calls.keys() == {"allreduce"}
        and across.sent(2) == allreduce_bytes(whole // 4, 2)
    ) or "The shards of the two nodes are not averaged with each other."


def _fits_tokens(answer) -> bool | str:
    from utils import memory

    models = (
        (7_000_000_000, 8, 80e9, 4096, 32),
        (1_500_000_000, 4, 24e9, 1600, 48),
    )
    for model in models:
        parameters, gpus, gpu_bytes, width, layers = model
        room = gpu_bytes - memory.predict(parameters, gpus, 3, memory.MIXED).total
        for saves in (False, True):
            each = memory.activation_bytes(1, width, layers, checkpointing=saves)
            expected = room // each
            if abs((got := answer(*model, saves)) - expected) > 1:
                listed = ", ".join(f"{each:g}" for each in model)
                called = f"Called with ({listed}, {saves}), it returns {got:g}"
                if abs(got - gpu_bytes // each) <= 1:
                    return f"{called}: the state takes some of this room."
                if saves and abs(got - expected) > expected / 10:
                    return f"{called}: with checkpointing it should be {expected:g}."
                return f"{called}: it should be {expected:g}."
    if answer(7e9, 1, 80e9, 4096, 32, False) != 0:
        return "The state of 7 billion parameters does not fit on one GPU: return 0."
    return True


def _divides_sgd(answer) -> bool | str:
    for stage in range(4):
        for n in (1, 2, 8):
            expected = sum(4 / n if stage >= first else 4 for first in (1, 2, 3))
            if abs((got := answer(stage, n)) - expected) > 1e-9:
                return f"At stage {stage} on {n} ranks, it returns {got:g}."
    return True


def _lowers_the_peak(answer) -> bool | str:
    from utils.checks.sharding import lowers_the_peak

    return lowers_the_peak(answer)


def _takes_five_all_gathers(answer) -> bool | str:
    from utils.checks.sharding import holds_its_share, simulate

    step = simulate(answer)
    calls = [step.comms.calls[name] for name in ("allgather", "reducescatter")]
    if not holds_its_share(step):
        return "A rank holds more than its share of the state."
    if calls == [5, 5]:
        return "That takes five all-gathers, but keeps its blocks: 5 reduce-scatters."
    said = f"Its step takes {calls[0]} all-gathers and {calls[1]} reduce-scatters."
    return calls == [5, 3] or said


def _tells_shards_from_copies(answer) -> bool | str:
    from utils.checks.sharding import tells_shards_from_copies

    return tells_shards_from_copies(answer)


def _sends_in_tensor_parallel(answer) -> bool | str:
    for layers, tokens, width, n in ((4, 384, 64, 2), (32, 8192, 4096, 8)):
        expected = 4 * layers * 2 * (n - 1) / n * tokens * width * 2
        got = answer(layers, tokens, width, n)
        if abs(got - expected) > 1e-6:
            ratio = f"{got / expected:.3g}"
            said = f"Called with ({layers}, {tokens}, {width}, {n}), it returns {got:g}"
            said = f"{said}, which is {ratio} times what is sent."
            return f"{said} {WRONG_TRAFFIC.get(ratio, '')}".strip()
    return True


def _hides_sending(answer) -> bool | str:
    """Return whether computing takes as long as what fsdp2 (2, 2, 4 bytes) sends."""
    from utils import timing

    for billions, gpus, layers in ((7, 64, 32), (1.3, 512, 24), (20, 8, 44)):
        ring, size = timing.h100_ring(gpus), 1e9 * billions
        sent = 8 * size * (gpus - 1) / gpus / ring.bandwidth
        sent += 3 * (layers + 1) * ring.latency
        tokens = sent * 0.4 * timing.PEAK_FLOPS["H100"] / (6 * size)
        expected, got = 1024 * math.ceil(tokens / 1024), answer(billions, gpus, layers)
        if got != expected:
            called = f"Called with ({billions}, {gpus}, {layers}), it returns {got!r}"
            if not isinstance(got, int) or got % 1024:
                return f"{called}, which is no multiple of 1024."
            return f"{called}: there computing takes {got / tokens:.2f} times as long."
    return True


def _is_the_row_of_hpz(answer) -> bool | str:
    """Return whether it is hpZ's (stage, state, bytes of each trip, bytes kept)."""
    from utils.memory import FP32, MIXED

    stage, state, trips, kept = answer
    found = {ring: sorted(each) for ring, each in trips.items() if each}
    if stage != 3 or tuple(state) != MIXED:
        as_fsdp2 = " With DeepSpeed it is MIXED." if tuple(state) == FP32 else ""
        return f"The state should be that of zero3.{as_fsdp2}"
    if found == {"all": [2, 2, 2]}:
        return "These are zero3's trips: the backward pass gathers inside the node."
    if found != {"all": [2, 2], "node": [2]}:
        return "Which three trips does a step make, and over which ring is each?"
    if not kept:
        return "The second copy takes memory, too."
    return abs(kept - 2 / 8) < 1e-9 or f"It keeps {kept:g} bytes of each parameter?"


def _is_a_wrong_choice(answer, choose) -> bool | str:
    """Return whether what `choose` says does not fit with the loss of Llama 3."""
    from utils import memory, timing

    billions, gpus, layers, tokens = answer()
    choice = choose(billions, gpus, 80, layers, tokens=tokens)
    if choice == "none":
        return "There `choose` says that no row fits."
    name, _, saves = choice.partition(", ")
    size = 1e9 * billions
    kept = {"ddp": 2, "fsdp2-keep": 2, "fsdp2-near": 2 / 8}.get(name, 0)
    if name not in (*timing.TRIPS, "fsdp2-near", "hsdp"):
        return f"This check does not know the row {name!r}: find a case with another."
    stage, ranks = 0 if name == "ddp" else 3, 8 if name == "hsdp" else gpus
    held = memory.predict(size, ranks, stage, memory.FP32).total + kept * size
    held += 2 * 2 * size / layers if stage == 3 else 0
    width, saved = (size / (12 * layers)) ** 0.5, bool(saves)
    held += memory.activation_bytes(tokens, width, layers, checkpointing=saved)
    loss = 4 * 128_256 * tokens
    return held + loss > 80e9 or (
        f"There `choose` says {choice}, which holds {held / 1e9:.0f} GB, and "
        f"{(held + loss) / 1e9:.0f} GB with the loss: it fits."
    )


def _makes_few_buckets(answer) -> bool | str:
    """Return whether messages of DDP's trips take at most a tenth of what bytes take."""
    from utils import timing

    for case in ((7e9, 32, 64), (30e9, 48, 512), (1.3e9, 24, 8)):
        parameters, layers, gpus = case
        ring, mb = timing.h100_ring(gpus), 1
        sending = 8 * parameters * (gpus - 1) / gpus / ring.bandwidth
        while True:
            messages = timing.messages("ddp", layers, parameters, mb)
            if messages * ring.latency <= sending / 10:
                break
            mb *= 2
        if (got := answer(*case)) != mb:
            size, called = "too large" if got > mb else "too small", f"{parameters:g}"
            called += f", {layers}, {gpus}"
            return f"Called with ({called}), it returns {got!r}: {size}."
    return True


def _counts_flops(answer) -> bool | str:
    from utils.timing import training_flops

    for parameters, layers, width, length in (
        (7e9, 32, 4096, 8192),
        (1e9, 24, 2048, 512),
    ):
        expected = training_flops(parameters, 1, (layers, width, length), True)
        got = answer(parameters, layers, width, length)
        ratio = got / expected
        if abs(ratio - 1) > 1e-6:
            called = f"({parameters:g}, {layers}, {width}, {length})"
            said = (
                f"Called with {called}, it returns {ratio:.3f} times what is computed."
            )
            forgot = abs(ratio - 3 / 4) < 1e-6
            return f"{said} The forward pass runs twice." if forgot else said
    return True


def _trains_its_shards(prepare: Callable) -> bool | str:
    """Return whether `prepare(model, mesh)` shards a GPT, and its optimizer trains it.

    Two steps on two ranks have to leave the weights that they leave on one process.
    """
    held, moved, off = run_ranks(_two_steps, 2, prepare, timeout=120)[0]
    if held is None:
        return "prepare returns no optimizer."
    if held > 0.55:
        return f"Each of two ranks holds {held:.0%} of the parameters."
    if moved == 0:
        return "After two training steps, no weight has changed."
    if moved < 1:
        return f"Two training steps have changed only {moved:.0%} of the parameters."
    if off > 1e-8:
        return "After two training steps, the weights are not those of one process."
    return True


def _two_steps(prepare: Callable) -> tuple[float | None, float, float]:
    """Return the share of parameters held, the share that moved, and the largest error."""
    import torch
    import torch.distributed as dist

    from utils.memory import local_bytes
    from utils.models import GPT, SMOKE

    def train(model, optimizer, tokens):
        for _ in range(2):
            logits = model(tokens).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()

    def build():  # in float64: Adam blows up the rounding of small gradients
        torch.manual_seed(0)
        return GPT(SMOKE).double()

    join()
    torch.manual_seed(1)
    tokens = torch.randint(SMOKE.vocab_size, (4, SMOKE.block_size))
    model, alone = build(), build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = prepare(model, dist.init_device_mesh("cpu", (2,)))
    if optimizer is None:
        return None, 0.0, 0.0
    held = local_bytes(model.parameters()) / local_bytes(before)
    train(model, optimizer, tokens[dist.get_rank() :: 2])
    rates = optimizer.param_groups[0]
    train(alone, torch.optim.AdamW(alone.parameters(), lr=rates["lr"]), tokens)
    after = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    moved = [not torch.equal(a, b) for a, b in zip(after, before)]
    off = max((a - b).abs().max().item() for a, b in zip(after, alone.parameters()))
    return held, sum(moved) / len(moved), off


def _resumes_elsewhere(load: Callable) -> bool | str:
    """Return whether `load(model, optimizer, folder)` reads, on 3 ranks, what 2 saved."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_save, 2, Path(folder), timeout=120)[0]
        found = run_ranks(_resume, 3, load, Path(folder), timeout=120)[0]
    where = "Saved on 2 ranks and loaded on 3,"
    if not _same(saved[0], found[0]):
        return f"{where} the weights are not those that were saved."
    if not found[1]:
        return f"{where} the weights are right, but AdamW has no averages yet."
    if not _same(saved[1], found[1]):
        return f"{where} the weights are right, but AdamW's averages are not."
    return True


def _sharded() -> tuple:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from utils.models import GPT, SMOKE

    model, mesh = GPT(SMOKE), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def _whole(model, optimizer) -> tuple[dict, dict]:
    """Return weights and averages, whole on rank 0; looks at them without filling them."""

    def gathered(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    names = {p: name for name, p in model.named_parameters()}
    weights = {name: gathered(p.detach()) for p, name in names.items()}
    averages = {
        f"{names[p]}.{kind}": gathered(value.detach())
        for p, state in optimizer.state.items()
        for kind, value in state.items()
    }
    return weights, averages


def _save(folder: Path) -> tuple[dict, dict]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    join()
    torch.manual_seed(1)
    model, optimizer = _sharded()
    model(torch.ones(2, 64).long()).square().mean().backward()
    optimizer.step()
    weights, averages = sd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=folder)
    return _whole(model, optimizer)


def _resume(load: Callable, folder: Path) -> tuple[dict, dict]:
    import torch

    join()
    torch.manual_seed(2)  # other weights than those that were saved
    model, optimizer = _sharded()
    load(model, optimizer, folder)
    return _whole(model, optimizer)


def _same(ours: dict, theirs: dict) -> bool:
    import torch

    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


EXERCISES = {
    # 03-fsdp-deepspeed/01_where_memory_goes.ipynb
    "tokens that fit": Exercise(
        _fits_tokens,
        (
            "How many bytes of a GPU does the state leave for activations?",
            "Activations grow with the tokens: how many bytes does one token take?",
        ),
    ),
    "floor of stage 1": Exercise(
        lambda answer: abs(answer - 280) < 1,
        (
            "Which part shrinks with the number of GPUs, and which two do not?",
            "Ever more GPUs leave what stays whole: 16-bit parameters and gradients.",
        ),
        mistakes={
            0: "At stage 1 two parts stay whole on every GPU.",
            16 * 70: "That is the state on one GPU: here there are ever more.",
            2 * 70: "That is one of the two parts that stay whole.",
            280e9: "The number is right, in bytes: give GB.",
        },
    ),
    "sgd": Exercise(
        _divides_sgd,
        (
            "How many averages has SGD with momentum, and of how many bytes?",
            "The stage says how many of the three parts are divided by world_size.",
        ),
    ),
    "smaller groups": Exercise(
        _lowers_the_peak,
        (
            "The largest group decides: which one is it, with the wrap of this notebook?",
            "fully_shard takes any module, and what is in a block is a module, too.",
        ),
    ),
    # 03-fsdp-deepspeed/02_fsdp2.ipynb
    "is it sharded": Exercise(
        _tells_shards_from_copies,
        (
            "What would a rank hold if everything were divided by the number of ranks?",
            "The state has three parts: one may be divided, and the others not.",
        ),
    ),
    "five all-gathers": Exercise(
        _takes_five_all_gathers,
        (
            "How many groups give three reduce-scatters, and which is gathered only once?",
            "fully_shard takes a list of modules, and makes one group of them.",
        ),
    ),
    "trains its shards": Exercise(
        _trains_its_shards,
        (
            "Compare optimizer.param_groups[0]['params'] with list(model.parameters()).",
            "What does fully_shard do to the parameters of a model?",
        ),
    ),
    "another world size": Exercise(
        _resumes_elsewhere,
        (
            "dcp.load fills a dict that has the shapes already: where do you get one?",
            "sd.get_state_dict gives both halves; which function of sd puts them back?",
        ),
    ),
    # 03-fsdp-deepspeed/03_deepspeed_zero.ipynb
    "lowest stage": Exercise(
        lambda answer: answer == 1,
        (
            "Stage 0 holds 2 + 2 + 12 bytes per parameter. Which part goes first?",
            "Divide the parts by 4, one after the other, until the sum fits.",
        ),
        mistakes={
            0: "Undivided, the state takes 16 GB.",
            2: "That fits as well, but a lower stage does, too.",
            3: "That fits as well, but a lower stage does, too.",
        },
    ),
    "norm of weights": Exercise(
        _finds_the_norm,
        (
            "Between uses a parameter is empty. What puts it together, and on which ranks?",
            "GatheredParameters takes a list of parameters, too. Who has to enter it?",
        ),
    ),
    "two trips": Exercise(
        _makes_two_trips,
        (
            "Which trip is one too many: of the parameters, or of the gradients?",
            "The table of settings names one that sends gradients to their owners only.",
        ),
    ),
    # 03-fsdp-deepspeed/04_two_dimensions.ipynb
    "replicate traffic": Exercise(
        lambda answer: abs(answer - 2 * 3 / 4 * 1e9) < 1e6,
        (
            "Of how many bytes does one rank hold the gradient?",
            "An all-reduce is two trips, each (N - 1) / N, over the ranks that replicate.",
        ),
        mistakes={
            2 * 3 / 4 * 4e9: "That is the whole gradient: a rank holds a shard of it.",
            3 / 4 * 1e9: "That is one trip, and an all-reduce is two.",
            2 * 15 / 16 * 1e9: "Over how many ranks is a shard replicated?",
            1e9: "That is the size of a shard, not what its all-reduce sends.",
        },
    ),
    "tensor traffic": Exercise(
        _sends_in_tensor_parallel,
        (
            "How many all-reduces has a block, forward and backward?",
            "An all-reduce is two trips of (N - 1) / N of an activation, in bf16 here.",
        ),
    ),
    "two nodes of four": Exercise(
        _shards_in_nodes_of_four,
        (
            "fully_shard shards over the last dimension, and replicates over the first.",
            "The last dimension of a mesh runs over neighbours.",
        ),
    ),
    # 03-fsdp-deepspeed/05_choosing_a_strategy.ipynb
    "two trips, half the state": Exercise(
        _sends_as_ddp_and_holds_half,
        (
            "What makes it gather a second time?",
            "fully_shard has an option for when gathered weights are freed: read its page.",
        ),
    ),
    "tokens that hide": Exercise(
        _hides_sending,
        (
            'sum(sending("fsdp2", ...).values()) are the seconds to hide.',
            "How many tokens does a GPU compute in a second, at 40% of its peak?",
        ),
    ),
    "add a row": Exercise(
        _is_the_row_of_hpz,
        (
            "It is zero3 but for one trip, and for what stays on the GPU meanwhile.",
            "Compare the rows of fsdp2 and fsdp2-near.",
        ),
    ),
    "a wrong choice": Exercise(
        _is_a_wrong_choice,
        (
            "The loss grows with the tokens. What keeps the activations small meanwhile?",
            "Which of the CASES comes nearest to 72 GB? Give it more tokens.",
        ),
    ),
    "bucket size": Exercise(
        _makes_few_buckets,
        (
            "An all-reduce is two trips: of bytes, and of messages.",
            'Try 1, 2, 4, ... in timing.messages("ddp", layers, parameters, bucket_mb).',
        ),
    ),
    "flops with checkpointing": Exercise(
        _counts_flops,
        (
            "Without it: 6 per parameter, and 12 x layers x width x length for attention.",
            "A backward pass is two forward passes. How many are there with checkpointing?",
        ),
    ),
}
