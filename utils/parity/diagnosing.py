"""One table of mistakes: what each is called, what is said, and how it is seen.

A diagnosis is a function of the records that returns its evidence, or nothing. The table is
in the order of cause and effect: what an earlier row explains, a later one leaves alone.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from .comparing import FIRST, LATER, ROUNDED, Case, flat
from .recording import Record, Records, Step, Update
from .sketches import apart, length, made_of


class Finding(NamedTuple):
    """A mistake: a short name, what it is and how to mend it, and its evidence."""

    name: str
    sentence: str
    evidence: str


class Diagnosis(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the finding; several rows may have one name.
        sentence: what it is, and how to mend it.
        find: returns the evidence, or "".
        unless: names of findings that are its cause, or say the same.
        parts: whether it may be why N workers part from one process.
    """

    name: str
    sentence: str
    find: Callable[[Case], str]
    unless: tuple[str, ...] = ()
    parts: bool = True


def numbers(values: Iterable[float]) -> str:
    """Return numbers as they stand in an evidence."""
    return ", ".join(f"{value:.3g}" for value in values)


def _thousands(sizes: Iterable[int]) -> str:
    return " and ".join(f"{size:,}" for size in dict.fromkeys(sizes))


# ------------------------------------------------------------------- items and their order


def unequal_steps(case: Case) -> str:
    """Find ranks that have unequal numbers of batches."""
    ranks = [
        runs["float64"] for runs in case.together
    ]  # with orders beyond the trained
    found = case.ranks[0].unequal_steps
    if not found and all(rank.whole for rank in ranks):
        by_epoch = enumerate(zip(*(rank.orders for rank in ranks)))
        counted = ((epoch, [*map(len, orders)]) for epoch, orders in by_epoch)
        found = next((each for each in counted if len(set(each[1])) > 1), None)
    if not found:
        return ""
    epoch, counts = found
    return f"{case.n} ranks have {counts} batches in epoch {epoch}"


def odd_index(case: Case) -> str:
    """Find an index that means another item on another rank."""
    if not case.odd_items or case.loose:
        return ""
    rank, item = case.odd_items[0]
    return (
        f"item {item} of rank {rank} of {case.n} is not item {item} elsewhere, and so "
        f"are {len(case.odd_items)} that were seen"
    )


def equal_batches(case: Case) -> str:
    """Find ranks that all have the same batch, of items that nobody can identify."""
    if case.identified or len(case.one.steps) < 2:
        return ""
    pairs = [*zip(*(rank.steps for rank in case.ranks))]
    equal = [p for p in pairs if p[0].contents and len({s.contents for s in p}) == 1]
    distinct = {step.contents for step in case.ranks[0].steps}
    if not pairs or len(equal) < len(pairs) or len(distinct) < 2:
        return ""
    return (
        f"in {len(equal)} of {len(pairs)} steps, all of {case.n} ranks have one batch"
    )


def _epochs(case: Case) -> Iterator[tuple[int, Counter, Counter, bool]]:
    """Yield an epoch, items that ranks see too often, those they never see, and if all."""
    records = [case.one, *case.ranks]
    cut = case.ranks[0].unequal_steps and not case.ranks[0].whole
    if not case.identified or _cannot_be_shared(case) or cut:
        return
    for epoch in range(min(len(record.orders) for record in records)):
        alone = flat(case.one.orders[epoch])
        together = sum((flat(rank.orders[epoch]) for rank in case.ranks), Counter())
        more, never = together - alone, alone - together
        if not all(record.whole for record in records):
            never = Counter()  # they may come later in this epoch
            if max(alone.values(), default=0) > 1:
                return
            more = Counter({i: c - 1 for i, c in together.items() if c > 1})
        whole = together == Counter({item: case.n * c for item, c in alone.items()})
        if more or never:
            yield epoch, more, never, whole


def _items(case: Case, kind: str) -> str:
    for epoch, more, never, whole in _epochs(case):
        found = "all" if whole else "repeated" if not never else "dealt"
        total = flat(case.one.orders[epoch]).total()
        said = (
            f"epoch {epoch}, {case.n} ranks: of {total} items of one process, "
            f"{never.total()} are never seen, and {more.total()} are seen too often"
        )
        return said if found == kind else ""
    return ""


