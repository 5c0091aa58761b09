"""A wrong answer gets its name or a hint, whatever it is; never a traceback."""

import functools
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
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

from tests import odd_programs
from tests.tools import notebooks
from tests.tools.notebooks import progress as shown
from tests.tools.notebooks.__main__ import main as command_line
from utils import checks, comms, memory, timing
from utils.checks import moving
from utils.checks.exercise import cases, join, stands_still
from utils.errors import BadInput
from utils.launch import run_ranks

FIRST = notebooks.all_notebooks()[0]
ALL_EXERCISES = dict(checks.EXERCISES)


@pytest.fixture(autouse=True)
def one_exercise(monkeypatch):
    exercise = checks.Exercise(lambda answer: answer == 64, "Two ranks, 32 each.")
    monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise})
    checks._wrong_answers.clear()


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return the file for what is solved, in a folder that is not there yet."""
    monkeypatch.delenv("WORKSHOP_PROGRESS")
    monkeypatch.setattr(
        checks.progress, "RECORD", tmp_path / "build" / "progress.jsonl"
    )
    return checks.progress.RECORD


def reply(answer, capsys):
    assert checks.check("01.1", answer) is None
    return capsys.readouterr().out


def test_right_answer(capsys):
    assert reply(64, capsys) == "Right!\n"
    assert reply(torch.tensor(64), capsys) == "Right!\n"


def test_wrong_answer_gets_the_hint(capsys):
    assert reply(32, capsys) == "Not yet. Two ranks, 32 each.\n"
    assert reply(None, capsys) == "Not yet. Two ranks, 32 each.\n"


def test_answer_that_raises_gets_the_hint(capsys):
    said = reply(torch.zeros(2), capsys)  # two booleans are not one
    assert said.startswith("Not yet (RuntimeError: ")
    assert said.endswith("Two ranks, 32 each.\n")
    assert said.count("\n") == 1


def test_no_answer_yet(capsys):
    def untouched(items, rank=0): ...

    def wrong(items):
        return items

    for answer in (..., untouched):
        assert "replace the three dots" in reply(answer, capsys)
    assert "Not yet" in reply(wrong, capsys)


def test_each_wrong_answer_gets_the_next_hint(monkeypatch, capsys):
    exercise = checks.Exercise(
        lambda answer: answer == 64,
        ("How many ranks?", "Two ranks."),
        {32: "One rank."},
    )
    monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise})
    assert reply(32, capsys) == "Not yet. One rank.\n"  # named: that is enough
    assert reply(32, capsys) == "Not yet. One rank. How many ranks?\n"
    assert reply(7, capsys) == "Not yet. Two ranks.\n"
    assert reply(7, capsys) == "Not yet. Two ranks.\n"
    assert reply(64, capsys) == "Right!\n"


def test_the_case_that_fails_is_named(monkeypatch, capsys):
    exercise = checks.Exercise(cases(((2, 3), 6), ((4, 5), 20)), "Multiply.")
    monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise})
    wrong = reply(lambda a, b: 6, capsys)
    assert wrong == "Not yet. Called with (4, 5), it returns 6 and not 20.\n"
    assert reply(lambda a, b: a * b, capsys) == "Right!\n"


def test_unknown_exercise_names_those_there_are():
    with pytest.raises(BadInput, match=r"No exercise '9\.9': choose from 01\.1\."):
        checks.check("9.9", 1)


def test_what_is_tried_and_solved_is_noted(record, capsys):
    assert checks.progress.read() == {}
    reply(..., capsys)
    assert not record.exists()  # not begun
    reply(32, capsys)
    assert checks.progress.read() == {"01.1": False}
    reply(64, capsys)
    reply(32, capsys)  # once is enough
    assert checks.progress.read() == {"01.1": True}


def test_solved_exercises_are_noted_in_build():
    """A folder that git ignores, so they are never committed."""
    assert checks.progress.RECORD == notebooks.ROOT / "build" / "progress.jsonl"
    ignores = (notebooks.ROOT / ".gitignore").read_text().splitlines()
    assert "build/" in ignores


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("solutions.ipynb", 0),
        ("02_lesson-solved.ipynb", 0),
        ("02_lesson-solved-2.ipynb", 0),
        ("02_lesson.ipynb", 2),
    ],
)
def test_what_comes_solved_is_not_noted(record, name, times, monkeypatch, capsys):
    """JupyterLab and VS Code each say in their own way which notebook runs."""
    main = sys.modules["__main__"]
    monkeypatch.setenv("JPY_SESSION_NAME", f"01-part/{name}")
    reply(64, capsys)
    monkeypatch.delenv("JPY_SESSION_NAME")
    monkeypatch.setattr(main, "__vsc_ipynb_file__", f"/a/{name}", raising=False)
    reply(64, capsys)
    solved = record.read_text().count("true") if record.exists() else 0
    assert solved == times


def test_a_record_that_cannot_be_written_or_read_fails_nothing(record, capsys):
    record.parent.write_text("a file where the folder belongs")
    assert reply(64, capsys) == "Right!\n"
    assert reply(32, capsys) == "Not yet. Two ranks, 32 each.\n"
    assert checks.progress.read() == {}


def test_half_a_line_of_the_record_spoils_no_other(record, capsys):
    record.parent.mkdir()
    record.write_text('{"exercise": "a", "solved": true}\n{"exercise": "b", "sol')
    reply(64, capsys)
    record.write_text(record.read_text() + '\n[1]\n{"solved": true}\n7')
    assert checks.progress.read() == {"a": True, "01.1": True}


def test_on_a_full_disk_check_says_what_it_says(small_disk, monkeypatch, capsys):
    monkeypatch.delenv("WORKSHOP_PROGRESS")
    monkeypatch.setattr(checks.progress, "RECORD", small_disk / "progress.jsonl")
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "all of it").write_bytes(bytes(8 * 2**20))
    assert reply(64, capsys) == "Right!\n"
    assert checks.progress.read() == {}


@pytest.mark.covers("make progress")
def test_progress_is_shown_for_each_lesson(record, monkeypatch, capsys):
    names = shown.exercises(FIRST)
    checks.progress.note(names[0], solved=True)
    checks.progress.note(names[1], solved=False)
    checks.progress.note("of another lesson", solved=True)
    monkeypatch.setattr(sys, "argv", ["notebooks", "progress"])
    assert command_line() == 0
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["lesson", "solved", "tried", "not", "begun"]
    left = len(names) - 2
    title = notebooks.title(FIRST)
    assert re.fullmatch(rf"01/01 +1 +1 +{left}  {re.escape(title)}", rows[0])
    lessons = notebooks.all_notebooks() + notebooks.electives()
    assert len(rows) == 1 + sum(path.stem != "solutions" for path in lessons)
    everything = sum(map(int, rows[-1].split()[1:]))
    assert everything == len(ALL_EXERCISES)
    assert last == f"Tried, and not yet solved: 01/01, {names[1]}."


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


def gathers_twice(model, mesh):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)  # frees each block after its forward pass
    return model


class MakesItAgain:
    """The table is made for every batch."""

    def __init__(self, make_table):
        self.make_table = make_table

    def __call__(self, batch):
        return batch | {"square": self.make_table()[batch["label"]]}


class MakesItTwice(MakesItAgain):
    """Once for itself, and then for every batch."""

    def __init__(self, make_table):
        super().__init__(make_table)
        make_table()


def halving(begins_anew=False, at_least=1):
    """Count the epochs of a search; each argument is a place for a mistake."""

    def epochs(trials, max_epochs, rungs, factor):
        total, done = 0, 0
        for rung in (*rungs, max_epochs):
            total += trials * (rung - (0 if begins_anew else done))
            trials, done = max(at_least, trials // factor), rung
        return total

    return epochs


ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


def runs_until(ended=ENDS, again=("FAILED",), tries=None):
    """Submit until a job has succeeded; each argument is a place for a mistake."""

    def run(submit, status, limit):
        for _ in range(tries or limit):
            job = submit()
            while (said := status(job)) not in ended:
                pass
            if said not in again:
                break
        return said == "SUCCEEDED"

    return run


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


def undivided(model, parts):
    for x, y in parts:
        F.cross_entropy(model(x), y).backward()


def sent_each_time(model, parts):
    for x, y in parts:
        (F.cross_entropy(model(x), y) / len(parts)).backward()


def never_sent(model, parts):
    with model.no_sync():
        sent_each_time(model, parts)


def last_part_alone(model, parts):
    sent_each_time(model, parts[-1:])


def all_parts_at_once(model, parts):
    """Do it right, and send once, but with the memory of the whole batch."""
    x, y = map(torch.cat, zip(*parts))
    F.cross_entropy(model(x), y).backward()


def losses_added(model, parts):
    """Do it right, and send once, but begin backward when all parts are forward."""
    sum(F.cross_entropy(model(x), y) / len(parts) for x, y in parts).backward()


def forward_outside(model, parts):
    for number, (x, y) in enumerate(parts):
        loss = F.cross_entropy(model(x), y) / len(parts)
        with nullcontext() if number == len(parts) - 1 else model.no_sync():
            loss.backward()


def rank_0_alone(value):
    if dist.get_rank() == 0:
        dist.all_reduce(value)
        return value / dist.get_world_size()


def summed(value):
    dist.all_reduce(value)
    return value if dist.get_rank() == 0 else None


def on_all_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def my_batches(batches):
    rank, n = dist.get_rank(), dist.get_world_size()
    return [batch for number, batch in enumerate(batches) if number % n == rank]


def all_batches(batches):
    return list(batches)


def but_the_first(batches):
    rank, n = dist.get_rank(), dist.get_world_size()
    return list(batches)[1 + rank :: n]


def not_at_all(counts):
    return counts[0] / counts[1]


def mean_of_ranks(counts):
    mean = counts[0] / counts[1] / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


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


def deals_from(start):
    """Return the images from `start(seen, images)` on, dealt out to the ranks."""

    def share(seen, images):
        rank, n = dist.get_rank(), dist.get_world_size()
        left = range(images)[start(seen, images) :]
        return left[rank::n][: len(left) // n]

    return share


def unequal(seen, images):
    return range(seen % images, images)[dist.get_rank() :: dist.get_world_size()]


def pack():
    return lambda *parts: [getattr(p, "state_dict", lambda p=p: p)() for p in parts]


def unpack(model=True, optimizer=True, schedule=True, seen=None):
    """Load the parts that are not False."""

    def load(state, *parts):
        for part, saved, wanted in zip(parts, state, (model, optimizer, schedule)):
            if wanted:
                part.load_state_dict(saved)
        return state[-1] if seen is None else seen

    return load


def from_rank_0(flag):
    flags = torch.tensor(float(flag))
    dist.broadcast(flags, src=0)
    return flags.item() > 0


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def wraps_and_forgets(model, mesh):
    gathers_twice(model, mesh)


def optimizer_too_early(model, mesh):
    optimizer = adamw(model)
    gathers_twice(model, mesh)
    return optimizer


def optimizer_in_between(model, mesh):
    """Make the optimizer when the blocks are sharded, and the rest is not."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    optimizer = adamw(model)
    fully_shard(model, mesh=mesh)
    return optimizer


