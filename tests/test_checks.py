"""A wrong answer gets its name or a hint, whatever it is; never a traceback."""

import functools
import re
import sys
import types
from typing import NamedTuple

import cloudpickle
import nbformat
import numpy as np
import pandas as pd
import pytest
import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.tools import notebooks
from utils import checks, memory, timing
from utils.checks import moving
from utils.checks.exercise import Exercise, by_ranks, cases, has_timed_out, join
from utils.errors import BadInput
from utils.launch import run_ranks
from utils.models import Shape

# else each rank would import this module, and with it pytest
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_wrong_answer_yet():
    checks._wrong_answers.clear()


@pytest.fixture
def reply(monkeypatch, capsys):
    """Return what `check` says of an answer to an exercise that only the tests have."""

    def to(answer, exercise=None):
        simple = Exercise(lambda answer: answer == 64, "Two ranks, 32 each.")
        monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise or simple})
        assert checks.check("01.1", answer) is None
        return capsys.readouterr().out

    return to


def test_right_answer(reply):
    assert reply(64) == "Right!\n"
    assert reply(torch.tensor(64)) == "Right!\n"


def test_wrong_answer_gets_the_hint(reply):
    assert reply(32) == "Not yet. Two ranks, 32 each.\n"
    assert reply(None) == "Not yet. Two ranks, 32 each.\n"


def test_answer_that_raises_gets_the_hint(reply):
    printed = reply(torch.zeros(2))  # two booleans are not one
    assert printed.startswith("Not yet (RuntimeError: ")
    assert printed.endswith("Two ranks, 32 each.\n")
    assert printed.count("\n") == 1


def test_no_answer_yet(reply):
    def untouched(items, rank=0): ...

    for answer in (..., untouched):
        assert "replace the three dots" in reply(answer)
    assert "Not yet" in reply(lambda items: items)


def test_each_wrong_answer_gets_the_next_hint(reply):
    hints = ("How many ranks?", "Two ranks.")
    exercise = Exercise(lambda answer: answer == 64, hints, {32: "One rank."})
    assert reply(32, exercise) == "Not yet. One rank.\n"  # named: that is enough
    assert reply(32, exercise) == "Not yet. One rank. How many ranks?\n"
    assert reply(7, exercise) == "Not yet. Two ranks.\n"
    assert reply(7, exercise) == "Not yet. Two ranks.\n"
    assert reply(64, exercise) == "Right!\n"


def test_the_case_that_fails_is_named_and_a_known_mistake_is(reply):
    mistakes = {lambda a, b: a + b: "That is the sum."}
    exercise = Exercise(cases(((2, 2), 4), ((4, 0.5), 2)), "Multiply.", mistakes)
    assert reply(lambda a, b: 4, exercise) == (
        "Not yet. Called with (4, 0.5), it returns 4 and not 2.\n"
    )
    assert "That is the sum." in reply(lambda a, b: b + a, exercise)
    assert "it returns None and not 4" in reply(lambda a, b: print(end=""), exercise)
    assert reply(lambda a, b: a * b, exercise) == "Right!\n"


def test_lists_are_compared_number_by_number():
    judge = cases(((), [0.1, 2]))
    assert judge(lambda: (0.1 + 1e-9, 2)) is True
    for wrong in ([0.1], [0.1, 2, 3], [2, 0.1], 0.1, None):
        assert "and not [0.1, 2]" in judge(lambda wrong=wrong: wrong)


def test_unknown_exercise_names_those_there_are(reply):
    reply(64)
    with pytest.raises(BadInput, match=r"No exercise '9\.9': choose from 01\.1\."):
        checks.check("9.9", 1)


def all_reduce_unless(rank):
    return dist.get_rank() if dist.get_rank() == rank else one_all_reduce()


