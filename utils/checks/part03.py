"""Checks of the exercises of part 03: sharding."""

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim import AdamW

from utils import comms, memory
from utils.checks.exercise import Exercise, by_ranks, join, same_as, unfair
from utils.launch import run_ranks
from utils.models import GPT, GPT2_124M, SMOKE, Shape

# FSDP2, its checkpoints and fake tensors are imported where they are used: every rank
# that runs an answer of any part imports this module.

# ---------------------------------------------------------------- 01: where memory goes


def _tokens(shape, gpus, gpu_bytes, checkpointing, state_first=True) -> float:
    """Return the tokens whose activations fit beside the state, if that comes first."""
    each = memory.activation_bytes(shape, 1, checkpointing)
    state = memory.predict(shape.parameters, gpus, 3, memory.MIXED).total
    return (gpu_bytes - state * state_first) // each


def _lowers_the_peak(wrap: Callable) -> bool | str:
    """Return whether a step adds at least a fifth less than with `wrap_more`."""
    from utils.checks import sharding

    step = sharding.simulate(wrap)
    if not sharding.holds_its_share(step):
        return "A rank holds more than its share of the state."
    ratio = step.added / sharding.simulate(sharding.wrap_more).added
    return ratio < 0.8 or f"A step adds {ratio:.0%} of what it added before."


# ---------------------------------------------------------------------------- 02: FSDP2


def _tells_shards_from_copies(is_sharded: Callable) -> bool | str:
    """Return whether `is_sharded(model, optimizer, world_size)` knows what is sharded.

    Four models, each after a step: FSDP2's, a plain one, one that divides the optimizer's
    state only, and one that holds no more than its shard in all, because gradients are
    freed, while its parameters are whole.
    """
    says = partial(_says_sharded, is_sharded)
    if not says(8, is_wrapped=True):
        return "It says of a model that FSDP2 has sharded that it is not."
    if says(8):
        return "It takes a model that every rank holds whole for a sharded one."
    if says(8, trained="head"):
        return "It is content if the optimizer's state alone is divided."
    if says(2, trained="blocks.0", frees_gradients=True):
        return (
            "On two ranks, gradients freed and some averages missing, it takes whole "
            "parameters for sharded ones: the total is small enough."
        )
    return True


def _says_sharded(
    is_sharded: Callable,
    world_size: int,
    is_wrapped: bool = False,
    trained: str = "",
    frees_gradients: bool = False,
) -> bool:
    """Return what it says of a GPT after a step in which `trained` alone is trained."""
    from utils.checks import sharding

    with sharding.fake_ranks(world_size) as mesh:
        model = GPT(SMOKE)
        if is_wrapped:
            sharding.wrap_more(model, mesh)
        optimizer = AdamW(model.get_submodule(trained).parameters())
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        optimizer.step()
        if frees_gradients:
            model.zero_grad()
        return bool(is_sharded(model, optimizer, world_size))


def _takes_five_all_gathers(wrap: Callable) -> bool | str:
    from utils.checks import sharding

    step = sharding.simulate(wrap)
    calls = [step.comms.calls[name] for name in ("allgather", "reducescatter")]
    if not sharding.holds_its_share(step):
        return "A rank holds more than its share of the state."
    if calls == [5, 5]:
        return "That takes five all-gathers, but keeps its blocks: 5 reduce-scatters."
    return calls == [5, 3] or (
        f"Its step takes {calls[0]} all-gathers and {calls[1]} reduce-scatters."
    )


class _Watched:
    """A group of parameters that notes whether it would be gathered; all stay whole."""

    def __init__(self, parameters: list) -> None:
        self.cut, self.missing = parameters, len(parameters)
        self.is_whole = False
        self.too_early = ""  # the pass that began before it was gathered

    def gather(self, *_) -> None:
        self.is_whole = True

    def free(self, *_) -> None:
        self.is_whole = False

    def reduce(self, _) -> None:
        self.missing -= 1
        self.is_whole &= self.missing != 0

    def watch(self, module) -> None:
        module.register_forward_pre_hook(lambda *_: self._begins("forward"))
        module.register_full_backward_pre_hook(lambda *_: self._begins("backward"))

    def _begins(self, which: str) -> None:
        self.too_early = self.too_early or which * (not self.is_whole)