def every_item(case: Case) -> str:
    """Find ranks that each see all items."""
    return _items(case, "all")


def repeated_items(case: Case) -> str:
    """Find items that ranks see twice, where none is missing."""
    return _items(case, "repeated")


def badly_dealt(case: Case) -> str:
    """Find items that the ranks of an epoch see twice, or never."""
    return _items(case, "dealt")


def _fixed(record: Record) -> bool:
    return len(record.orders) > 1 and record.orders[0] == record.orders[1]


def same_order(case: Case) -> str:
    """Find epochs that all have one order, of a program that means to shuffle."""
    records = [case.one, *case.ranks]
    if not case.identified or len(case.one.steps) < 4:
        return ""
    if not all(map(_fixed, case.ranks)):
        return ""
    fixed = _fixed(case.one)
    if fixed and not all(record.shuffles for record in records):
        return ""  # it does not want to shuffle, as far as one sees
    first = [*itertools.chain.from_iterable(case.ranks[0].orders[0])][:4]
    return (
        f"rank 0 of {case.n} sees items {', '.join(map(str, first))} first in epoch 0 "
        "and in epoch 1"
        + ("" if fixed else ", while one process sees another order in each")
    )


def _sizes(case: Case) -> tuple[int, int]:
    """Return how many items the first point takes on all ranks, and in one process."""
    pair = case.still
    if not pair.points or not all(pair.of_ranks):
        return 0, 0
    theirs = sum(len(step.items) for step in pair.steps(pair.one, pair.points[0]))
    ours = sum(
        len(step.items)
        for rank, points in zip(pair.ranks, pair.of_ranks)
        for step in pair.steps(rank, points[0])
    )
    return ours, theirs


def _cannot_be_shared(case: Case) -> bool:
    ours, theirs = _sizes(case)
    return ours == case.n * (theirs // case.n) < theirs


def cannot_be_shared(case: Case) -> str:
    """Find a batch that ranks cannot share equally."""
    ours, theirs = _sizes(case)
    if not _cannot_be_shared(case):
        return ""
    return f"a step takes {theirs} items in one process, and {ours} on {case.n} ranks"


def global_batch(case: Case) -> str:
    """Find a global batch that is larger than that of one process, in fewer steps."""
    ours, theirs = _sizes(case)
    if ours <= theirs or case.ranks[0].unequal_steps:
        return ""
    in_a_step = sum(len(rank.steps[0].items) for rank in case.ranks)
    if in_a_step == len(case.one.steps[0].items):
        return ""  # then updates come after another number of steps
    here, there = (
        len(record.orders[0]) // (1 + points[0].last)
        for record, points in (
            (case.ranks[0], case.still.of_ranks[0]),
            (case.one, case.still.points),
        )
    )
    if case.one.whole and here >= there:
        return ""
    return (
        f"an update takes {theirs} items in one process, and {ours} on {case.n} ranks "
        f"({there} updates, and {here})"
    )


def other_order(case: Case) -> str:
    """Find items that are seen once, but in other steps than in one process."""
    pair, at = case.still, case.still.items_differ
    if at is None or at >= len(pair.points) or not case.identified:
        return ""
    if (
        any(at >= len(points) for points in pair.of_ranks)
        or case.ranks[0].unequal_steps
    ):
        return ""
    theirs = flat(step.items for step in pair.steps(pair.one, pair.points[at]))
    ours = flat(
        step.items
        for rank, points in zip(pair.ranks, pair.of_ranks)
        for step in pair.steps(rank, points[at])
    )
    if not theirs - ours:
        return ""  # it takes more
    return (
        f"step {pair.points[at].last}: {(theirs - ours).total()} of {theirs.total()} "
        f"items of one process are not in that step of {case.n} ranks"
    )


# ------------------------------------------------------------------------ before training


def _start(case: Case, key: str) -> str:
    first = case.ranks[0]
    for rank in case.ranks:
        size, name = apart(getattr(rank, key), getattr(first, key))
        if size > FIRST:
            return f"`{name}` of rank {rank.rank} is {size:.1e} from that of rank 0"
    return ""


def ranks_start_apart(case: Case) -> str:
    """Find weights or buffers that differ between ranks before training."""
    return _start(case, "start") or _start(case, "start_buffers")


def start_by_n(case: Case) -> str:
    """Find weights or buffers whose start is another one than in one process."""
    for key in ("start", "start_buffers"):
        size, name = apart(getattr(case.ranks[0], key), getattr(case.one, key))
        if size > FIRST:
            return f"`{name}` on {case.n} ranks is {size:.1e} from that of one process"
    return ""


# ------------------------------------------------------------------------------ averaging


def _label(applied: list, own: list, whole: float) -> str:
    """Say how the gradient of one tensor on each rank was made of the ranks' own ones."""
    applied = [torch.tensor(a, dtype=torch.float64) for a in applied]
    mine = torch.tensor(own, dtype=torch.float64)
    mean = mine.mean(0)
    scale = max(mean.norm().item(), mine.norm(dim=1).mean().item(), 1e-4 * whole)
    near = ROUNDED * scale

    def all_are(expected: Iterable[torch.Tensor]) -> bool:
        return all((a - e).norm() < near for a, e in zip(applied, expected))

    n = len(own)
    if all_are([mean] * n):
        return "mean"
    if all_are([mean * n] * n):
        return "sum"
    if all_are([mean / n] * n):
        return "divided twice"
    differ = max((each - mine[0]).norm().item() for each in mine) > 10 * near
    return "own" if differ and all_are(mine) else "other"


def _labels(updates: list[Update], level: str = "gradients") -> dict[str, str]:
    """Return `_label` of each parameter whose own gradients are known.

    A gradient that only some of the ranks have is their own.
    """
    at = [getattr(update, level) or {} for update in updates]
    whole = max((length(update.own) for update in updates), default=0.0)
    found = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(at)):
        own = [update.own.get(name) for update in updates]
        if all(own) and max(math.hypot(*(each or [])) for each in own) < 1e-8 * whole:
            continue  # zero, but for rounding
        if all(name in each for each in at) and all(own):
            found[name] = _label([each[name] for each in at], own, whole)
        elif any(name not in each for each in at) and any(own):
            found[name] = "own"
    return found


