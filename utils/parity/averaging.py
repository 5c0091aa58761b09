"""Mistakes between the backward pass and the optimizer."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from .comparing import LATER, ROUNDED, Case
from .recording import Update
from .sketches import apart, length, made_of, numbers


def _label(used: dict[int, list[float]], own: list, whole: float) -> str:
    """Say how one tensor's gradient on some ranks was made of the ranks' own ones."""
    applied = {r: torch.tensor(a, dtype=torch.float64) for r, a in used.items()}
    mine = torch.tensor(own, dtype=torch.float64)
    mean = mine.mean(0)
    scale = max(mean.norm().item(), mine.norm(dim=1).mean().item(), 1e-4 * whole)
    near = ROUNDED * scale

    def all_are(expected: Sequence[torch.Tensor]) -> bool:
        return all((a - expected[r]).norm() < near for r, a in applied.items())

    n = len(own)
    if all_are([mean] * n):
        return "mean"
    if all_are([mean * n] * n):
        return "sum"
    if all_are([mean / n] * n):
        return "divided twice"
    differ = max((each - mine[0]).norm().item() for each in mine) > 10 * near
    return "own" if differ and all_are([*mine]) else "other"


def labels_of(updates: list[Update], level: str = "gradients") -> dict[str, str]:
    """Return `_label` of each parameter whose own gradients are known.

    A gradient that not all ranks have computed is the own one of those that have.
    """
    at = [getattr(update, level) or {} for update in updates]
    whole = max((length(update.own) for update in updates), default=0.0)
    found = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(at)):
        own = [update.own.get(name) or update.aside.get(name) for update in updates]
        if len({len(each) for each in own if each}) > 1:
            continue  # parts of a tensor, which ranks share unequally
        if all(own) and max(math.hypot(*(each or [])) for each in own) < 1e-8 * whole:
            continue  # zero, but for rounding
        if all(own):
            used = {rank: each[name] for rank, each in enumerate(at) if name in each}
            found[name] = _label(used, own, whole)
        elif any(name not in each for each in at) and any(own):
            found[name] = "own"
    return found


def level_of(updates: list[Update]) -> str:
    """Return the gradients to look at: before clipping, if that was seen."""
    return "unclipped" if all(each.unclipped for each in updates) else "gradients"


def _labels_beside(case: Case, u: int) -> dict[str, str]:
    """Do as `_labels`, where ranks' own gradients never exist, as with FSDP2."""
    alone = case.beside(u)
    # of other micro-batches, one too many divisions by their number looks the same
    if not alone or alone.backwards != case.updates[u][0].backwards:
        return {}
    (factor,), left = made_of(case.updates[u][0].gradients, [alone.gradients])
    for label, expected in (("sum", case.n), ("divided twice", 1 / case.n)):
        if left < ROUNDED and abs(factor / expected - 1) < 1e-3:
            return dict.fromkeys(alone.gradients, label)
    return {}


def _clips_first(updates: list[Update]) -> bool:
    """Return whether ranks clip what is their own still, and average it then."""
    if not all(update.unclipped for update in updates):
        return False
    before = set(labels_of(updates, "unclipped").values())
    differ = max(apart(u.gradients, updates[0].gradients)[0] for u in updates)
    return "own" in before and before <= {"own", "mean"} and differ < LATER


def _keeps_own(updates: list[Update]) -> bool:
    """Return whether each rank steps with a multiple of its own gradient, clipped say."""
    for rank, update in enumerate(updates):
        factors, left = made_of(update.gradients, [each.own for each in updates])
        others = [abs(f) for r, f in enumerate(factors) if r != rank]
        if left > ROUNDED or max(others) > ROUNDED * abs(factors[rank]):
            return False
    return True


