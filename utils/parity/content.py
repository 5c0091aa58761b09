"""Mistakes in what a gradient is computed from."""

import math

import torch
from .averaging import labels_of, level_of
from .comparing import ROUNDED, Case
from .recording import Update
from .sketches import length, made_of, numbers


def _content(case: Case) -> tuple[int, Update, list[Update]] | None:
    """Return where gradients of the same items differ: the point, and both sides."""
    at = case.still.differs
    if not at or at.update is None or not case.still.same_items(at.point):
        return None
    alone, updates = case.one.updates[at.update], case.updates[at.update]
    if case.loose or not case.identified:
        return None
    if not alone.own or not all(each.own for each in updates):
        return None
    return at.step, alone, updates


def _fit(case: Case) -> tuple[int, list[float], float] | None:
    """Return the step, and by which factors the ranks make up one process' gradient."""
    found = _content(case)
    if not found:
        return None
    step, alone, updates = found
    return step, *made_of(alone.own, [each.own for each in updates])


def divided_once_too_often(case: Case) -> str:
    """Find losses that are divided by N already, or sums, where DDP averages."""
    fit, found = _fit(case), _content(case)
    if not fit or not found:
        return ""
    step, factors, left = fit
    even = max(factors) - min(factors) < ROUNDED
    if left > ROUNDED or not even or abs(sum(factors) - case.n) > 1e-3:
        return ""
    if set(labels_of(found[2], level_of(found[2])).values()) != {"mean"}:
        return ""
    return (
        f"step {step}: one process' gradient is {sum(factors):.3f} times the mean of "
        f"{case.n} ranks"
    )


def partly_divided(case: Case) -> str:
    """Find gradients that are 1/N of one process', but for some parameters."""
    found = _content(case)
    if not found or set(labels_of(found[2], level_of(found[2])).values()) != {"mean"}:
        return ""
    step, alone, updates = found
    by_name = {}
    for name in alone.own:
        if math.hypot(*alone.own[name]) < 1e-8 * length(alone.own):
            continue
        parts = [{name: each.own[name]} for each in updates if name in each.own]
        if len(parts) < len(updates):
            return ""
        mean = {name: torch.tensor([p[name] for p in parts]).mean(0).tolist()}
        (factor,), left = made_of({name: alone.own[name]}, [mean])
        if left > ROUNDED or min(abs(factor - 1), abs(factor - case.n)) > 1e-3:
            return ""
        by_name[name] = round(factor)
    if set(by_name.values()) != {1, case.n}:
        return ""
    small = [name for name, factor in by_name.items() if factor == case.n]
    rest = next(name for name, factor in by_name.items() if factor == 1)
    return (
        f"step {step}: {len(small)} of {len(by_name)} gradients, as that of "
        f"`{small[0]}`, are 1/{case.n} of one process', and that of `{rest}` is not"
    )


def counted_equally(case: Case) -> str:
    """Find ranks that count equally although one process weighs their items otherwise."""
    fit = _fit(case)
    if not fit:
        return ""
    step, factors, left = fit
    even = max(factors) - min(factors) < ROUNDED
    if left > ROUNDED or even or abs(sum(factors) - 1) > 1e-3:
        return ""
    pair = case.still
    number = pair.differs.point if pair.differs else 0
    counts = [
        sum(len(step.items) for step in pair.steps(rank, points[number]))
        for rank, points in zip(pair.ranks, pair.of_ranks)
    ]
    return (
        f"step {step}: the ranks have {counts} items, and one process' gradient is "
        f"made of theirs by {numbers(factors)}, not {1 / case.n:.3g} each"
    )


def _adds_up(case: Case) -> bool:
    fit = _fit(case)
    return not fit or fit[2] <= ROUNDED


def needs_a_share_alone(case: Case) -> tuple[int, ...]:
    """Return steps of one process that are worth repeating with each rank's batch."""
    at = case.still.differs
    if _adds_up(case) or case.shares is not None or not at or _gathers(case):
        return ()
    point = case.still.points[at.point]
    theirs = [points[at.point] for points in case.still.of_ranks]
    alike = all(each[:2] == point[:2] for each in theirs)
    return (point.last,) if alike and point.first == point.last else ()


def _gathers(case: Case) -> bool:
    return any(step.gathers for rank in case.ranks for step in rank.steps)


def _not_of_its_batch(case: Case) -> list[int]:
    """Return ranks whose own gradient is not what one process makes of their batch."""
    found = _content(case)
    if not case.shares or not found:
        return []
    wrong = []
    for rank, (share, update) in enumerate(zip(case.shares, found[2])):
        again = share.updates[-1].own if share.updates else {}
        if made_of(update.own, [again])[1] > ROUNDED:
            wrong.append(rank)
    return wrong


def other_state(case: Case) -> str:
    """Find ranks that compute another gradient than one process does from their batch."""
    wrong = _not_of_its_batch(case)
    if not wrong:
        return ""
    ranks = ", ".join(map(str, wrong))
    return (
        f"given the batch of rank {ranks} of {case.n} and the same weights, one "
        "process computes another gradient"
    )


def of_the_batch(case: Case) -> str:
    """Find gradients of ranks that do not add up to that of the whole batch."""
    fit = _fit(case)
    if not fit or _adds_up(case) or _not_of_its_batch(case):
        return ""
    tried = "; one process makes them of each rank's batch, too" if case.shares else ""
    return (
        f"step {fit[0]}: the gradients of {case.n} ranks have the same items together, "
        f"but add up to that of one process only to {fit[2]:.1e}{tried}"
    )