def _level(updates: list[Update]) -> str:
    """Return the gradients to look at: before clipping, if that was seen."""
    return "unclipped" if all(each.unclipped for each in updates) else "gradients"


def _labels_beside(case: Case, u: int) -> dict[str, str]:
    """Do as `_labels`, where ranks' own gradients never exist, as with FSDP2."""
    alone = case.beside(u)
    if not alone:
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
    before = set(_labels(updates, "unclipped").values())
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
        labels = _labels(updates, _level(updates)) or _labels_beside(case, u)
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


# --------------------------------------------------------------------------- accumulation


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


# ------------------------------------------------------------------------------- clipping


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


def _unlike(updates: list[Update], alone: Update | None, agree: float) -> str:
    """Find evidence that averaged gradients are clipped, but not as in one process."""
    if set(_labels(updates, "unclipped").values()) != {"mean"}:
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
    if "other" not in _labels(updates).values():
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


# ---------------------------------------------------- what a gradient is computed from


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
    if set(_labels(found[2], _level(found[2])).values()) != {"mean"}:
        return ""
    return (
        f"step {step}: one process' gradient is {sum(factors):.3f} times the mean of "
        f"{case.n} ranks"
    )


def partly_divided(case: Case) -> str:
    """Find gradients that are 1/N of one process', but for some parameters."""
    found = _content(case)
    if not found or set(_labels(found[2], _level(found[2])).values()) != {"mean"}:
        return ""
    step, alone, updates = found
    by_name = {}
    for name in alone.own:
        if math.hypot(*alone.own[name]) < 1e-8 * length(alone.own):
            continue
        parts = [{name: each.own[name]} for each in updates if name in each.own]
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


# ---------------------------------------------------------------- optimizers and modules


def _options(case: Case, only: Callable[[str], bool]) -> tuple[int, str, list[float]]:
    """Return the first update with another option, its name, and it on ranks and alone."""
    pair = case.still
    by_step = len(case.ranks[0].steps) != len(case.one.steps)
    if (
        by_step
        and not case.ranks[0].unequal_steps
        and len(pair.points) != len(pair.of_ranks[0])
    ):
        return -1, "", []  # then a schedule of so many steps rightly differs
    for u, updates in enumerate(case.updates):
        alone = case.one.updates[u] if u < len(case.one.updates) else None
        for k, group in enumerate(updates[0].options):
            for name, value in group.items():
                if not only(name):
                    continue
                ours = [e.options[k].get(name, value) for e in updates]
                theirs = ours[0]
                if alone and k < len(alone.options):
                    theirs = alone.options[k].get(name, value)
                if any(not math.isclose(each, theirs, rel_tol=1e-9) for each in ours):
                    return u, name, [*ours, theirs]
    return -1, "", []


