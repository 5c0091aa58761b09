"""Checks of the last lesson: naming mistakes, and a script that the reader moves alone."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from utils import parity
from utils.checks.exercise import Exercise
from utils.launch import run_ranks

SCRIPT = Path(__file__).parents[2] / "03-fsdp-deepspeed" / "which_way.py"
STEPS = 4  # of each of two epochs
NAMES = {
    "A": "not averaged",
    "B": "schedule",
    "C": "same noise",
    "D": "clipping",
}
WORDS = {*NAMES.values(), "same order"}


def _names_the_mistakes(answer) -> bool | str:
    if not isinstance(answer, dict) or answer.keys() != NAMES.keys():
        return "Give a dictionary with a word for each of A, B, C and D."
    if unknown := {*map(str, answer.values())} - WORDS:
        return f"{sorted(unknown)} is none of the five words."
    for colleague, name in NAMES.items():
        if answer[colleague] != name:
            return f"{colleague} is something else."
    return True


def _script() -> parity.Training:
    """Return the lesson's script as functions for one process; a batch in one piece."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, RandomSampler

    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def build_model():
        torch.manual_seed(0)
        return script.Direction()

    def build_optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=script.LR, momentum=0.9)

    def make_loader(rank, world_size, epoch):
        order = torch.Generator().manual_seed(epoch)
        sampler = RandomSampler(script.texts, generator=order)
        return DataLoader(script.texts, script.BATCH_SIZE, sampler=sampler)

    seen = 0

    def train_step(model, optimizer, batch):
        nonlocal seen
        (texts,) = batch
        turned = torch.rand(len(texts)) < 0.5
        texts = torch.where(turned[:, None], texts.flip(1), texts)
        seen += len(texts)
        optimizer.param_groups[0]["lr"] = script.LR * min(1, seen / 1024)
        optimizer.zero_grad()
        logits = model(texts)
        F.binary_cross_entropy_with_logits(logits, turned.to(logits.dtype)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return parity.Training(build_model, build_optimizer, make_loader, train_step)


def _alone(training: parity.Training) -> tuple[parity.Record, parity.Record]:
    """Return what one process does with the answer, and with the script."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine, theirs = (
        parity.record(each, epochs=2, steps=STEPS) for each in (training, _script())
    )
    return mine, theirs


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
    mine, theirs = run_ranks(_alone, 1, training, timeout=120)[0]
    return _trains_the_script(mine, theirs)


def _trains_the_script(mine: parity.Record, theirs: parity.Record) -> bool | str:
    if mine.start != theirs.start:
        return "The first weights are not those of the script: seed 0, then its model."
    sizes = {len(step.items) for step in mine.steps}
    if sizes != {64}:
        return f"In one process a step takes {sorted(sizes)} texts, in the script 64."
    if not mine.drew:
        return "No text is turned around by chance."
    rates = [
        [round(rate, 9) for update in record.updates for rate in update.rates]
        for record in (mine, theirs)
    ]
    if rates[0] != rates[1]:
        return f"One process has the learning rates {rates[0]}, the script {rates[1]}."
    if [u.most for u in mine.updates] != [u.most for u in theirs.updates]:
        return "Gradients are not clipped as in the script, once and to 1.0."
    if not _is_sgd_with_momentum(mine):
        return "Its updates are not those of SGD with momentum 0.9, as in the script."
    return True


def _is_sgd_with_momentum(record: parity.Record, momentum: float = 0.9) -> bool:
    """Return whether weights move as SGD moves them; sketches add up as tensors do."""
    import torch

    tensor = functools.partial(torch.tensor, dtype=torch.float64)
    velocity: dict[str, torch.Tensor] = {}
    before = record.start
    for step, update in zip(record.steps, record.updates, strict=True):
        for name, after in step.parameters.items():
            gradient = tensor(update.gradients.get(name, [0.0] * len(after)))
            velocity[name] = momentum * velocity.get(name, 0 * gradient) + gradient
            moved = tensor(after) - tensor(before[name])
            if not torch.allclose(moved, -update.rates[0] * velocity[name], atol=1e-9):
                return False
        before = step.parameters
    return True


EXERCISES: dict[str, Exercise] = {
    # 03-fsdp-deepspeed/06_move_your_own_training.ipynb
    "name the mistake": Exercise(
        _names_the_mistakes,
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
