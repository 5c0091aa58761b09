"""Mistakes of items and their order."""

import itertools
from collections import Counter
from collections.abc import Iterator

from .comparing import Case, flat
from .recording import Record


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