def _rate(case: Case, kind: str) -> str:
    u, _, values = _options(case, lambda name: name == "lr")
    if u < 0:
        return ""
    *ours, theirs = values
    if any(each != ours[0] for each in ours):
        return f"update {u}: {numbers(ours)} on the ranks" if kind == "ranks" else ""
    if kind != ("later" if u else "first"):
        return ""
    return f"update {u}: {ours[0]:.4g} on {case.n} ranks, {theirs:.4g} in one process"


def rates_of_ranks(case: Case) -> str:
    """Find learning rates that differ between ranks."""
    return _rate(case, "ranks")


def rate_by_n(case: Case) -> str:
    """Find a first learning rate that is not that of one process."""
    return _rate(case, "first")


def schedule_by_n(case: Case) -> str:
    """Find learning rates that come to differ from those of one process."""
    return _rate(case, "later")


def other_option(case: Case) -> str:
    """Find another number among the options of the optimizer."""
    u, option, values = _options(case, lambda name: name != "lr")
    if u < 0 or not case.live.differs:
        return ""
    *ours, theirs = values
    return (
        f"update {u}: `{option}` is {numbers(ours)} on {case.n} ranks, and "
        f"{theirs:.4g} in one process"
    )


def statistics_of_a_share(case: Case) -> str:
    """Find BatchNorm that takes its statistics of a rank's own items."""
    one, ranks = case.live.one, case.live.ranks
    if not case.live.differs or not one.batch_norms:
        return ""
    first = [rank.steps[0].buffers for rank in ranks if rank.steps]
    for norm in one.batch_norms:
        name = f"{norm}.running_mean" if norm else "running_mean"
        if len(first) == case.n and all(name in each for each in first):
            rows = [{name: each[name]} for each in first]
            size = max(apart(each, rows[0])[0] for each in rows)
            before = {name: one.start_buffers.get(name, [])}
            if size > LATER and apart(rows[0], before)[0] > 0:
                said = f"`{name}` differs by {size:.1e} between {case.n} ranks"
                return f"after one step, {said}"
    if not case.still.differs:
        return f"it differs at {case.live.differs}, and with BatchNorm frozen nowhere"
    return ""


def modes(case: Case) -> str:
    """Find a rank that trains in another mode than the others."""
    for number, steps in enumerate(zip(*(rank.steps for rank in case.live.ranks))):
        for rank, step in enumerate(steps):
            if step.evaluating != steps[0].evaluating:
                odd = set(step.evaluating) ^ set(steps[0].evaluating)
                what = ", ".join(f"`{name}`" for name in sorted(odd)[:3] if name)
                there = 0 if steps[0].evaluating else rank
                return (
                    f"step {number}: on rank {there} of {case.n} {what or 'the model'} "
                    f"is in evaluation mode, and not on rank {rank - there}"
                )
    return ""


# ---------------------------------------------------------------------------------- noise


def same_draws(case: Case) -> str:
    """Find dropout, or other noise of a step, that is the same on two ranks."""
    for first, second in itertools.combinations(case.noise(), 2):
        pairs = [*zip(first.steps, second.steps)]
        draws = [(a.draws, b.draws) for a, b in pairs if a.draws]
        if draws and all(a == b for a, b in draws):
            masks = sum(len(a) for a, _ in draws)
            drawn = sum(draw.size for a, _ in draws for draw in a)
            return (
                f"{masks} of {masks} draws ({drawn} numbers) are equal on ranks "
                f"{first.rank} and {second.rank} of {case.n}"
            )
    return ""


def _drawn_alone(case: Case, number: int, name: str, step: Step) -> bool:
    """Return whether a rank draws less in a step than one process: not for the batch."""
    alone = case.alone.get("noise")
    if not alone or number >= len(alone.steps):
        return False
    return (
        alone.steps[number].random_step.get(name, (0, 0))[1] > step.random_step[name][1]
    )