def _frees_and_reduces(add_hooks: Callable) -> bool | str:
    model, groups, taken = GPT(SMOKE), [], set()
    for module in (*model.blocks, model):
        group = _Watched([p for p in module.parameters() if p not in taken])
        add_hooks(module, group)
        group.watch(module)  # after the hooks of the answer, so called after them
        groups.append(group)
        taken.update(group.cut)
    logits = model(torch.zeros(1, 8, dtype=torch.long))
    whole = sum(group.is_whole for group in groups)
    logits.sum().backward()
    if early := [group.too_early for group in groups if group.too_early]:
        return f"A {early[0]} pass begins before its weights have been gathered."
    if any(group.missing for group in groups):
        return "Some gradients are never reduced: each rank trains for itself."
    return not whole or (
        f"Every number is right, but when the forward pass ends, a rank holds {whole} of "
        f"{len(groups)} groups whole."
    )


def _train_shards(prepare: Callable) -> tuple[float | None, float, float]:
    """Take two steps on this rank, and the same ones without sharding.

    Returns the fraction of the parameters that the rank holds (None: there is no
    optimizer), the fraction of them that has changed, and the largest error.
    """

    def build():  # in float64: Adam magnifies the rounding of small gradients
        torch.manual_seed(0)
        return GPT(SMOKE).double()

    def train(model, optimizer, tokens):
        for _ in range(2):
            logits = model(tokens).flatten(0, 1)
            F.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()

    torch.manual_seed(1)
    tokens = torch.randint(SMOKE.vocab_size, (4, SMOKE.block_size))
    model, alone, before = build(), build(), list(build().parameters())
    optimizer = prepare(model, dist.init_device_mesh("cpu", (2,)))
    if optimizer is None:
        return None, 0.0, 0.0
    held = memory.local_bytes(model.parameters()) / memory.local_bytes(before)
    train(model, optimizer, tokens[dist.get_rank() :: 2])
    train(alone, AdamW(alone.parameters(), lr=optimizer.param_groups[0]["lr"]), tokens)
    after = [_whole(p) for p in model.parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(after, before)]
    errors = [(a - b).abs().max().item() for a, b in zip(after, alone.parameters())]
    return held, sum(moved) / len(moved), max(errors)


def _trains_its_shards(found: list) -> bool | str:
    held, moved, error = found[0]
    if held is None:
        return "prepare returns no optimizer."
    if held > 0.55:
        return f"Each of two ranks holds {held:.0%} of the parameters."
    if moved == 0:
        return "After two training steps, no weight has changed."
    if moved < 1:
        return f"Two training steps have changed only {moved:.0%} of the parameters."
    if error > 1e-8:
        return "After two training steps, the weights are not those of one process."
    return True


def _resumes_elsewhere(load: Callable) -> bool | str:
    """Return whether `load(model, optimizer, folder)` reads, on 3 ranks, what 2 saved."""
    with tempfile.TemporaryDirectory() as folder:
        weights, averages = run_ranks(_save, 2, Path(folder), timeout=120)[0]
        loaded = run_ranks(_load, 3, load, Path(folder), timeout=120)[0]
    where = "Saved on 2 ranks and loaded on 3,"
    if not _same(weights, loaded[0]):
        return f"{where} the weights are not those that were saved."
    if not loaded[1]:
        return f"{where} the weights are right, but AdamW has no averages yet."
    if not _same(averages, loaded[1]):
        return f"{where} the weights are right, but AdamW's averages are not."
    return True


def _sharded(seed: int) -> tuple:
    from torch.distributed.fsdp import fully_shard

    join()
    torch.manual_seed(seed)
    model, mesh = GPT(SMOKE), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, AdamW(model.parameters())


def _save(folder: Path) -> tuple[dict, dict]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    model, optimizer = _sharded(seed=1)
    model(torch.ones(2, 64).long()).square().mean().backward()
    optimizer.step()
    weights, averages = sd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=folder)
    return _weights_and_averages(model, optimizer)


def _load(load: Callable, folder: Path) -> tuple[dict, dict]:
    model, optimizer = _sharded(seed=2)
    load(model, optimizer, folder)
    return _weights_and_averages(model, optimizer)