def _judged_labels(case: Case) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield wrong updates, and how the gradient of each parameter was made."""
    for u in case.judged():
        updates = case.updates[u]
        if _clips_first(updates) or any(each.reduces for each in updates):
            continue  # what an optimizer reduces itself is not seen
        labels = labels_of(updates, level_of(updates)) or _labels_beside(case, u)
        if set(labels.values()) == {"other"} and _keeps_own(updates):
            labels = dict.fromkeys(labels, "own")  # but for a scale
        yield u, labels


def not_averaged(case: Case) -> str:
    """Find ranks that all step with their own gradients."""
    for u, labels in _judged_labels(case):
        own = [name for name, label in labels.items() if label == "own"]
        if own and len(own) == len(labels):
            updates = case.updates[u]
            sizes = [math.hypot(*e.own[own[0]]) for e in updates if own[0] in e.own]
            return (
                f"update {u} on {case.n} ranks: all of {len(own)} gradients are each "
                f"rank's own, as that of `{own[0]}`, of length {numbers(sizes)}"
            )
    return ""


def _some_not_averaged(case: Case, why: str) -> str:
    for u, labels in _judged_labels(case):
        own = [name for name, label in labels.items() if label == "own"]
        if not own or len(own) == len(labels):
            continue
        at_wrap = case.ranks[0].at_wrap
        reason = "forgotten"
        if all(name not in at_wrap for name in own):
            reason = "late"
        elif all(not at_wrap.get(name, True) for name in own):
            reason = "frozen"
        mine = [each.gradients.get(own[0]) for each in case.updates[u]]
        sizes = numbers(math.hypot(*each) if each else 0.0 for each in mine)
        said = (
            f"update {u} on {case.n} ranks: {len(own)} of {len(labels)} gradients are "
            f"each rank's own ({', '.join(f'`{name}`' for name in own[:3])}); lengths "
            f"of that of `{own[0]}`: {sizes}"
        )
        return said if reason == why else ""
    return ""


def made_late(case: Case) -> str:
    """Find parameters that were made after the model was wrapped."""
    return _some_not_averaged(case, "late")


def trained_late(case: Case) -> str:
    """Find parameters that were frozen when the model was wrapped."""
    return _some_not_averaged(case, "frozen")


def forgotten(case: Case) -> str:
    """Find other parameters that no step averages."""
    return _some_not_averaged(case, "forgotten")


def _of_one_kind(labels: dict[str, str], kind: str) -> bool:
    rest = [label for label in labels.values() if label not in ("own", "mean")]
    return bool(rest) and rest.count(kind) == len(rest)


def _divides_its_loss(case: Case, u: int) -> bool:
    """Return whether losses are divided by the world size, so that sums are right."""
    alone = case.beside(u)
    if alone:
        factors, left = made_of(alone.own, [each.own for each in case.updates[u]])
        if left < ROUNDED and max(factors) - min(factors) < ROUNDED:
            return abs(sum(factors) - case.n) < 1e-3
    if not case.one.updates:
        return False
    means = [length(update.own) for update in case.updates[0]]
    if not any(means):
        return False
    ratio = length(case.one.updates[0].own) / (sum(means) / case.n or 1.0)
    return ratio > math.sqrt(case.n)


def summed(case: Case) -> str:
    """Find gradients that are summed over the ranks."""
    for u, labels in _judged_labels(case):
        if _of_one_kind(labels, "sum") and not _divides_its_loss(case, u):
            name = next(name for name, label in labels.items() if label == "sum")
            return (
                f"update {u}: the gradient of `{name}` is {_ratio(case, u, name):.3f} "
                f"times the mean on {case.n} ranks"
            )
    return ""


def _ratio(case: Case, u: int, name: str) -> float:
    updates = case.updates[u]
    level = updates[0].unclipped or updates[0].gradients
    own = [each.own[name] for each in updates if name in each.own]
    rows = own if len(own) == len(updates) else [case.one.updates[u].gradients[name]]
    mean = torch.tensor(rows, dtype=torch.float64).mean(0)
    ours = torch.tensor(level[name], dtype=torch.float64)
    return ((ours @ mean) / (mean @ mean)).item()


def clipped_and_summed(case: Case) -> str:
    """Find gradients that ranks clip first, and sum then."""
    for u in case.judged():
        updates = case.updates[u]
        if not _clips_first(updates):
            continue
        sizes = [(each.norm, each.most) for each in updates]
        shares = [min(1.0, m / (n + 1e-6)) for n, m in sizes if n is not None and m]
        factors, left = made_of(updates[0].gradients, [each.own for each in updates])
        near = all(abs(f - s) < 1e-3 * s for f, s in zip(factors, shares))
        if len(shares) == len(updates) and left < ROUNDED and near:
            return (
                f"update {u}: the ranks' own gradients count {numbers(factors)} times "
                f"(clipped to {numbers(shares)} of their length)"
            )
    return ""


def divided_by_n(case: Case) -> str:
    """Find means of the ranks' gradients that are divided once more."""
    for u, labels in _judged_labels(case):
        if _of_one_kind(labels, "divided twice"):
            return (
                f"update {u}: they are 1/{case.n} of the mean of the ranks' gradients"
            )
    return ""