def same_states(case: Case) -> str:
    """Find a generator of items, or of a step, that is in one state on two ranks.

    Generators with other seeds are in no state alike, ever: one is enough.
    """
    for first, second in itertools.combinations(case.noise(), 2):
        ranks = f"ranks {first.rank} and {second.rank} of {case.n}"
        for number, (a, b) in enumerate(zip(first.steps, second.steps)):
            for ours, theirs in zip(a.random_items, b.random_items):
                for name in ours:
                    if ours[name] == theirs.get(name):
                        return (
                            f"step {number}: {name} draws for the items, and is in the "
                            f"same state on {ranks}"
                        )
            for name, (state, _) in a.random_step.items():
                alike = state == b.random_step.get(name, (None, 0))[0]
                if alike and _drawn_alone(case, number, name, a):
                    return (
                        f"step {number}: {name} draws for the items of the batch, and "
                        f"is in the same state on {ranks}"
                    )
    return ""


def unseeded(case: Case) -> str:
    """Find two runs of one process whose noise differs."""
    if "noise again" not in case.alone:
        return ""
    pairs = [*zip(case.alone["noise"].steps, case.alone["noise again"].steps)]
    for what in ("draws", "random_items", "random_step"):
        differ = [k for k, (a, b) in enumerate(pairs)
                  if getattr(a, what) != getattr(b, what)]  # fmt: skip
        if differ:
            return (
                "two equal runs of one process draw differently in "
                f"{len(differ)} of {len(pairs)} steps"
            )
    return ""


# ----------------------------------------------- what ranks hold, and come to differ in


def _parted(ranks: Records, kind: str, ignore: tuple[str, ...] = ()):
    """Return the first step, rank and name of something that is not as on rank 0."""
    for number, steps in enumerate(zip(*(rank.steps for rank in ranks))):
        for rank, step in enumerate(steps):
            for name, here in getattr(step, kind).items():
                there = {name: getattr(steps[0], kind).get(name, [])}
                size = apart({name: here}, there)[0]
                if size > LATER and not name.startswith(ignore or ("\0",)):
                    return number, rank, name, size
    return None


def _norms(case: Case) -> tuple[str, ...]:
    return tuple(f"{norm}." for norm in case.one.batch_norms)


def _buffers(case: Case, kind: str) -> str:
    found = _parted(case.ranks, "buffers", _norms(case))
    if not found:
        return ""
    number, rank, name, size = found
    changed = []
    for each in case.ranks:
        before = each.steps[number - 1].buffers if number else each.start_buffers
        changed.append(before.get(name) != each.steps[number].buffers[name])
    if kind != ("all" if len(set(changed)) == 1 else "some"):
        return ""
    said = f"step {number}: `{name}` of rank {rank} of {case.n} is {size:.1e} from rank 0's"
    who = ", ".join(str(k) for k, each in enumerate(changed) if each)
    return said if kind == "all" else f"{said}; it changes on rank {who} alone"


def buffers_of_shares(case: Case) -> str:
    """Find buffers that each rank computes from its own items."""
    return _buffers(case, "all")


def buffers_of_some(case: Case) -> str:
    """Find buffers that only some of the ranks change."""
    return _buffers(case, "some")


def state_beside(case: Case) -> str:
    """Find what is held beside model and optimizer, and differs between ranks."""
    found = _parted(case.ranks, "state")
    if not found or _parted(case.ranks, "parameters"):
        return ""
    number, rank, name, size = found
    return f"step {number}: `{name}` of rank {rank} of {case.n} is {size:.1e} from rank 0's"


def weights_part(case: Case) -> str:
    """Find weights that come apart although equal gradients reach equal optimizers."""
    if not case.live.differs:
        return ""
    return _weights(case.ranks, case.n)


def weights_part_by_noise(case: Case) -> str:
    """Find weights that differ between ranks where noise is not taken out."""
    if case.live.differs or len(case.noise()) < case.n:
        return ""
    return _weights(case.noise(), case.n)


def _weights(ranks: Records, n: int) -> str:
    found = _parted(ranks, "parameters")
    if not found:
        return ""
    number, rank, name, size = found
    return f"step {number}: `{name}` of rank {rank} of {n} is {size:.1e} from rank 0's"