def one_all_reduce():
    dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def test_answers_that_hang_are_told_which_rank_stands_still(reply):
    exercise = Exercise(
        by_ranks(lambda answer: answer(), lambda found: found == [0, 1], 2, seconds=2),
        "Call it on all ranks.",
    )
    assert reply(one_all_reduce, exercise) == "Right!\n"
    assert reply(functools.partial(all_reduce_unless, 0), exercise) == (
        "Not yet. Rank 1 stands in a collective that not all ranks call.\n"
    )
    wrong_on_ranks = reply(lambda: 1 / 0, exercise)
    assert wrong_on_ranks.startswith("Not yet (RuntimeError: rank 0 failed with Zero")


def what_a_rank_alone_sees(operations):
    join(seconds=2)
    if dist.get_rank():
        return []  # it stays connected until all have returned
    begun = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(operations)]
    errors = []
    for request in begun:
        try:
            request.wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_rank_alone_stands_still_whichever_operation_timed_out_first():
    errors = run_ranks(what_a_rank_alone_sees, 2, 4)[0]
    assert len({text.rpartition("]")[2] for text in errors}) > 1  # gloo has two texts
    assert [has_timed_out(RuntimeError(text)) for text in errors] == [True] * 4
    assert not has_timed_out(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# ------------------------------------------------------ wrong answers to the exercises


def one_by_one(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def sum_at_once(model, divide_by=1, put_back=True):
    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        if put_back:
            p.grad = piece.view_as(p) / divide_by


def summed_over_images(model, x, y):
    F.cross_entropy(DDP(model)(x), y, reduction="sum").backward()


def sent_each_time(model, parts):
    for x, y in parts:
        (F.cross_entropy(model(x), y) / len(parts)).backward()


def never_sent(model, parts):
    with model.no_sync():
        sent_each_time(model, parts)


def forward_outside(model, parts):
    """Call the forward passes outside of `no_sync`, which then has no effect."""
    for x, y in parts:
        loss = F.cross_entropy(model(x), y) / len(parts)
        with model.no_sync():
            loss.backward()


def losses_added(model, parts):
    """Do it right, and send once, but begin backward when all parts are forward."""
    sum(F.cross_entropy(model(x), y) / len(parts) for x, y in parts).backward()


def summed(value):
    dist.all_reduce(value)
    return value if dist.get_rank() == 0 else None


def on_all_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def my_batches(batches):
    rank, n = dist.get_rank(), dist.get_world_size()
    return [batch for number, batch in enumerate(batches) if number % n == rank]


def but_the_first(batches):
    rank, n = dist.get_rank(), dist.get_world_size()
    return list(batches)[1 + rank :: n]


def of_this_rank(counts):
    return counts[0] / counts[1]


def mean_of_ranks(counts):
    return on_all_ranks(counts[0] / counts[1])


def over_the_sums(counts):
    dist.all_reduce(counts)
    return counts[0] / counts[1]


def accuracy(batches, mine=my_batches, reduce=over_the_sums):
    counts = torch.zeros(2)  # right, all
    for batch in mine(batches):
        right = (batch["digit"] == batch["label"]).sum()
        counts += torch.tensor([right, len(batch["label"])])
    return reduce(counts).item()


def sums_every_batch(batches):
    return sum(accuracy([batch] * 3) for batch in my_batches(batches))


def unequal(seen, images):
    return range(seen % images, images)[dist.get_rank() :: dist.get_world_size()]


def from_the_start(seen, images):
    return range(images)[dist.get_rank() :: dist.get_world_size()]


def pack(*parts):
    return [getattr(part, "state_dict", lambda part=part: part)() for part in parts]


def unpack_without(*left_out):
    """Load all that `pack` saved, but what is left out."""

    def load(state, **parts):
        for (name, part), saved in zip(parts.items(), state):
            if name not in left_out:
                part.load_state_dict(saved)
        return 0 if "seen" in left_out else state[-1]

    return pack, lambda state, model, optimizer, schedule: load(
        state, model=model, optimizer=optimizer, schedule=schedule
    )


def per_text(own):
    """Return the right answer: every text of all ranks counts the same."""
    texts = torch.tensor(float(len(own)))
    dist.all_reduce(texts)
    return [dist.get_world_size() / texts.item() / targets for targets in own]


def from_rank_0(flag):
    flags = torch.tensor(float(flag))
    dist.broadcast(flags, src=0)
    return flags.item() > 0


ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


def runs_until(ended=ENDS, again=("FAILED",), tries=None):
    """Submit until a job has succeeded; each argument is a place for a mistake."""

    def run(submit, status, limit):
        for _ in range(tries or limit):
            job = submit()
            while (state := status(job)) not in ended:
                pass
            if state not in again:
                break
        return state == "SUCCEEDED"

    return run


class MakesItAgain:
    """The table is made for every batch."""

    def __init__(self, make_table):
        self.make_table = make_table

    def __call__(self, batch):
        return {"square": self.make_table()[batch["label"]]}


def shards(model, mesh, **options):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **options)  # frees each block after forward
    return model


def does_nothing_to(model, mesh):
    return model


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def merged(out, total, more, more_total):
    whole = torch.logaddexp(total, more_total)
    return out * (total - whole).exp() + more * (more_total - whole).exp()


def hooks_but(missing):
    """Return the hooks of sharding by hand without one of them."""

    def add_hooks(module, group):
        hooks = {
            "gather": (module.register_forward_pre_hook, group.gather),
            "free": (module.register_forward_hook, group.free),
            "gather again": (module.register_full_backward_pre_hook, group.gather),
        }
        for name, (register, hook) in hooks.items():
            if name != missing:
                register(hook)
        for parameter in group.cut if missing != "reduce" else ():
            parameter.register_post_accumulate_grad_hook(group.reduce)

    return add_hooks


def optimizer_in_between(model, mesh):
    """Make the optimizer when the blocks are sharded, and the rest is not."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    optimizer = adamw(model)
    fully_shard(model, mesh=mesh)
    return optimizer


def each_rank_for_itself(model, mesh):
    return adamw(shards(model, mesh), betas=(0.5, 0.999))


def loads_weights(model, optimizer, folder):
    state = {"model": sd.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    sd.set_model_state_dict(model, state["model"])


def resets_averages(model, optimizer, folder):
    loads_weights(model, optimizer, folder)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()


def norm_outside(engine):
    return torch.stack([p.norm() for p in engine.module.parameters()]).norm()


def norm_of_pieces(engine):
    return torch.stack([p.ds_tensor.norm() for p in engine.module.parameters()]).norm()


def norm_on_rank_0(engine):
    import deepspeed

    if dist.get_rank() == 0:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            return norm_outside(engine)
    return 0.0


def the_wrong_way_round(model):
    """Shard in pairs, with replicas on both nodes: HSDP, the wrong way round."""
    names = ("replicate", "shard")
    return fully_shard(
        model, mesh=dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=names)
    )


def decays(spared, twice=False):
    """Split parameters by name: those that contain one of `spared` do not decay."""

    def groups(model, decay):
        named = dict(model.named_parameters())
        free = [n for n in named if any(part in n for part in spared)]
        rest = list(named) if twice else [n for n in named if n not in free]
        return [
            {"params": [named[n] for n in names], "weight_decay": value}
            for names, value in ((rest, decay), (free, 0.0))
        ]

    return groups


BUGS = {"A": "one left out", "B": "sum", "C": "rounded", "D": "right"}
MIXED, FP32 = memory.MIXED, memory.FP32
NUMBERS = 236_928  # parameters of the small GPT
ALL_ROWS = {"tree_learner": "data_parallel"}


# For each sentence that is not in an exercise's `mistakes`, and that no lesson has
# recorded for the code it starts from: an answer that gets it.
def hpz(**changes):
    """Return the fields of the row of hpZ, with some that are wrong."""
    fields = {"framework": "DeepSpeed", "stage": 3, "state": MIXED, "each": (2, 2)}
    fields |= {"once": (), "kept": 2 / 8, "near": 2, "nodes": 0, "tensor": 1}
    return tuple((fields | changes).values())


WRONG = {
    "split a batch": {
        "Every worker gets the whole batch": lambda batch, rank, n: batch,
        "is a `return` missing": lambda batch, rank, n: batch.sort(),
        "a list of them": lambda batch, rank, n: batch[rank],
        "not their positions": lambda batch, rank, n: range(rank, len(batch), n),
        "nobody gets 7 of them": lambda batch, rank, n: batch[rank : rank + 4],
        "4 are dealt out more than": lambda batch, rank, n: batch[rank * 4 :][:8],
        "get [9, 3] of": lambda batch, rank, n: batch[9:] if rank else batch[:9],
    },
    "find the bug": {
        "Give a dictionary": "D",
        "['twice'] is none of the words": BUGS | {"B": "twice"},
        "C is something else. It passes in": BUGS | {"C": "right", "D": "rounded"},
    },
    "one all-reduce": {
        "took 4 all-reduces": one_by_one,
        "forgot the number of workers": sum_at_once,
        "put the averages back": functools.partial(sum_at_once, put_back=False),
        "On 3 ranks": functools.partial(sum_at_once, divide_by=2),
    },
    "averaged by DDP": {
        "not the averages": summed_over_images,
        "On 2 ranks": lambda model, x, y: DDP(model)(x),  # nothing goes backward
    },
    "share": {
        "nobody gets 1 of": lambda i, rank, n: range(
            i // n * rank, i // n * (rank + 1)
        ),
        "not unbroken": lambda i, rank, n: range(rank, i, n),
        "get [6, 1]": lambda i, rank, n: [i - n + rank] if rank else range(i - n + 1),
    },
    "mean loss": {"Called with ([6.0, 2.0], [3, 1])": lambda sums, counts: sum(sums)},
    "send once": {
        "took 3 all-reduces": sent_each_time,
        "Nothing was all-reduced": never_sent,
        "not the averages": lambda model, parts: sent_each_time(model, parts[-1:]),
        "takes 6 images forward": losses_added,
        "": forward_outside,
    },
    "complete checkpoint": {
        "weights are not in it": lambda m, o, s: {"optimizer": o.state_dict()},
        "schedule of the learning rate": lambda m, o, s: {
            "model": m.state_dict(),
            "optimizer": o.state_dict(),
        },
    },
    "a run that ends": {
        "Rank 0 returns nothing": lambda value: print(end=""),
        "forgot the number of workers": summed,
        "Only rank 0": on_all_ranks,
        "rank 0 returns 1.0": lambda value: value,
    },
    "all at once": {
        "It waits": lambda task, inputs: [ray.get(task.remote(x)) for x in inputs],
        "returns references": lambda task, inputs: [task.remote(x) for x in inputs],
    },
    "tree sum": {
        "4 rounds and not 3": lambda add, refs: functools.reduce(add.remote, refs),
        "up to 1": lambda add, refs: functools.reduce(add.remote, refs[:2]),
    },
    "mean of ranks": {
        "over both ranks": [[2.0, 1.0], [2.0, 1.0]],
        "nothing has been sent": [[1, 0], [1, 1]],
    },
    "your train_fn": {
        "rank 0 alone": {"weight": 0.52, "bias": 1.0},
        "rank 1 alone": {"weight": 1.72, "bias": 2.28},
        "at x = 1 at 0.63": {"weight": 0.52, "bias": 0.11},
        "return something": None,
    },
    "each row once": {
        "2 of them look at the same": functools.partial(accuracy, mine=list),
        "not the same": functools.partial(accuracy, reduce=of_this_rank),
        "it returns 0.560": functools.partial(accuracy, reduce=mean_of_ranks),
        "none of them looks at batch 0": functools.partial(
            accuracy, mine=but_the_first
        ),
        "stands in a collective": sums_every_batch,
        "return a number": lambda batches: print(end=""),
    },
    "label counts": {
        "[10] and not [1, 10]": lambda batch: {
            "counts": np.bincount(batch["label"], minlength=10)
        },
    },
    "made once": {"is made 3 times": MakesItAgain},
    "whole checkpoint": {
        "the weights are not those": unpack_without("model"),
        "AdamW's averages are not": unpack_without("optimizer"),
        "after the restart, images 0": unpack_without("seen"),
    },
    "share what is left": {
        "get [4, 3] of them": unequal,
        "5 images seen, 12 per epoch: 0 is dealt out": from_the_start,
        "nobody gets 12 of them": lambda seen, images: [],
    },
    "stop together": {
        "another waits for it": lambda flag: flag,
        "If no rank asks": lambda flag: True,
        "they end after [4, 4, 4]": from_rank_0,
    },
    "runtime env": {"it returns": lambda code, storage: {"working_dir": code}},
    "all share": {"its own for rank 0": lambda folder: folder.exists()},
    "run to the end": {
        "a hundred times": runs_until(ended=("SUCCEEDED",)),
        "still runs": runs_until(ended=(*ENDS, "RUNNING")),
        "as STOPPED": runs_until(again=("FAILED", "STOPPED")),
        "submits 1 and returns False": runs_until(again=()),
        "with 2 tries": runs_until(tries=5),
    },
    "sgd": {"Called with (0, 2), it returns 6 and not 12": lambda stage, n: 12 / n},
    "smaller groups": {
        "of what it added before": shards,
        "more than its share": does_nothing_to,
    },
    "is it sharded": {
        "that FSDP2 has sharded": lambda m, o, n: False,
        "holds whole for": lambda m, o, n: True,
        "optimizer's state alone": lambda m, o, n: (
            memory.state_bytes(m, o).optimizer <= 1.1 * 8 * NUMBERS / n
        ),
        "the total is small enough": lambda m, o, n: (
            memory.state_bytes(m, o).total <= 1.05 * 16 * NUMBERS / n
        ),
    },
    "five all-gathers": {
        "keeps its blocks": functools.partial(shards, reshard_after_forward=False),
        "9 all-gathers and 5 reduce-scatters": shards,
        "more than its share": does_nothing_to,
    },
    "trains its shards": {
        "returns no optimizer": lambda model, mesh: print(end=""),
        "holds 100%": lambda model, mesh: adamw(model),
        "changed only": optimizer_in_between,
        "not those of one process": each_rank_for_itself,
    },
    "the missing hook": {
        "holds 5 of 5 groups whole": hooks_but("free"),
        "A backward pass begins before": hooks_but("gather again"),
        "A forward pass begins before": hooks_but("gather"),
        "never reduced": hooks_but("reduce"),
    },
    "another world size": {
        "weights are not those": lambda m, o, folder: sd.get_state_dict(m, o),
        "no averages yet": loads_weights,
        "averages are not": resets_averages,
    },
    "norm of weights": {
        "parameters are empty": norm_outside,
        "the pieces which this rank keeps": norm_of_pieces,
        "stands in a collective": norm_on_rank_0,
        "On rank 0 it returns 1.000, and the norm is": lambda engine: 1.0,
    },
    "two nodes of four": {
        "holds 1/2": the_wrong_way_round,
        "returns nothing": lambda model: print(end=""),
    },
    "who computes most": {
        "compute [10, 26] pairs": lambda rank, ranks, time: torch.arange(time).chunk(
            ranks
        )[rank],
        "nobody gets 4": lambda rank, ranks, time: torch.arange(time).chunk(2 * ranks)[
            rank
        ],
    },
    "add to a softmax": {
        "those of one weigh more": lambda out, total, more, more_total: (
            (out + more) / 2,
            torch.logaddexp(total, more_total),
        ),
        "not that of attention": lambda out, total, more, more_total: (out, total),
        "logarithm of the whole": lambda out, total, more, more_total: (
            merged(out, total, more, more_total),
            total + more_total,
        ),
    },
    "two trips, half the state": {
        "holds half, but a step makes 2.84 trips": shards,
        "holds 100%": does_nothing_to,
    },
    "add a row": {
        "gathers inside the node": hpz(each=(2, 2, 2), near=0),
        "it is MIXED": hpz(state=FP32),
        "what inside a node": hpz(each=(2,)),
        "takes memory": hpz(kept=0),
        "keeps 2 bytes": hpz(kept=2),
    },
    "epochs that save": {
        "(7, 3, True), it returns [3, 6]": lambda n, every, end: [3, 6],
    },
    "epochs if all wait": {
        "(12, 9, (1, 3), 3), it returns 108": lambda n, most, rungs, factor: n * most,
    },
    "what decays": {
        "The decay of token is 0.0, and should": decays(("bias", "block.1", "token")),
        "block.0.bias is in 2 groups": decays(("bias",), twice=True),
    },
    "one curve": {"[3.0, 2.25, 2.5, 2.0]": lambda points: [v for _, _, v in points]},
    "one model of all workers": {
        "parameters that came are lost": lambda params, network: ALL_ROWS | network,
        "do not find each other": lambda params, network: params | ALL_ROWS,
        "would train alone": lambda params, network: params | ALL_ROWS | network,
    },
    "each text the same": {
        "counts 0.67, 2.00 times what": lambda own: [1 / x / len(own) for x in own],
        "0.5 times too much": lambda own: [scale / 2 for scale in per_text(own)],
        "two texts of the same rank": lambda own: [per_text(own)[0]] * len(own),
        "3 texts and gets 1 numbers": lambda own: per_text(own)[:1],
    },
    "name the mistake": {"Give a dictionary": "clipping"},
    "move it alone": {"returns something of type int": lambda: 2},
}
# Those that take longest: they start DeepSpeed, or three sets of ranks.
LONG = {"norm of weights", "another world size", "stop together"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.weekly] * (n in LONG)) for n in WRONG]
)
def test_a_wrong_answer_gets_its_sentence(name, capsys):
    for sentence, answer in WRONG[name].items():
        checks._wrong_answers.clear()
        checks.check(name, answer)
        printed = capsys.readouterr().out
        assert printed.startswith("Not yet. ") and sentence in printed, sentence


KNOWN = {n: each.mistakes for n, each in checks.EXERCISES.items() if each.mistakes}


@pytest.mark.parametrize("name", KNOWN)
def test_a_typical_mistake_gets_the_sentence_that_its_exercise_has(name, capsys):
    for mistake, sentence in KNOWN[name].items():
        checks._wrong_answers.clear()
        checks.check(name, mistake)
        assert capsys.readouterr().out == f"Not yet. {sentence}\n"


def cells(stem):
    """Return the code of a notebook by the ids of its cells."""
    [path] = [
        p for p in notebooks.all_notebooks() if f"{p.parent.name}/{p.stem}" == stem
    ]
    found = nbformat.read(path, as_version=4).cells
    return {cell.id: cell.source for cell in found if cell.cell_type == "code"}


def test_the_row_of_hpz_changes_no_choice_of_the_lesson():
    """As its solution says; and the lesson's `choose` says what no table shows."""
    lesson = cells("03-fsdp-deepspeed/06_choosing_a_strategy")
    names = {"NamedTuple": NamedTuple, "partial": functools.partial, "pd": pd}
    names |= {"Shape": Shape, "memory": memory, "timing": timing}
    for name in ("models", "rows", "held", "hide", "sending", "largest", "options"):
        exec(lesson[f"c5-{name}"], names)
    exec(lesson["c5-choose"], names)
    exec(lesson["c5-cases"].partition("\n\n\ndef choices")[0], names)
    choose, ways = names["choose"], names["STRATEGIES"]

    def chosen():
        cases = names["CASES"].values()
        tables = [
            choose(names["MODELS"][model], gpus, 80, batch, length, "DeepSpeed")
            for model, gpus, batch, length in cases
        ]
        return [
            tuple(table.iloc[-1][["strategy", "checkpointing", "verdict"]])
            for table in tables
            if table.iloc[-1]["verdict"] == "take it"
        ]

    before = chosen()
    ways["zero3-near"] = names["Strategy"](*hpz())
    assert chosen() == before
    everything = choose(Shape(1, 1, 1, 1, 1, 1), 8, 80, 8 * 4096, 4096)
    assert list(everything["verdict"]) == ["take it"]
    # short passes of a large model over many GPUs: what is kept nearby pays
    short = choose(names["MODELS"]["Llama 3 70B"], 512, 640, 512 * 1024, 1024)
    assert short.iloc[-1]["strategy"] in ("fsdp2-keep", "fsdp2-near")


# A line of the solution of the last exercise, what a reader writes instead, and what
# the check says.
MOVED = [
    ("manual_seed(0)", "manual_seed(1)", "first weights are not those of the script"),
    ("momentum=0.9", "momentum=0.0", "not that of the script, SGD with momentum 0.9"),
    ("which_way.BATCH_SIZE // world_size", "32 // world_size", "takes [32] texts"),
    ("torch.rand(len(texts)) < 0.5", "texts[:, 0] > 99", "turned around by chance"),
    (" * min(1, optimizer.seen / 1024)", "", "has the learning rates [0.3, "),
    ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "", "not clipped"),
]


