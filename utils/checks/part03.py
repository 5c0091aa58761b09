"""Checks of the exercises of part 03: sharding."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from utils.checks.exercise import Exercise, join
from utils.launch import run_ranks

# Modules that import torch are imported where they are used: other parts do without.
WRONG_ROWS = {
    "ddp": "On every GPU, ddp holds the whole state of 16 bytes per parameter.",
    "fsdp2-keep": "Beside its state, fsdp2-keep holds a whole gathered copy.",
}
WRONG_ROWS |= dict.fromkeys(
    ("zero1", "zero2", "zero3"), "That row is DeepSpeed's, and the code is PyTorch's."
)
WRONG_TRAFFIC = {  # by how many times the right number it is
    "0.5": "The backward pass has two as well, and an all-reduce is two trips.",
    "0.25": "Count the backward pass, and two trips for each all-reduce.",
    "2": "Activations are in bf16 here, not in float32.",
}
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


def _makes_two_trips(my_config) -> bool | str:
    config = my_config(copy.deepcopy(STAGE_2))
    if config["zero_optimization"]["stage"] != 2:
        return f"That is stage {config['zero_optimization']['stage']}: stay at stage 2."
    trips = run_ranks(_trips, 2, config, timeout=120)[0]
    return abs(trips - 2) < 0.01 or f"With it, a step makes {trips:.2f} trips."


def _sent_and_held(wrap) -> tuple[float, float]:
    """Trips of a step on two ranks, and the share of all state that a rank holds."""
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
    """Whether rank 0 of 8, with the wrap of an answer, sends what HSDP (2 x 4) sends."""
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


def _counts_parameter_bytes(answer) -> bool | str:
    from torch import nn  # here, as below: every lesson imports this module

    models = {
        "15 numbers and 5 of float32": (nn.Linear(3, 5), 80),
        "the same in bfloat16": (nn.Linear(3, 5).bfloat16(), 40),
        "6 numbers of float64 and 14 of float32": (
            nn.Sequential(nn.Linear(2, 2).double(), nn.LayerNorm(7)),
            104,
        ),
    }
    for name, (model, expected) in models.items():
        if (got := answer(model)) != expected:
            return f"Of a model with {name}, it returns {got!r} and not {expected}."
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


def _is_smallest(answer) -> bool | str:
    cases = ((7e9, 80e9, 2), (7e9, 56e9, 2), (7e9, 8e9, 16), (1e9, 16e9, 1))
    for parameters, budget, expected in cases:
        got = answer(parameters, budget)
        if got != expected:
            called = f"Called with ({parameters:g}, {budget:g}), it returns {got!r}"
            is_power = got in [2**n for n in range(20)]
            said = "" if is_power else ", which is no power of two"
            return f"{called}{said}: it should be {expected}."
    return True


def _trains_its_shards(prepare: Callable) -> bool | str:
    """Whether `prepare(model, mesh)` shards a GPT and returns an optimizer that trains it.

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
    """Share of the parameters held; share that moved; largest error against one process."""
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
    """Whether `load(model, optimizer, folder)` reads, on 3 ranks, what 2 have saved."""
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
    """Weights and averages, put together on rank 0; looks at them without filling them."""

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
    "parameter bytes": Exercise(
        _counts_parameter_bytes,
        (
            "How many numbers has a parameter, and how many bytes has each of them?",
            "Every tensor knows both: numel() and element_size().",
        ),
    ),
    "state of 70B": Exercise(
        lambda answer: abs(answer - 4.375) < 0.05,
        (
            "Which parts of the state does stage 3 divide?",
            "All parts together take 16 bytes per parameter.",
        ),
        mistakes={
            16 * 70: "That is the whole state, undivided.",
            16 * 70e9 / 256: "The number is right, in bytes: give GB.",
            2 * 70 / 256: "That is the parameters alone, without the other two parts.",
            4 * 70 + 12 * 70 / 256: "That is stage 1, which divides one part only.",
        },
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
    "two trips": Exercise(
        _makes_two_trips,
        (
            "Which trip is one too many: of the parameters, or of the gradients?",
            "The table of settings names one that sends gradients to their owners only.",
        ),
    ),
    "ZeRO-3 chart": Exercise(
        lambda answer: abs(answer - 10) < 1e-6,
        (
            "What is the proportion of the three parts before they are divided?",
            "Stage 3 divides all three by the same number.",
        ),
        mistakes={
            15: "That is the chart's own bar.",
            60 / 12: "That is one byte's length: how many bytes has a parameter?",
            20: "That is the bar of parameters in float32, or of two parts together.",
        },
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
    "which row": Exercise(
        lambda answer: (
            answer == "fsdp2" or (WRONG_ROWS.get(answer) or "There is no such row.")
        ),
        (
            "What does each row hold beside its state?",
            "Call options(13, 16, layers=40), and compare with 70% of 40 GB.",
        ),
    ),
    "two trips, half the state": Exercise(
        _sends_as_ddp_and_holds_half,
        (
            "What makes it gather a second time?",
            "fully_shard has an option for when gathered weights are freed: read its page.",
        ),
    ),
    "traffic ratio": Exercise(
        lambda answer: abs(answer - 1.5) < 1e-6,
        (
            "Count trips over the network, for each of the two.",
            "The number of GPUs is in both, and cancels.",
        ),
        mistakes={
            1: "They would be equal if nothing were gathered a second time.",
            3: "That is the trips of FSDP2: how many has DDP?",
            2 / 3: "That is DDP in units of FSDP2.",
        },
    ),
    "smallest": Exercise(
        _is_smallest,
        (
            "How many bytes of state has a parameter at stage 3 on N GPUs?",
            "Try 1, 2, 4, ... until it fits.",
        ),
    ),
}