def shards_nothing(case: Case) -> str:
    """Find a strategy that claims to shard, where each rank holds the whole state."""
    if not all(rank.sharded for rank in case.ranks):
        return ""
    alone = case.one.shared_bytes
    each = [rank.shared_bytes for rank in case.ranks]
    if not alone or sum(each) / case.n < 0.95 * alone:
        return ""
    return (
        f"bytes of state per rank: {_thousands(each)} on {case.n} ranks, {alone:,} in "
        "one process"
    )


def not_finite(case: Case) -> str:
    """Find gradients or weights that are infinite, or no number, in any run."""
    whose = [("one process", case.alone)]
    whose += [(f"rank {k} of {case.n}", runs) for k, runs in enumerate(case.together)]
    for who, runs in whose:
        for key, record in runs.items():
            seen = [(f"the gradient of `{name}`", update.step, found)
                    for update in record.updates
                    for name, found in (update.gradients | update.own).items()]  # fmt: skip
            seen += [(f"`{name}`", number, found)
                     for number, step in enumerate(record.steps)
                     for name, found in step.parameters.items()]  # fmt: skip
            for what, number, found in seen:
                if not all(map(math.isfinite, found)):
                    return f"step {number}: {what} in {who} ({key})"
    return ""


# --------------------------------------------------------------------- nothing is trained


def _trains(case: Case) -> bool:
    return any(
        apart(step.parameters, record.start)[0]
        for record in [case.one, *case.ranks]
        for step in record.steps
    )


def no_update(case: Case) -> str:
    """Find a training that never updates a weight, and calls no optimizer."""
    if _trains(case) or any(record.updates for record in [case.one, *case.ranks]):
        return ""
    return (
        f"in {len(case.one.steps)} steps of {len(case.one.orders)} epochs, in one "
        f"process and on {case.n} ranks"
    )


def _idle(case: Case) -> str:
    return (
        f"after {len(case.one.updates)} updates, all {len(case.one.start)} parameters "
        f"are as at the start, in one process and on {case.n} ranks"
    )


def no_gradient(case: Case) -> str:
    """Find an optimizer of the model's own parameters, which never have a gradient."""
    updates = [u for record in [case.one, *case.ranks] for u in record.updates]
    if _trains(case) or not updates or any(u.gradients or u.foreign for u in updates):
        return ""
    return f"{_idle(case)}; no update of {len(updates)} sees a gradient"


def other_parameters(case: Case) -> str:
    """Find an optimizer whose updates change no weight."""
    updates = [u for record in [case.one, *case.ranks] for u in record.updates]
    return _idle(case) if updates and not _trains(case) else ""


# ------------------------------------------------------------------------------ the table

_ITEMS = ("items", "same order", "global batch", "unequal batches")
_AVERAGING = ("not averaged", "summed", "divided twice")
_SEED = "seed each rank differently once the weights are built, as in `wrap`"
_SUM = "gradients are summed over the ranks, not averaged: divide by the world size"