def each_rank_for_itself(model, mesh):
    return adamw(gathers_twice(model, mesh), betas=(0.5, 0.999))


def loads_nothing(model, optimizer, folder):
    sd.get_state_dict(model, optimizer)


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


def room(parameters, gpus, gpu_bytes):
    """Return what the state of a model at stage 3 leaves of a GPU."""
    return gpu_bytes - memory.predict(parameters, gpus, 3, memory.MIXED).total


def decays(spared, twice=False):
    """Part parameters by name: those that contain one of `spared` do not decay."""

    def groups(model, decay):
        named = dict(model.named_parameters())
        free = [n for n in named if any(part in n for part in spared)]
        rest = list(named) if twice else [n for n in named if n not in free]
        return [
            {"params": [named[n] for n in names], "weight_decay": value}
            for names, value in ((rest, decay), (free, 0.0))
        ]

    return groups


NAMES = {
    "A": "not averaged",
    "B": "schedule",
    "C": "same noise",
    "D": "clipping",
}
BUGS = {"A": "one left out", "B": "sum", "C": "rounded", "D": "right"}


def through_the_module(model, x, y):
    F.cross_entropy(DDP(model).module(x), y).backward()


def summed_over_images(model, x, y):
    F.cross_entropy(DDP(model)(x), y, reduction="sum").backward()


