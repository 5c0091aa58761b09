"""Checks of the last lesson: naming mistakes, and a script that the reader moves alone."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from utils import parity
from utils.checks.exercise import Exercise, words
from utils.launch import run_ranks

SCRIPT = Path(__file__).parents[2] / "03-fsdp-deepspeed" / "which_way.py"
STEPS = 4  # of each of two epochs


def _moves_it(my_move: Callable) -> bool | str:
    """Return whether two workers train like one process, and that one like the script."""
    training = my_move()
    if not isinstance(training, parity.Training):
        found = type(training).__name__
        return f"my_move() returns something of type {found}: return a Training."
    report = parity.check(training, world_sizes=(2,), steps=STEPS)
    if not report.ok:
        name, sentence, evidence = report.findings[0]
        return f"The tool says {name}: {sentence}. Its evidence: {evidence}."
    return run_ranks(_trains_the_script, 1, training, timeout=120)[0]


def _trains_the_script(training: parity.Training) -> bool | str:
    """Return whether one process trains the script's model as the script does."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(0)
    theirs, mine = script.Direction(), training.build_model()
    weights, expected = mine.state_dict(), theirs.state_dict()
    if weights.keys() != expected.keys() or not all(
        torch.equal(weights[name], expected[name]) for name in expected
    ):
        return "The first weights are not those of the script: seed 0, then its model."
    optimizer = training.build_optimizer(mine)
    momentum = optimizer.param_groups[0].get("momentum")
    if not isinstance(optimizer, torch.optim.SGD) or momentum != 0.9:
        return "The optimizer is not that of the script, SGD with momentum 0.9."
    dist.init_process_group("gloo")
    record = parity.record(training, epochs=2, steps=STEPS)
    if (sizes := {len(step.items) for step in record.steps}) != {script.BATCH_SIZE}:
        return f"In one process a step takes {sorted(sizes)} texts, in the script 64."
    if not record.drew:
        return "No text is turned around by chance."
    rates = [round(rate, 9) for update in record.updates for rate in update.rates]
    warmed_up = [
        round(script.LR * min(1, step * script.BATCH_SIZE / 1024), 9)
        for step in range(1, 2 * STEPS + 1)
    ]
    if rates != warmed_up:
        return f"One process has the learning rates {rates}, the script {warmed_up}."
    if {update.most for update in record.updates} != {1.0}:
        return "Gradients are not clipped as in the script, once and to 1.0."
    return True


EXERCISES: dict[str, Exercise] = {
    # 03-fsdp-deepspeed/07_move_your_own_training.ipynb
    "name the mistake": Exercise(
        words(
            {"A": "not averaged", "B": "schedule", "C": "same noise", "D": "clipping"},
            others={"same order"},
            clues={},
        ),
        (
            "What does DDP do in backward, and what does a colleague do before or after?",
            "After backward all ranks have one gradient. What else has to be equal?",
        ),
    ),
    "move it alone": Exercise(
        _moves_it,
        (
            "Which lines of the script count texts, draw by chance, or choose an order?",
            "On two ranks, len(batch) is half of the global batch: who counts with it?",
            "Print parity.check(my_move(), world_sizes=[2]): it has all findings.",
        ),
    ),
}