TABLE = [
    Diagnosis(
        "not finite",
        "a gradient or weight is infinite, or no number: is something divided by a "
        "number that may be 0, such as a count of items?",
        not_finite,
    ),
    Diagnosis(
        "nothing trained",
        "no optimizer takes a step, so there is nothing to compare: call "
        "`optimizer.step()`, or train until it is called (`--steps`)",
        no_update,
    ),
    Diagnosis(
        "nothing trained",
        "no step changes a weight, as no gradient is there when the optimizer steps: "
        "is the last backward kept from averaging (`set_requires_gradient_sync`), or "
        "everything frozen?",
        no_gradient,
        unless=("nothing trained",),
    ),
    Diagnosis(
        "nothing trained",
        "no step changes a weight: the optimizer was made before the wrap, whose "
        "parameters are new ones. Wrap first (or is the learning rate 0?)",
        other_parameters,
        unless=("nothing trained",),
    ),
    Diagnosis(
        "unequal batches",
        "ranks have unequal numbers of batches, so one waits for the others for ever: "
        "give all ranks equally many (`drop_last=True`)",
        unequal_steps,
    ),
    Diagnosis(
        "items",
        "an index means another item on another rank: make the same data set on all",
        odd_index,
    ),
    Diagnosis(
        "items",
        "all ranks draw the same batch: seed what chooses the items by the rank, or "
        "let all ranks draw the whole batch and take their share of it",
        equal_batches,
    ),
    Diagnosis(
        "global batch",
        "ranks cannot share the batch equally: choose a batch size, and a number of "
        "items, that every world size divides, or other world sizes (`--world-sizes`)",
        cannot_be_shared,
    ),
    Diagnosis(
        "global batch",
        "the global batch grows with the number of workers: divide the batch size by "
        "the world size, or compare with one process that has the larger batch",
        global_batch,
        unless=("items", "unequal batches", "global batch"),
    ),
    Diagnosis(
        "items",
        "every rank sees every item: deal with a DistributedSampler (rank, world size, "
        "equal seeds)",
        every_item,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "items",
        "items are seen twice: deal with a DistributedSampler (rank, world size, equal "
        "seeds); it repeats items to give all ranks equally many: `drop_last=True`",
        repeated_items,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "items",
        "items are seen twice or never: deal with a DistributedSampler (rank, world "
        "size, equal seeds)",
        badly_dealt,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "same order",
        "items come in the same order in every epoch: call `sampler.set_epoch(epoch)`",
        same_order,
        parts=False,
    ),
    Diagnosis(
        "other order",
        "each item is seen once, but in other steps than in one process: deal item i "
        "of a common order to rank i % N",
        other_order,
        unless=(*_ITEMS, "not finite"),
    ),
    Diagnosis(
        "start",
        "ranks differ before training: seed every rank equally before the model is "
        "built, or broadcast from rank 0",
        ranks_start_apart,
    ),
    Diagnosis(
        "start",
        "the start depends on the number of workers, or on chance: seed the generator "
        "in `build_model`",
        start_by_n,
        unless=("start",),
    ),
    Diagnosis(
        "not averaged",
        "gradients are not averaged over the ranks: each rank steps with its own (a "
        "wrap that is bypassed, or `no_sync` around the last backward?)",
        not_averaged,
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, made after the model was wrapped: wrap the "
        "model when it is complete",
        made_late,
        unless=("not averaged",),
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, frozen when the model was wrapped, and "
        "trained later: wrap the model when it is complete",
        trained_late,
        unless=("not averaged",),
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, unused or forgotten in averaging: wrap the "
        "model when it is complete",
        forgotten,
        unless=("not averaged",),
    ),
    Diagnosis("summed", _SUM, summed),
    Diagnosis("summed", _SUM, clipped_and_summed, unless=("summed",)),
    Diagnosis(
        "divided twice",
        "gradients are divided by the world size once too often",
        divided_by_n,
    ),
    Diagnosis(
        "accumulation",
        "micro-batches are dropped: gradients are set to zero between the backward "
        "passes of one update",
        zeroed,
    ),
    Diagnosis(
        "accumulation",
        "micro-batches are dropped: a part of the batch never goes through the model",
        never_forwarded,
        unless=("accumulation",),
    ),
    Diagnosis(
        "accumulation",
        "the optimizer steps after another number of batches than in one process: does "
        "something count per rank?",
        updates_by_rank,
        unless=("accumulation",),
    ),
    Diagnosis(
        "clipping",
        "gradients are clipped after each micro-batch, when they are a rank's own "
        "still: clip once, after the last backward",
        clipped_early,
    ),
    Diagnosis(
        "clipping",
        "clipping counts per rank: clip when the gradients are averaged, by their norm "
        "over all ranks",
        clipped_alone,
        unless=("clipping",),
    ),
    Diagnosis(
        "divided twice",
        "gradients are divided by the world size once too often: DDP averages, so "
        "leave the loss as it is (and make it a mean over items, not a sum; with "
        "micro-batches, a mean over all of them)",
        divided_once_too_often,
        unless=("not finite", "divided twice", "accumulation", "start", *_ITEMS),
    ),
    Diagnosis(
        "divided twice",
        "most gradients are divided by the world size once too often: what is gathered "
        "from other ranks lets no gradient through; gather with gradients "
        "(`torch.distributed.nn.functional.all_gather`)",
        partly_divided,
        unless=("not finite", "divided twice", "accumulation", "start", *_ITEMS),
    ),
    Diagnosis(
        "unequal batches",
        "ranks count equally, whatever their batches hold: weight each loss by what it "
        "is a mean of (items, tokens, weights of classes), or drop what is uneven",
        counted_equally,
        unless=("not finite", "accumulation", "start", "items", "unequal batches"),
    ),
    Diagnosis(
        "modes",
        "ranks train in different modes, so one has no dropout, say: call "
        "`model.train()` on all of them after an evaluation",
        modes,
    ),
    Diagnosis(
        "batch statistics",
        "BatchNorm normalizes by the statistics of each rank's own share: use "
        "GroupNorm, or SyncBatchNorm on GPUs",
        statistics_of_a_share,
    ),
    Diagnosis(
        "state",
        "what is held beside the model comes to differ between ranks (a teacher, an "
        "average of the weights, a centre): change it on all ranks, by the items of all",
        state_beside,
        unless=("start", *_AVERAGING),
    ),
    Diagnosis(
        "batch statistics",
        "a rank's gradient depends on which items share its batch, so no average of "
        "ranks is that of one process: a statistic of the batch, micro-batches or "
        "ranks whose loss is no mean over items, or what is gathered from the others",
        of_the_batch,
        unless=(
            "not finite",
            "start",
            "accumulation",
            "clipping",
            "items",
            "modes",
            "state",
            "divided twice",
        ),
    ),
    Diagnosis(
        "schedule",
        "learning rates differ between ranks: step the scheduler on all of them",
        rates_of_ranks,
    ),
    Diagnosis(
        "schedule",
        "the learning rate depends on the world size: for the same global batch, one "
        "learning rate fits",
        rate_by_n,
        unless=("schedule",),
    ),
    Diagnosis(
        "schedule",
        "a scheduler counts per rank, or per world size: for the same global batch, "
        "one learning rate fits",
        schedule_by_n,
        unless=("schedule",),
    ),
    Diagnosis(
        "options",
        "an option of the optimizer depends on the world size, or on the rank: for the "
        "same global batch, one fits",
        other_option,
        unless=("schedule",),
    ),
    Diagnosis(
        "same noise",
        f"dropout, or other noise in the step, is the same on every rank: {_SEED}",
        same_draws,
        parts=False,
    ),
    Diagnosis(
        "same noise",
        f"augmentation is the same on every rank: {_SEED}",
        same_states,
        unless=("same noise",),
        parts=False,
    ),
    Diagnosis(
        "unseeded noise",
        "what is drawn is not seeded, so no run can be repeated: seed torch, random "
        "and NumPy in your functions",
        unseeded,
        parts=False,
    ),
    Diagnosis(
        "buffers",
        "a buffer is computed from each rank's own items, and differs between ranks: "
        "average it, too",
        buffers_of_shares,
    ),
    Diagnosis(
        "buffers",
        "only some of the ranks change a buffer: do on all ranks what changes it",
        buffers_of_some,
    ),
    Diagnosis(
        "shards nothing",
        "the strategy claims to shard and does not: each rank holds the whole state",
        shards_nothing,
        parts=False,
    ),
    Diagnosis(
        "weights",
        "weights come to differ between ranks: does a rank do something that the "
        "others do not, or draw noise of its own for them?",
        weights_part_by_noise,
        unless=("not finite",),
    ),
]
# What is said of differing weights where nothing above explains them.
WEIGHTS = Diagnosis("weights", TABLE[-1].sentence, weights_part)
HARMLESS = {row.name for row in TABLE if not row.parts}


def diagnose(case: Case) -> list[Finding]:
    """Return all mistakes that the records of a number of workers show, causes first."""
    found: dict[str, Finding] = {}
    for row in TABLE:
        if found.keys() & set(row.unless) or row.name in found:
            continue
        if evidence := row.find(case):
            found[row.name] = Finding(row.name, row.sentence, evidence)
    unexplained = case.live.differs and not explains(case, found)
    if unexplained and (evidence := WEIGHTS.find(case)):
        found["weights"] = Finding("weights", WEIGHTS.sentence, evidence)
    return [*found.values()]


def explains(case: Case, names: Iterable[str]) -> bool:
    """Return whether one of the findings may be why N workers differ from one process.

    Noise is the same in the runs that are compared, if it can be pinned.
    """
    aside = {"shards nothing"} if case.loose else set(HARMLESS)
    if case.still.items_differ is not None:
        aside.discard("same order")
    return bool(set(names) - aside)