def _weights_and_averages(model, optimizer) -> tuple[dict, dict]:
    """Return both as whole tensors by name; looks at them without filling them."""
    names = {p: name for name, p in model.named_parameters()}
    averages = {
        f"{names[p]}.{kind}": _whole(value)
        for p, state in optimizer.state.items()
        for kind, value in state.items()
    }
    return {name: _whole(p) for p, name in names.items()}, averages


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


# ------------------------------------------------------------------- 03: DeepSpeed ZeRO


def _norms_at_stage_3(answer: Callable) -> tuple[float, float, float]:
    """Return what the answer finds, the norm of all weights, and that of this rank's."""
    from utils.zero import load_deepspeed

    os.environ["WORKSHOP_MODE"] = "smoke"  # on CPUs, even if there are GPUs
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = GPT(SMOKE)
    whole = _norm(p.detach() for p in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    with torch.no_grad():
        found = answer(engine)
    pieces = _norm(p.ds_tensor for p in engine.module.parameters())
    return float("nan") if found is None else float(found), whole, pieces


def _norm(tensors) -> float:
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def _finds_the_norm(ranks: list) -> bool | str:
    for rank, (found, whole, pieces) in enumerate(ranks):
        if abs(found - whole) < 1e-3 * whole:
            continue
        wrong = f"On rank {rank} it returns {found:.3f}, and the norm is {whole:.3f}."
        if found == 0:
            return f"{wrong} Outside of a gathering block the parameters are empty."
        if abs(found - pieces) < 1e-3 * whole:
            return f"{wrong} It is that of the pieces which this rank keeps."
        return wrong
    return True


# ------------------------------------------------------------------- 04: two dimensions


def _shards_in_nodes_of_four(wrap: Callable) -> bool | str:
    """Return whether rank 0 of 8, with an answer's wrap, sends what HSDP (2 x 4) sends."""
    from utils.checks import sharding

    # its mesh is the answer's own, which fake tensors have no values for: computed in full
    with sharding.fake_ranks(8):
        model = GPT(SMOKE)
        whole = memory.local_bytes(model.parameters())
        model = wrap(model)
        if model is None:
            return "The function returns nothing: return the wrapped model."
        held = memory.local_bytes(model.parameters())
        with comms.count_comms() as counted:
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
        and across.sent(2) == comms.allreduce_bytes(whole // 4, 2)
    ) or "The shards of the two nodes are not averaged with each other."


def _tensor_traffic(layers: int, tokens: int, width: int, ranks: int) -> float:
    """Return the bytes of four all-reduces per layer, forward and backward, in bf16."""
    return 4 * layers * 2 * (ranks - 1) / ranks * tokens * width * 2


# ------------------------------------------------------- 05: depth, length and experts


def _micro_batches(stages: int, part: float, waiting: int = -1) -> int:
    """Return the least number of micro-batches with a bubble of at most `part`."""
    return max(1, math.ceil((stages + waiting) * (1 - part) / part))


def _computes_the_same_everywhere(places: Callable) -> bool | str:
    """Return whether all ranks see as many pairs, of tokens dealt out by the answer."""
    for ranks, time in ((2, 8), (3, 24), (4, 64)):
        where = f"On {ranks} ranks, with {time} tokens,"
        dealt = [torch.as_tensor(places(n, ranks, time)).tolist() for n in range(ranks)]
        if wrong := unfair(dealt, list(range(time))):
            return f"{where} {wrong}"
        pairs = [sum(place + 1 for place in each) for each in dealt]
        if len({*pairs}) > 1:
            return f"{where} the ranks compute {pairs} pairs of a query and a key."
    return True


def _merges(merge: Callable) -> bool | str:
    """Return whether `merge` makes attention over all keys of two parts."""
    torch.manual_seed(0)
    scores, values = torch.randn(2, 3, 10).double(), torch.randn(2, 10, 4).double()
    totals = [s.logsumexp(-1, keepdim=True) for s in (scores[..., :6], scores[..., 6:])]
    parts = scores[..., :6].softmax(-1), scores[..., 6:].softmax(-1)
    first, more = parts[0] @ values[:, :6], parts[1] @ values[:, 6:]
    out, total = merge(first, totals[0], more, totals[1])
    if not torch.allclose(out, scores.softmax(-1) @ values):
        if torch.allclose(out, (first + more) / 2):
            return "The keys of both parts count alike, and those of one weigh more."
        return "The output is not that of attention over all keys."
    if not torch.allclose(total, scores.logsumexp(-1, keepdim=True)):
        return "The output is right; the total is not the logarithm of the whole sum."
    return True


# ------------------------------------------------------------- 06: choosing a strategy


def _sent_and_held(wrap: Callable) -> tuple[float, float]:
    """Return how often a step sends all parameters, and the fraction of state held."""
    model = GPT(SMOKE)
    parameters = sum(p.numel() for p in model.parameters())
    model = wrap(model, dist.init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters())
    with comms.count_comms() as counted:
        model(torch.ones(2, 64).long()).square().mean().backward()
    optimizer.step()
    held = memory.state_bytes(model, optimizer).total
    return counted.sent(2) / (2 * parameters), held / (16 * parameters)


def _sends_as_ddp_and_holds_half(found: list) -> bool | str:
    trips, held = found[0]
    if abs(held - 1 / 2) > 0.01:
        return f"A rank of two holds {held:.0%} of the state."
    if trips < 1.99:
        return f"A step makes {trips:.2f} trips, so some gradients are not reduced."
    return trips < 2.01 or f"A rank holds half, but a step makes {trips:.2f} trips."


def _tokens_that_hide(shape: Shape, gpus: int, length: int, **mistake: float) -> int:
    """Return for how many tokens computing takes as long as what fsdp2 sends."""
    from utils import timing

    right = {
        "passes": (gpus - 1) / gpus,
        "bandwidth": timing.h100_ring(gpus).bandwidth,
        "used": shape.layers * shape.block + shape.vocabulary * shape.width,
        "attention": 12 * shape.layers * shape.width * length,
    }
    passes, bandwidth, used, attention = (right | mistake).values()
    seconds = 8 * shape.parameters * passes / bandwidth  # 2, 2 and 4 bytes each
    rate = timing.PEAK_FLOPS["H100"] / 2
    return math.ceil(seconds * rate / (6 * used + attention))


def _is_the_row_of_hpz(answer) -> bool | str:
    """Return whether it is hpZ's `Strategy`, or a tuple of its nine fields."""
    framework, stage, state, each, once, kept, near, nodes, tensor = answer
    if framework != "DeepSpeed" or stage != 3 or tuple(state) != memory.MIXED:
        as_fsdp2 = " With DeepSpeed it is MIXED." if state == memory.FP32 else ""
        return f"It should be DeepSpeed's, with the state of zero3.{as_fsdp2}"
    if sorted(each) == [2, 2, 2] and not near:
        return "That is zero3: here the backward pass gathers inside the node."
    if (sorted(each), list(once), near) != ([2, 2], [], 2) or nodes or tensor != 1:
        return "What does every pass send over all GPUs, and what inside a node?"
    if not kept:
        return "The second copy takes memory, too."
    return abs(kept - 2 / 8) < 1e-9 or f"It keeps {kept:g} bytes of each parameter?"


_LLAMA = Shape(32, 4096, 14_336, 32, 8, 128_256)  # Llama 3 8B

EXERCISES = {
    # 03-fsdp-deepspeed/01_where_memory_goes.ipynb
    "tokens that fit": Exercise(
        same_as(
            lambda *case: max(0, _tokens(*case)),
            *((_LLAMA, 8, 80e9, how) for how in ("none", "full")),
            *((GPT2_124M.shape, 1, 8e9, how) for how in ("none", "full")),
            (_LLAMA, 1, 80e9, "none"),
        ),
        (
            "How many bytes of a GPU does the state leave for activations?",
            "Activations grow with the tokens: how many bytes does one token take?",
        ),
        mistakes={
            partial(_tokens, state_first=False): "The state takes some of this room.",
            lambda shape, gpus, room, _: max(0, _tokens(shape, gpus, room, "none")): (
                "With checkpointing, more tokens fit."
            ),
            _tokens: "On one GPU the state alone does not fit: return 0.",
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
        same_as(
            lambda stage, n: sum(4 / n if stage >= first else 4 for first in (1, 2, 3)),
            *((stage, n) for stage in range(4) for n in (1, 2, 8)),
        ),
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
        by_ranks(_train_shards, _trains_its_shards, 2),
        (
            "Compare optimizer.param_groups[0]['params'] with list(model.parameters()).",
            "What does fully_shard do to the parameters of a model?",
        ),
    ),
    "the missing hook": Exercise(
        _frees_and_reduces,
        "A group is gathered, freed, gathered, reduced: who frees it the first time?",
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
        by_ranks(_norms_at_stage_3, _finds_the_norm, 2),
        (
            "Between uses a parameter is empty. What puts it together, and on which ranks?",
            "GatheredParameters takes a list of parameters, too. Who has to enter it?",
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
        same_as(_tensor_traffic, (4, 384, 64, 2), (32, 8192, 4096, 8)),
        (
            "How many all-reduces has a block, forward and backward?",
            "An all-reduce is two trips of (N - 1) / N of an activation, in bf16 here.",
        ),
        mistakes={
            lambda *case: _tensor_traffic(*case) / 2: (
                "That is half of what is sent. The backward pass has two as well, and an "
                "all-reduce is two trips."
            ),
            lambda *case: _tensor_traffic(*case) / 4: (
                "That is a quarter of what is sent. Count the backward pass, and two "
                "trips for each all-reduce."
            ),
            lambda *case: _tensor_traffic(*case) * 2: (
                "Activations are in bf16 here, not in float32."
            ),
        },
    ),
    "two nodes of four": Exercise(
        _shards_in_nodes_of_four,
        (
            "fully_shard shards over the last dimension, and replicates over the first.",
            "The last dimension of a mesh runs over neighbours.",
        ),
    ),
    # 03-fsdp-deepspeed/05_depth_length_experts.ipynb
    "micro-batches": Exercise(
        same_as(_micro_batches, (4, 1 / 4), (5, 0.3), (8, 1 / 8), (2, 1 / 2)),
        (
            "(stages - 1) / (number + stages - 1) is at most part: solve for the number.",
            "A number of micro-batches is whole: round up.",
        ),
        mistakes={
            partial(
                _micro_batches, waiting=0
            ): "A rank waits for all stages but its own.",
            lambda stages, part: int((stages - 1) * (1 - part) / part): (
                "Rounded down, the bubble is a little too large."
            ),
        },
    ),
    "who computes most": Exercise(
        _computes_the_same_everywhere,
        (
            "The first token sees one key, the last sees all: what if one rank has both?",
            "Cut the text into 2 x ranks parts, and give each rank two of them.",
        ),
    ),
    "add to a softmax": Exercise(
        _merges,
        (
            "torch.logaddexp adds two sums whose logarithms you have.",
            "Each output was divided by its own sum: by which factor is that too little?",
        ),
    ),
    # 03-fsdp-deepspeed/06_choosing_a_strategy.ipynb
    "two trips, half the state": Exercise(
        by_ranks(_sent_and_held, _sends_as_ddp_and_holds_half, 2),
        (
            "What makes it gather a second time?",
            "fully_shard has an option for when gathered weights are freed: read its page.",
        ),
    ),
    "tokens that hide": Exercise(
        same_as(
            _tokens_that_hide,
            (_LLAMA, 64, 8192),
            (Shape(80, 8192, 28_672, 64, 8, 128_256), 8, 8192),
            (Shape(24, 2048, 8192, 16, 16, 50_257, gated=False), 512, 16_384),
        ),
        (
            "How many seconds do 8 bytes per parameter take, over the ring of all GPUs?",
            "How many FLOPs has a token: 6 for each used parameter, and attention's?",
        ),
        mistakes={
            partial(_tokens_that_hide, attention=0): "Attention computes, too.",
            partial(_tokens_that_hide, passes=1): (
                "Of N GPUs each gets (N - 1)/N of the weights from others."
            ),
            partial(_tokens_that_hide, bandwidth=450e9): (
                "Across nodes the network cards decide."
            ),
            lambda shape, *case: _tokens_that_hide(
                shape, *case, used=shape.parameters
            ): "An embedding that is looked up computes nothing.",
        },
    ),
    "add a row": Exercise(
        _is_the_row_of_hpz,
        (
            "It is zero3 but for one all-gather, and for what stays on the GPU.",
            "Compare the rows of fsdp2 and fsdp2-near.",
        ),
    ),
}