def twice_backward(model, x, y):
    wrapped = DDP(model)
    for _ in range(2):
        F.cross_entropy(wrapped(x), y).backward()


ALL_ROWS = {"tree_learner": "data_parallel"}


# Typical wrong answers, and what `check` has to say of each.
NAMED = {
    "split a batch": [
        (lambda batch, rank, n: batch, "Every worker gets the whole batch"),
        (lambda batch, rank, n: batch.sort(), "is a `return` missing"),
        (lambda batch, rank, n: batch[rank], "a list of them"),
        (lambda batch, rank, n: range(rank, len(batch), n), "not their positions"),
        (lambda batch, rank, n: batch[rank : rank + 4], "nobody gets images"),
        (lambda batch, rank, n: batch[rank * 4 :][:8], "more than once"),
        (lambda batch, rank, n: batch[9:] if rank else batch[:9], "different lengths"),
    ],
    "global batch": [(32, "forgot the number of workers"), (4, "is not divided")],
    "bytes per step": [
        (4 * 11_175_370, "the size of the gradients"),
        (2 * 4 * 11_175_370, "the limit"),
        (2 * 7 / 8 * 11_175_370, "how many bytes"),
        (7 / 8 * 4 * 11_175_370, "one of the two phases"),
    ],
    "find the bug": [
        ("D", "Give a dictionary"),
        (BUGS | {"B": "twice"}, "none of the four words"),
        (BUGS | {"C": "right", "D": "rounded"}, "What does it do in float64"),
        (BUGS | {"A": "sum", "B": "one left out"}, "look at each tensor"),
        (BUGS | {"B": "right", "D": "sum"}, "B is something else"),
    ],
    "averaged by DDP": [
        (through_the_module, "Nothing was all-reduced"),
        (lambda model, x, y: DDP(model)(x), "not the averages"),
        (summed_over_images, "not the averages"),
        (twice_backward, "not the averages"),
    ],
    "two efficiencies": [
        (lambda share, all_, many, n: (share / many, all_ / many / n), "comes first"),
        (lambda share, all_, many, n: (all_ / many, share / many), "the speed-up"),
        (
            lambda share, all_, many, n: (all_ / many / n, share / many / n),
            "N times the work already",
        ),
        (lambda share, all_, many, n: (many / all_, many / share), "50% and 100%"),
    ],
    "where it pays": [(90, "strong scaling"), (60, "before the first image")],
    "reading stacks": [
        ("train_step", "by some ranks only"),
        ("barrier", "Name the function"),
    ],
    "mean loss": [
        (lambda sums, counts: sum(s / c for s, c in zip(sums, counts)) / 2, "means"),
        (
            lambda sums, counts: sum(sums) / len(sums),
            "Called with ([6.0, 2.0], [3, 1])",
        ),
    ],
    "one all-reduce": [
        (one_by_one, "took 4 all-reduces"),
        (sum_at_once, "forgot the number of workers"),
        (functools.partial(sum_at_once, put_back=False), "put the averages back"),
        (functools.partial(sum_at_once, divide_by=2), "On 3 ranks"),
    ],
    "accumulation": [(4096 / 64, "8 GPUs"), (4096 / 8, "how many passes")],
    "traffic saved": [(1 / 8, "still sent"), (87.5, "is a percentage")],
    "share": [
        (
            lambda i, rank, n: range(rank * (i // n), (rank + 1) * (i // n)),
            "nobody gets 1",
        ),
        (lambda i, rank, n: range(rank, i, n), "not unbroken"),
        (lambda i, rank, n: range(i), "more than once"),
        (
            lambda i, rank, n: range(i - n + 1) if not rank else [i - n + rank],
            "have [6, 1]",
        ),
    ],
    "send once": [
        (undivided, "3 times too long"),
        (sent_each_time, "all-reduced 3 times"),
        (never_sent, "Nothing was all-reduced"),
        (lambda model, parts: model(parts[0][0]), "Nothing was all-reduced"),
        (last_part_alone, "not that of the mean loss"),
        (all_parts_at_once, "takes 6 images forward"),
        (losses_added, "takes 6 images forward"),
    ],
    "work lost": [(12, "worst case"), (96, "not lost"), (100, "all finished epochs")],
    "complete checkpoint": [
        (lambda m, o, s: {"optimizer": o.state_dict()}, "weights are not in it"),
        (lambda m, o, s: {"model": m.state_dict()}, "AdamW starts again"),
        (
            lambda m, o, s: {"model": m.state_dict(), "optimizer": o.state_dict()},
            "the learning rate",
        ),
    ],
    "a run that ends": [
        (rank_0_alone, "Rank 0 stands in a collective"),
        (summed, "forgot the number of workers"),
        (on_all_ranks, "Only rank 0"),
    ],
    "all at once": [
        (lambda task, inputs: [ray.get(task.remote(x)) for x in inputs], "It waits"),
        (lambda task, inputs: [task.remote(x) for x in inputs], "returns references"),
    ],
    "seconds for 20 tasks": [(20 / 8, "8 tasks at once"), (20, "after the other")],
    "count after restart": [(7, "the process that died")],
    "tree sum": [
        (lambda add, refs: functools.reduce(add.remote, refs), "4 rounds and not 3"),
        (lambda add, refs: functools.reduce(add.remote, refs[:2]), "up to 1"),
    ],
    "mean of ranks": [
        ([[2.0, 1.0], [2.0, 1.0]], "over both ranks"),
        ([[1, 0], [1, 1]], "nothing has been sent"),
    ],
    "workers that fit": [
        (6, "of different nodes"),
        (12, "asks for two"),
        (1, "That is one node"),
    ],
    "epochs after failure": [(10, "not from the start"), (2, "was not finished")],
    "your train_fn": [
        ({"weight": 0.52, "bias": 1.0}, "rank 0 alone"),
        ({"weight": 1.72, "bias": 2.28}, "rank 1 alone"),
        ({"weight": 0.52, "bias": 0.11}, "at x = 1 at 0.63"),
        (None, "return something"),
    ],
    "steps per worker": [(16, "drops it"), (62, "4 workers"), (250, "the rows")],
    "each row once": [
        (functools.partial(accuracy, mine=all_batches), "2 of them look at the same"),
        (functools.partial(accuracy, reduce=not_at_all), "not the same"),
        (
            functools.partial(accuracy, reduce=mean_of_ranks),
            "On 2 ranks it returns 0.560",
        ),
        (
            functools.partial(accuracy, mine=but_the_first),
            "none of them looks at batch 0",
        ),
        (sums_every_batch, "On 2 ranks, a rank stands in a collective"),
        (lambda batches: print(end=""), "return a number"),
    ],
    "label counts": [
        (
            lambda batch: {"counts": np.bincount(batch["label"], minlength=10)},
            "is [10] and not [1, 10]",
        ),
        (lambda batch: {"counts": np.bincount(batch["label"])[None]}, "is [1, 4]"),
    ],
    "made once": [
        (MakesItAgain, "is made 3 times"),
        (MakesItTwice, "is made 4 times"),
    ],
    "steps trained twice": [(15, "Step 75"), (76, "within the epoch"), (46, "later")],
    "seconds between saves": [(40**0.5, "in hours"), (72_000**0.5, "besides")],
    "seconds to spare": [
        (7, "right after Ray asked."),
        (10, "just asked"),
        (8, "every fourth"),
        (15, "between"),
    ],
    "stop together": [
        (lambda flag: flag, "another waits for it"),
        (lambda flag: True, "If no rank asks"),
        (from_rank_0, "they end after [4, 4, 4]"),
    ],
    "share what is left": [
        (unequal, "get [4, 3] images"),
        (lambda seen, images: range(seen, images), "trained twice"),
        (deals_from(lambda seen, images: 0), "5 images seen, 12 per epoch: image 0 is"),
        (
            deals_from(lambda seen, images: seen),
            "31 images seen, 12 per epoch: 5 images",
        ),
        (lambda seen, images: [], "12 images are left out"),
    ],
    "whole checkpoint": [
        (
            (pack(), unpack(schedule=False)),
            "Step 2 after the restart has a learning rate of 0.005",
        ),
        ((pack(), unpack(seen=0)), "Images 96 and following come next; after"),
        ((pack(), unpack(model=False)), "the weights are not those"),
        ((pack(), unpack(optimizer=False)), "AdamW's averages are not those"),
    ],
    "drivers at once": [
        (8, "side by side"),
        (24, "no worker"),
        (23, "two workers"),
        (12, "the drivers"),
    ],
    "steps logged twice": [
        (22, "the first and the last"),
        (27, "the next checkpoint"),
        (150, "logged once"),
        (173, "does the second begin"),
    ],
    "one curve": [
        (lambda points: [value for _, _, value in points], "[3.0, 2.25, 2.5, 2.0]"),
        (
            lambda points: list({step: value for step, _, value in points}.values()),
            "it returns [2.0, 2.25, 3.0]",
        ),
        (
            lambda points: list({s: v for s, _, v in sorted(points)[::-1]}.values()),
            "it returns [2.0, 2.25, 3.0]",
        ),
        (
            lambda points: [
                max(v for s, _, v in points if s == step)
                for step in sorted({s for s, _, _ in points})
            ],
            "and not [3.0, 1.75, 2.0]",
        ),
    ],
    "run to the end": [
        (runs_until(ended=("SUCCEEDED",)), "a hundred times"),
        (runs_until(ended=(*ENDS, "RUNNING")), "still runs"),
        (runs_until(again=("FAILED", "STOPPED")), "as STOPPED"),
        (runs_until(again=()), "submits 1 and returns False"),
        (runs_until(tries=5), "with 2 tries"),
    ],
    "all share": [(lambda folder: folder.exists(), "rank 0 elsewhere")],
    "sharded twice": [
        (300, "deals it out again"),
        (600, "4 ranks"),
        (3, "the batches"),
    ],
    "what decays": [
        (decays(()), "The decay of block.0.bias is 0.25, and should be 0."),
        (decays(("bias",)), "The decay of block.1.weight is 0.25"),
        (decays(("bias", "block.1", "token")), "of token is 0.0, and should be 0.25"),
        (decays(("bias",), twice=True), "block.0.bias is in 2 groups"),
        (lambda model, decay: [], "is in 0 groups"),
    ],
    "epochs best first": [
        (256, "without ASHA"),
        (40, "waits for all"),
        (32, "fifteen others"),
    ],
    "epochs if all wait": [
        (halving(begins_anew=True), "(12, 9, (1, 3), 3), it returns 33 and not 26"),
        (halving(at_least=0), "(2, 9, (1,), 3), it returns 2 and not 10"),
    ],
    "tokens that fit": [
        (lambda p, g, b, w, n, c: b // memory.activation_bytes(1, w, n), "state takes"),
        (lambda p, g, b, w, n, c: room(p, g, b) // (64 * w * n), "should be 15674"),
        (
            lambda p, g, b, w, n, c: room(p, g, b) // memory.activation_bytes(1, w, n),
            "with checkpointing it should be 164421",
        ),
        (
            lambda p, g, b, w, n, c: (
                room(p, g, b) // memory.activation_bytes(1, w, n, checkpointing=c)
            ),
            "return 0",
        ),
    ],
    "floor of stage 1": [
        (0, "stay whole"),
        (16 * 70, "on one GPU"),
        (2 * 70, "one of the two"),
        (280e9, "in bytes"),
    ],
    "sgd": [
        (lambda stage, n: 12 / n, "At stage 0 on 2 ranks, it returns 6."),
        (lambda stage, n: memory.predict(1, n, stage).total, "At stage 0 on 1 ranks"),
    ],
    "smaller groups": [
        (lambda model, mesh: fully_shard(model, mesh=mesh), "of what it added before"),
        (lambda model, mesh: model, "more than its share"),
    ],
    "is it sharded": [
        # the parameters alone say nothing of the optimizer
        (
            lambda m, o, n: memory.local_bytes(m.parameters()) <= 4 * 236_928,
            "whole for",
        ),
        (lambda m, o, n: False, "says of a model that FSDP2"),
        (
            lambda m, o, n: memory.state_bytes(m, o).optimizer <= 1.1 * 8 * 236_928 / n,
            "optimizer's state alone",
        ),
        (
            lambda m, o, n: memory.state_bytes(m, o).total <= 1.05 * 16 * 236_928 / n,
            "the total is small enough",
        ),
    ],
    "five all-gathers": [
        (
            lambda model, mesh: [
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
                for module in (*model.blocks, model)
            ],
            "keeps its blocks",
        ),
        (gathers_twice, "9 all-gathers and 5 reduce-scatters"),
        (lambda model, mesh: model, "more than its share"),
    ],
    "trains its shards": [
        (wraps_and_forgets, "returns no optimizer"),
        (lambda model, mesh: adamw(model), "holds 100%"),
        (optimizer_too_early, "no weight has changed"),
        (optimizer_in_between, "changed only"),
        (each_rank_for_itself, "not those of one process"),
    ],
    "another world size": [
        (loads_nothing, "weights are not those"),
        (loads_weights, "no averages yet"),
        (resets_averages, "averages are not"),
    ],
    "lowest stage": [(0, "16 GB"), (2, "lower stage"), (3, "lower stage")],
    "two trips": [
        (lambda config: config, "makes 3.00 trips"),
        (lambda config: config | {"zero_optimization": {"stage": 1}}, "stage 1"),
    ],
    "norm of weights": [
        (norm_outside, "returns 0.000"),
        (norm_of_pieces, "the pieces which this rank keeps"),
        (norm_on_rank_0, "stands in an all-gather"),
        (lambda engine: 1.0, "On rank 0 it returns 1.000, and the norm is"),
    ],
    "replicate traffic": [
        (2 * 3 / 4 * 4e9, "the whole gradient"),
        (3 / 4 * 1e9, "one trip"),
        (2 * 15 / 16 * 1e9, "how many ranks"),
        (1e9, "size of a shard"),
    ],
    "tensor traffic": [
        (
            lambda layers, tokens, width, n: (
                2 * layers * 2 * (n - 1) / n * tokens * width * 2
            ),
            "0.5 times what is sent. The backward pass has two as well",
        ),
        (
            lambda layers, tokens, width, n: 8 * layers * (n - 1) / n * tokens * width,
            "0.5 times what is sent. The backward pass",
        ),
        (
            lambda layers, tokens, width, n: (
                4 * layers * 2 * (n - 1) / n * tokens * width * 4
            ),
            "Activations are in bf16",
        ),
    ],
    "two nodes of four": [
        (the_wrong_way_round, "holds 1/2"),
        (lambda model: None if model else model, "returns nothing"),
    ],
    "two trips, half the state": [
        (gathers_twice, "holds half, but a step makes 2.84 trips"),
        (lambda model, mesh: model, "holds 100%"),
    ],
    "tokens that hide": [
        (lambda billions, gpus, layers: 1024, "there computing takes 0.65 times"),
        (lambda billions, gpus, layers: 1571.5, "no multiple of 1024"),
    ],
    "add a row": [
        ((3, memory.MIXED, {"all": [2, 2, 2]}, 0), "gathers inside the node"),
        ((3, memory.FP32, {"all": [2, 4], "node": [2]}, 2 / 8), "it is MIXED"),
        ((3, memory.MIXED, {"all": [2], "node": [2, 2]}, 2 / 8), "over which ring"),
        ((3, memory.MIXED, {"all": [2, 2], "node": [2]}, 0), "takes memory"),
        ((3, memory.MIXED, {"all": [2, 2], "node": [2]}, 2), "keeps 2 bytes"),
    ],
    "a wrong choice": [
        (lambda: (65, 8, 80, 16384), "says that no row fits"),
        (lambda: (7, 64, 32, 16384), "which holds 23 GB, and 32 GB with the loss"),
    ],
    "bucket size": [
        (
            lambda parameters, layers, gpus: 25,
            "(7e+09, 32, 64), it returns 25: too small",
        ),
        (lambda parameters, layers, gpus: 2**20, "it returns 1048576: too large"),
    ],
    "flops with checkpointing": [
        (
            lambda parameters, layers, width, length: (
                6 * parameters + 12 * layers * width * length
            ),
            "0.750 times what is computed. The forward pass runs twice.",
        ),
        (lambda parameters, layers, width, length: 8 * parameters, "0.765 times"),
    ],
    "name the mistake": [
        ("clipping", "Give a dictionary"),
        (NAMES | {"A": "forgotten"}, "none of the five words"),
        (NAMES | {"C": "same order"}, "C is something else"),
    ],
    "move it alone": [
        (lambda: 2, "returns something of type int"),
        (moving._script, "The tool says items: every rank sees every item"),
        (lambda: odd_programs.PLAIN, "not those of the script"),
    ],
    "epochs that save": [
        (
            lambda n, every, end: [*range(every, n + 1, every)],
            "(7, 3, True), it returns [3, 6]",
        ),
        (
            lambda n, every, end: [
                e for e in range(1, n + 1) if e % every == 0 or e == n
            ],
            "(7, 3, False), it returns [3, 6, 7]",
        ),
    ],
    "images of all ranks": [(1000, "shared the images"), (250, "a fair share")],
    "bins for equal trees": [
        (6_000, "more than enough"),
        (12_500, "Rows do not count"),
        (94, "over all workers"),
        (2_048, "What is asked are bins"),
    ],
    "one model of all workers": [
        (lambda params, network: params | network, "still grows its own trees"),
        (lambda params, network: ALL_ROWS | network, "parameters that came are lost"),
        (lambda params, network: params | ALL_ROWS, "do not find each other"),
        (lambda params, network: params | ALL_ROWS | network, "would train alone"),
    ],
}


def lessons_choose():
    """Return `choose` of 03/05, whose cells up to there need no ranks."""
    path = next(
        p for p in notebooks.all_notebooks() if p.stem.startswith("05_choosing")
    )
    cells = {c.id: c.source for c in nbformat.read(path, as_version=4).cells}
    names = {"NamedTuple": NamedTuple, "pd": pd, "STRATEGIES": ()}
    names |= {"comms": comms, "memory": memory, "timing": timing}
    for name in ("c5-rows", "c5-held", "c5-sending", "c5-choose"):
        exec(cells[name], names)
    return names["choose"]


def test_a_wrong_choice_is_one_of_the_lesson(monkeypatch, capsys):
    """What the solutions say without the lesson's `choose` is what it says."""
    monkeypatch.undo()
    choose = lessons_choose()
    assert choose(20, 8, 80, 44, tokens=32768) == "fsdp2, checkpointing"

    def untouched(): ...

    for answer, given, said in (
        (lambda: (20, 8, 44, 32768), choose, "Right!"),
        (lambda: (20, 8, 44, 32768, "hsdp, checkpointing"), choose, "Not yet (Val"),
        (lambda: (405, 8, 126, 16384), choose, "Not yet (BadInput"),
        (lambda: (7, 64, 32, 16384), lambda *case, **work: "tensor", "row 'tensor'"),
        (untouched, choose, "replace the three dots"),
    ):
        checks.check("a wrong choice", answer, given)
        assert said in capsys.readouterr().out


# Those that train on ranks, or start DeepSpeed: some seconds each.
LONG = ["norm of weights", "move it alone", "another world size", "stop together"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.weekly] * (n in LONG)) for n in NAMED]
)
def test_typical_mistakes_are_named(name, monkeypatch, capsys):
    monkeypatch.undo()  # the workshop's own exercises
    # else each rank would import this module, and with it pytest
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    given = [lessons_choose()] if name == "a wrong choice" else []
    hint = checks.EXERCISES[name].hint
    hints = [hint] if isinstance(hint, str) else hint
    for number, (mistake, said) in enumerate(NAMED[name]):
        checks.check(name, mistake, *given)
        reply = capsys.readouterr().out
        assert reply.startswith("Not yet. ") and said in reply, (number, reply)
        assert said not in " ".join(hints), f"a hint has {said!r}, too"


def moved(start=0.0, texts=64, drew=True, rate=0.3, most=1.0, momentum=0.9):
    """Return what one process is recorded to do with an answer to the last exercise.

    Two steps, with gradients of 1.
    """
    first = start - rate
    weights = [first, first - rate * (1 + momentum)]
    items = range(texts)
    update = SimpleNamespace(rates=[rate], most=most, gradients={"weight": [1.0]})
    return SimpleNamespace(
        start={"weight": [start]},
        steps=[
            SimpleNamespace(items=items, parameters={"weight": [w]}) for w in weights
        ],
        drew=drew,
        updates=[update, update],
    )


def test_a_moved_script_that_trains_something_else_is_seen():
    assert moving._trains_the_script(moved(), moved()) is True
    for change, said in (
        ({"start": 1.0}, "first weights"),
        ({"texts": 32}, "[32] texts"),
        ({"drew": False}, "turned around by chance"),
        ({"rate": 0.1}, "learning rates [0.1, 0.1], the script [0.3, 0.3]"),
        ({"most": None}, "not clipped"),
        ({"momentum": 0.0}, "not those of SGD with momentum 0.9"),
    ):
        assert said in moving._trains_the_script(moved(**change), moved())


def what_a_rank_alone_sees(operations):
    rank, _ = join(seconds=2)
    if rank:
        return []  # it stays connected until all have returned
    begun = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(operations)]
    said = []
    for request in begun:
        try:
            request.wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_rank_alone_stands_still_whichever_operation_timed_out_first():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    said = run_ranks(what_a_rank_alone_sees, 2, 4)[0]
    assert len({words.rpartition("]")[2] for words in said}) > 1  # gloo has two words
    assert [stands_still(RuntimeError(words)) for words in said] == [True] * 4
    assert not stands_still(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_no_hint_is_the_answer(monkeypatch):
    monkeypatch.undo()
    answers = {"global batch": "256", "bytes per step": "78_227_590"}
    answers |= {"where it pays": "40", "reading stacks": "save_checkpoint"}
    answers |= {"traffic saved": "7/8", "work lost": "4", "share": "//"}
    answers |= {"floor of stage 1": "280", "lowest stage": "1"}
    answers |= {"seconds for 20 tasks": "5", "count after restart": "2"}
    answers |= {"workers that fit": "4", "epochs after failure": "3"}
    answers |= {"steps per worker": "15", "steps trained twice": "16"}
    answers |= {"seconds between saves": "379", "seconds to spare": "2"}
    answers |= {"drivers at once": "22", "steps logged twice": "23"}
    answers |= {"sharded twice": "75", "images of all ranks": "4000"}
    answers |= {"epochs best first": "31"}
    answers |= {"sharded twice": "75"}
    answers |= {"bins for equal trees": "750"}
    for name, answer in answers.items():
        exercise = checks.EXERCISES[name]
        for said in (*exercise.hint, *exercise.mistakes.values()):
            words = re.findall(r"[\w./]+(?:-\w+)?", said)
            assert answer not in [word.rstrip(".") for word in words], said


def checked(notebook) -> dict[str, str]:
    """Return the exercises that the cells of a notebook check, and what was printed."""
    found = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            printed = "".join(output.get("text", "") for output in cell.outputs)
            for name in re.findall(r'^check\(\s*"([^"]+)"', cell.source, re.MULTILINE):
                found[name] = printed
    return found


def test_every_exercise_is_asked_and_solved(monkeypatch):
    """What starters and solutions print is compared when their notebooks are executed."""
    monkeypatch.undo()
    asked, solved = {}, {}
    for path in notebooks.all_notebooks() + notebooks.electives():
        (solved if path.stem == "solutions" else asked).update(checked(path))
    assert asked.keys() == solved.keys() == checks.EXERCISES.keys()
    assert all(said.endswith("Right!\n") for said in solved.values())
    assert not any("Right" in said for said in asked.values())


# Mistakes that no sentence names; none may be called right.
WRONG = {
    "send once": forward_outside,
    "runtime env": lambda code, storage: {"working_dir": code},
}


def test_the_usual_mistake_is_not_called_right(monkeypatch, capsys):
    monkeypatch.undo()  # the workshop's own exercises
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    assert WRONG.keys() | NAMED.keys() == checks.EXERCISES.keys()
    for name, mistake in WRONG.items():
        checks.check(name, mistake)
        assert capsys.readouterr().out.startswith("Not yet"), name