def moved(line="", instead=""):
    """Return the solution's `my_move`, with something else in place of a line."""
    sys.modules.pop("which_way", None)
    solutions = cells("03-fsdp-deepspeed/solutions")
    names = ("cell-01", "s6-move-code", "s6-step-code")
    source = "\n".join(solutions[name] for name in names)
    source = source.partition('check("move it alone"')[0]
    assert line in source
    module = types.ModuleType("solution")
    exec(source.replace(line, instead) if line else source, vars(module))
    return module.my_move


@pytest.fixture
def in_part_3(monkeypatch):
    folder = notebooks.ROOT / "03-fsdp-deepspeed"
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.weekly
@pytest.mark.parametrize(("line", "instead", "expected"), MOVED)
def test_a_moved_script_that_trains_something_else_is_seen(
    line, instead, expected, in_part_3
):
    training = moved(line, instead)()
    assert expected in run_ranks(moving._trains_the_script, 1, training)[0]


@pytest.mark.weekly
def test_a_moved_script_is_judged_by_the_tool(in_part_3, capsys):
    checks.check("move it alone", moved("world_size, rank, drop", "1, 0, drop"))
    assert "The tool says items: every rank sees every item" in capsys.readouterr().out


def checked(notebook) -> dict[str, str]:
    """Return the exercises that the cells of a notebook check, and what was printed."""
    found = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            printed = "".join(output.get("text", "") for output in cell.outputs)
            for name in re.findall(r'^check\(\s*"([^"]+)"', cell.source, re.MULTILINE):
                found[name] = printed
    return found