def _uses_the_last(updates: list[Update]) -> bool:
    """Return whether ranks step with the last gradients alone, not with kept ones, too."""
    first = updates[0]
    whole, parts = first.unclipped or first.gradients, [each.own for each in updates]
    return made_of(whole, parts)[1] < ROUNDED


def zeroed(case: Case) -> str:
    """Find micro-batches whose gradients are dropped before the update."""
    for record in [*case.ranks, case.one]:
        for u, update in enumerate(record.updates):
            beside = case.updates[u : u + 1] if record is not case.one else [[update]]
            if update.lost and (
                not update.replaced or any(map(_uses_the_last, beside))
            ):
                who = f"rank {record.rank} of {case.n}"
                who = "one process" if record is case.one else who
                return (
                    f"update {u} in {who}: of {update.lost + update.kept} items that "
                    f"went forward, the gradients of {update.lost} were set to zero"
                )
    return ""


def never_forwarded(case: Case) -> str:
    """Find items of a batch that never go through the model."""
    if not case.live.differs:
        return ""
    for record in [*case.ranks, case.one]:
        for number, step in enumerate(record.steps):
            if 0 < step.forwarded < step.rows:
                whole = case.one.steps[number] if number < len(case.one.steps) else step
                return (
                    f"step {number}: of its {step.rows} items, rank {record.rank} of "
                    f"{case.n} trains on {step.forwarded}; one process trains on "
                    f"{whole.forwarded} of {whole.rows}"
                )
    return ""


def updates_by_rank(case: Case) -> str:
    """Find an optimizer that steps after another number of batches."""
    ours, theirs = len(case.ranks[0].updates), len(case.one.updates)
    steps = len(case.one.steps)
    if not case.live.differs or ours == theirs or len(case.ranks[0].steps) != steps:
        return ""
    return (
        f"in {steps} steps, one process updates {theirs} times, and each of {case.n} "
        f"ranks {ours} times"
    )


def clipped_early(case: Case) -> str:
    """Find gradients that are clipped before the last micro-batch, and so not averaged."""
    for u, updates in enumerate(case.updates):
        if case.live.differs and updates[0].clipped_early and not case.right(u):
            first = updates[0]
            return (
                f"update {u}: rank 0 of {case.n} clips {first.clipped_early} times "
                f"before the last of its {first.backwards} backward passes"
            )
    return ""


