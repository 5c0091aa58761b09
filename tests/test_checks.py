"""A wrong answer gets a hint, whatever it is; never a traceback."""

import functools

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from utils import checks, memory


@pytest.fixture(autouse=True)
def one_exercise(monkeypatch):
    exercise = checks.Exercise(lambda answer: answer == 64, "Two ranks, 32 each.")
    monkeypatch.setattr(checks, "EXERCISES", {"01.1": exercise})


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


def test_unknown_exercise_names_those_there_are():
    with pytest.raises(ValueError, match=r"No exercise '9\.9': choose from 01\.1\."):
        checks.check("9.9", 1)


def the_wrong_way_round(model):
    """HSDP whose shards are in pairs, and whose replicas are on both nodes."""
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


# The mistakes that each exercise is about; none may be called right.
WRONG = {
    "global batch": 32,
    "bytes per step": 4 * 11_175_370,
    "mean loss": lambda sums, counts: (
        sum(s / c for s, c in zip(sums, counts)) / len(counts)
    ),
    "accumulation": 4096 // 64,
    "traffic saved": 1 / 8,
    "share": lambda items, rank, n: range(
        rank * (items // n), (rank + 1) * (items // n)
    ),
    "all at once": lambda task, inputs: [ray.get(task.remote(x)) for x in inputs],
    "seconds for 20 tasks": 20 / 8,
    "count after restart": 5,
    "tree sum": lambda add, refs: functools.reduce(add.remote, refs),
    "mean of ranks": [[2.0, 1.0], [2.0, 1.0]],  # the sum
    "workers that fit": 5,
    "epochs after failure": 2,
    "your train_fn": {"weight": 0.52, "bias": 1.0},  # rank 0 by itself
    "steps per worker": -(-1003 // 64),
    "safe buffer": 64,
    "label counts": lambda batch: {"counts": np.bincount(batch["label"], minlength=10)},
    "made once": MakesItAgain,
    "steps trained twice": 75,
    "seconds between saves": 2 * 2 * 36_000,
    "whole checkpoint": (
        lambda model, optimizer, schedule, seen: {  # forgets the schedule
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "seen": seen,
        },
        lambda state, model, optimizer, schedule: (
            (
                model.load_state_dict(state["model"]),
                optimizer.load_state_dict(state["optimizer"]),
            )
            and state["seen"]
        ),
    ),
    "seconds to spare": 30 - 5 - 15,
    "stop together": lambda flag: flag,
    "elastic batch": lambda worlds, batch: [batch] * len(worlds),
    "parameter bytes": lambda model: 4 * sum(p.numel() for p in model.parameters()),
    "state of 70B": 16 * 70,
    "floor of stage 1": 16 * 70,
    "sgd": lambda stage, n: 12 / n,
    "smaller groups": lambda model, mesh: fully_shard(model, mesh=mesh),
    "five all-gathers": lambda model, mesh: [
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        for module in (*model.blocks, model)
    ],
    "bytes of FSDP2": 2 * 4e9,
    "batch per worker": 12,
    # the parameters alone say nothing of the optimizer
    "is it sharded": lambda model, optimizer, world_size: (
        memory.local_bytes(model.parameters()) <= 4 * 236_928
    ),
    "DeepSpeed batch": 4 * 16,
    "lowest stage": 3,
    "two trips": lambda config: config,
    "ZeRO-3 chart": 15,
    "replicate traffic": 2 * 3 / 4 * 4e9,
    "tensor traffic": lambda layers, tokens, width, n: (
        2 * layers * 2 * (n - 1) / n * tokens * width * 2
    ),
    "two nodes of four": the_wrong_way_round,
    "which row": "ddp",
    "two trips, half the state": gathers_twice,
    "traffic ratio": 1.0,
    "smallest": lambda parameters, budget: -(-16 * parameters // budget),
}


def test_the_usual_mistake_is_not_called_right(monkeypatch, capsys):
    monkeypatch.undo()  # the workshop's own exercises
    assert WRONG.keys() == checks.EXERCISES.keys()
    for name, mistake in WRONG.items():
        checks.check(name, mistake)
        assert capsys.readouterr().out.startswith("Not yet"), name
