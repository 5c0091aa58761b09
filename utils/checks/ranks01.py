"""Exercises of part 01 that run on ranks: each judges a function by what it does there.

torch is imported where it is needed: `utils.checks` is imported by every notebook.
"""

from collections.abc import Callable
from typing import Any

from utils.checks.ranks import join, stands_still
from utils.launch import run_ranks


def averages_at_once(average: Callable) -> bool | str:
    """Whether `average(model)` averages all gradients with a single all-reduce."""
    for n in (2, 3):
        found, calls = run_ranks(_average, n, average, timeout=60)[0]
        if found == "own":
            return "Each rank still holds its own gradients: put the averages back."
        if found == "sum":
            return "That leaves the sum of the gradients: you forgot the number of workers."
        if found != "mean":
            return f"On {n} ranks, the gradients afterwards are not the averages."
        if calls != 1:
            return f"The averages are right, but it took {calls} all-reduces, not one."
    return True


def _average(average: Callable) -> tuple[str, int]:
    """On a rank: what `average` leaves in the gradients, and its number of all-reduces."""
    import torch

    from utils.comms import count_comms

    rank, n = join()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    sizes = [p.numel() for p in model.parameters()]
    base = torch.arange(1.0, 1.0 + sum(sizes)).split(sizes)  # no number twice
    for p, numbers in zip(model.parameters(), base):
        p.grad = (rank + 1) * numbers.view_as(p).clone()
    with count_comms() as comms:
        average(model)
    got = torch.cat([p.grad.flatten() for p in model.parameters()]) / torch.cat(base)
    outcomes = {"mean": (n + 1) / 2, "sum": n * (n + 1) / 2, "own": rank + 1}
    same = [
        k for k, v in outcomes.items() if torch.allclose(got, torch.tensor(v * 1.0))
    ]
    return (same or ["else"])[0], comms.calls["allreduce"]


def accumulates_and_sends_once(backward_in_parts: Callable) -> bool | str:
    """Whether `backward_in_parts(model, parts)` leaves the mean and sends it only once."""
    ratios, calls = zip(*run_ranks(_accumulate, 2, backward_in_parts, timeout=60))
    if any(abs(ratio - 3) < 1e-4 for ratio in ratios):
        return "With 3 parts, the gradient is 3 times too long."
    if calls[0] == 0:
        return "Nothing was all-reduced: each rank is left with its own gradient."
    if any(abs(ratio - 1) > 1e-4 for ratio in ratios):
        return "The gradient is not that of the mean loss over all parts and ranks."
    if calls[0] > 1:
        return (
            f"The gradient is right, but it was all-reduced {calls[0]} times, not once."
        )
    return True


def _accumulate(backward_in_parts: Callable) -> tuple[float, int]:
    """On a rank: the gradient in units of the right one (or -1), and the all-reduces."""
    import torch
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    from utils.comms import count_comms

    rank, _ = join()
    torch.manual_seed(0)
    x, y = torch.randn(12, 6), torch.randint(0, 4, (12,))
    plain = torch.nn.Linear(6, 4)
    right = torch.autograd.grad(F.cross_entropy(plain(x), y), plain.weight)[0]
    model = DDP(plain)
    mine = list(zip(x[rank::2].chunk(3), y[rank::2].chunk(3)))
    with count_comms() as comms:
        backward_in_parts(model, mine)
    ratio = (plain.weight.grad.norm() / right.norm()).item()
    along = torch.allclose(plain.weight.grad, ratio * right, rtol=1e-4, atol=1e-6)
    return (ratio if along else -1.0), comms.calls["allreduce"]


def resumes_undisturbed(save: Callable) -> bool | str:
    """Whether training goes on from `save(model, optimizer, scheduler)` to the same end."""
    import torch

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        # a schedule that counts its own steps; others go on from the optimizer's rate
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return model, optimizer, schedule

    def train(model, optimizer, scheduler):
        for step in range(2):
            optimizer.zero_grad()
            (model(torch.arange(4.0) + step) - 1).square().sum().backward()
            optimizer.step()
            scheduler.step()

    undisturbed, first, second = build(), build(), build()
    train(*undisturbed), train(*undisturbed), train(*first)
    state = save(*first)
    names = ("model", "optimizer", "scheduler")
    for name, part in zip(names, second):
        if name in state:
            part.load_state_dict(state[name])
    train(*second)
    if torch.equal(second[0].weight, undisturbed[0].weight):
        return True
    if "model" not in state:
        return "The weights are not in it, under the name 'model'."
    if "optimizer" not in state:
        return "The weights are there, but AdamW starts again with empty averages."
    if "scheduler" not in state:
        return "AdamW goes on, but the schedule of the learning rate starts again."
    return "Resumed, the run ends with different weights."


def ends_on_all_ranks(mean_over_ranks: Callable) -> bool | str:
    """Whether `mean_over_ranks(value)` ends on all ranks: the mean on 0, None elsewhere."""
    for n in (2, 3):
        results = run_ranks(_call, n, mean_over_ranks, timeout=60)
        if "stands still" in results:
            rank = results.index("stands still")
            return f"Rank {rank} stands in a collective that not all ranks call."
        first, *others = results
        if first is None:
            return "Rank 0 returns nothing."
        if first == sum(range(1, n + 1)):
            return "Rank 0 returns the sum: you forgot the number of workers."
        if first != (n + 1) / 2:
            return f"On {n} ranks with values 1 to {n}, rank 0 returns {first}."
        if any(other is not None for other in others):
            return "Only rank 0 should return the mean, and the others None."
    return True


def _call(mean_over_ranks: Callable) -> Any:
    import torch

    rank, _ = join(seconds=5)
    try:
        result = mean_over_ranks(torch.tensor([rank + 1.0]))
    except RuntimeError as error:
        if stands_still(error):
            return "stands still"
        raise
    return result if result is None else float(result)