def clipped_alone(case: Case) -> str:
    """Find gradients that are clipped by a rank's own norm, or unlike one process'."""
    for u in case.judged():
        updates, alone = case.updates[u], case.beside(u)
        agree = max(apart(each.gradients, updates[0].gradients)[0] for each in updates)
        if _clips_first(updates):
            evidence = _by_own_norms(updates, alone)
        elif all(each.shards for each in updates):
            evidence = _shards_by_own_norms(updates)
        elif len({frozenset(each.gradients) for each in updates}) > 1:
            evidence = _shares_by_own_norms(updates)
        elif all(each.unclipped for each in updates):
            evidence = _unlike(updates, alone, agree)
        else:
            evidence = _by_hand(case, updates, alone) if agree < LATER else ""
        if evidence:
            return f"update {u}: {evidence}"
    return ""


def _by_own_norms(updates: list[Update], alone: Update | None) -> str:
    norms = [each.norm for each in updates if each.norm is not None]
    beside = f", one process by {alone.norm:.3g}" if alone and alone.norm else ""
    if not norms:  # clipped by value
        return "the gradients that ranks clip differ between them"
    return f"the ranks clip by norms of their own, {numbers(norms)}{beside}"


def _shards_by_own_norms(updates: list[Update]) -> str:
    """Find evidence that each rank scales its shards by a factor of its own."""
    scales = []
    for each in updates:
        (factor,), left = made_of(each.shards_used, [each.shards])
        if left > ROUNDED:
            return ""
        scales.append(factor)
    if max(scales) - min(scales) < 1e-6 * max(map(abs, scales)):
        return ""
    return f"each rank scales its own shards, by {numbers(scales)}"


def _shares_by_own_norms(updates: list[Update]) -> str:
    """Find evidence that ranks scale averaged gradients, each those that it steps with."""
    scales = []
    for update in updates:
        names = [
            n for n in update.gradients if all(n in e.own | e.aside for e in updates)
        ]
        mean = {
            n: torch.tensor([(e.own | e.aside)[n] for e in updates]).mean(0).tolist()
            for n in names
        }
        (factor,), left = made_of({n: update.gradients[n] for n in names}, [mean])
        if left > ROUNDED or factor > 1 + 1e-6:
            return ""
        scales.append(factor)
    if max(scales) - min(scales) < 1e-6 * max(map(abs, scales)):
        return ""
    return f"each rank scales the gradients of its share, by {numbers(scales)}"


def _unlike(updates: list[Update], alone: Update | None, agree: float) -> str:
    """Find evidence that averaged gradients are clipped, but not as in one process."""
    if set(labels_of(updates, "unclipped").values()) != {"mean"}:
        return ""
    sizes = numbers(length(each.gradients) for each in updates)
    sizes = f"equal gradients have lengths {sizes} on the ranks when clipped"
    if agree > LATER:
        return sizes
    if not alone or not alone.unclipped or not updates[0].unclipped:
        return ""
    before = apart(updates[0].unclipped, alone.unclipped)[0]
    after = apart(updates[0].gradients, alone.gradients)[0]
    if before > LATER or after < LATER:
        return ""
    return f"{sizes}, and {length(alone.gradients):.3g} in one process"


def _by_hand(case: Case, updates: list[Update], alone: Update | None) -> str:
    """Find evidence that ranks count by factors, where torch's clipping is not called."""
    if "other" not in labels_of(updates).values():
        return ""
    factors, left = made_of(updates[0].gradients, [each.own for each in updates])
    uneven = max(factors) - min(factors) > 1e-3 * max(map(abs, factors))
    sizes = [len(r.steps[each.step].items) for r, each in zip(case.ranks, updates)]
    if left > ROUNDED or (uneven and len(set(sizes)) > 1):
        return ""
    if uneven:
        counts = numbers(factors)
        return (
            f"the ranks' own gradients count {counts} times, not {1 / case.n:.3g} each"
        )
    if alone:
        by, left = made_of(alone.gradients, [alone.own])
        differ = abs(sum(factors) - by[0]) > 1e-3 * by[0]
        if left < ROUNDED and by[0] < 1 - 1e-6 and differ:
            ours = f"the mean of the ranks is scaled by {sum(factors):.3g}"
            return f"{ours}, one process' gradient by {by[0]:.3g}"
    return ""