def test_every_exercise_is_asked_and_solved_and_has_a_wrong_answer():
    """What starters and solutions print is compared when their notebooks are executed."""
    asked, solved = {}, {}
    for path in notebooks.all_notebooks() + notebooks.electives():
        (solved if path.stem == "solutions" else asked).update(checked(path))
    assert asked.keys() == solved.keys() == checks.EXERCISES.keys()
    assert all(printed.endswith("Right!\n") for printed in solved.values())
    assert not any("Right" in printed for printed in asked.values())
    assert WRONG.keys() | KNOWN.keys() == checks.EXERCISES.keys()


def test_no_hint_is_the_answer():
    compared = 0
    for path in notebooks.all_notebooks() + notebooks.electives():
        if path.stem != "solutions":
            continue
        source = "\n".join(notebooks.code(path))
        for name, text in re.findall(
            r'^check\("([^"]+)", ([\d_ */+()-]+)\)$', source, re.M
        ):
            answer = f"{eval(text):.12g}"
            exercise = checks.EXERCISES[name]
            if name == "accumulation":
                continue  # the answer is 8, and there are 8 GPUs
            for sentence in (*exercise.hint, *exercise.mistakes.values()):
                numbers = [n.strip(".,") for n in re.findall(r"[\d.,]+", sentence)]
                assert answer not in [n.replace(",", "") for n in numbers], sentence
            compared += 1
    assert compared > 14
