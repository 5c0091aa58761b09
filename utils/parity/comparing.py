"""Ranks beside one process: which steps belong together, and where they part."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from .groups import Runs
from .recording import Record, Records, Update
from .sketches import Sketches, apart, apart_each, changes, length, made_of, relative

# float64: relative errors of the first update, and of later ones
FIRST, LATER = 1e-10, 1e-7
ROUNDED = 1e-5  # of a gradient that is said to be made of others
CHANGED = 1e-4  # of what an update adds to the weights


class Point(NamedTuple):
    """Calls of `train_step` that end with an update, of one rank."""

    first: int
    last: int
    updates: list[Update]


def points_of(record: Record) -> list[Point]:
    """Cut a record into points; without any update, each step is one.

    So runs can be compared that need another number of steps for an update, as those
    that accumulate as many items on any number of ranks.
    """
    by_step: dict[int, list[Update]] = {}
    for update in record.updates:
        by_step.setdefault(update.step, []).append(update)
    if not by_step:
        return [Point(k, k, []) for k in range(len(record.steps))]
    points, first = [], 0
    for number in sorted(by_step):
        points.append(Point(first, number, by_step[number]))
        first = number + 1
    return points


class Difference(NamedTuple):
    """Where N workers leave one process."""

    step: int  # of one process
    point: int
    update: int | None  # the optimizer's step, if its gradients differ first
    what: str
    size: float

    def __str__(self) -> str:
        by = f"by {self.size:.1e} of its size"
        if math.isinf(self.size):
            by = "which is not there, or no number, in all of them"
        return f"step {self.step}: {self.what}, {by}"


class Distances(NamedTuple):
    """Relative errors: the length of the difference over that of one process' values."""

    losses: float  # the mean over ranks, of all steps
    gradient: float  # of the first update
    parameters: float  # after the last step


def distances(alone: Record, together: Records) -> Distances:
    """Return how far ranks are from one process; the farthest of them counts.

    What a training does not have is nan: losses that it does not return, an update.
    """
    if any(len(rank.steps) != len(alone.steps) for rank in together):
        return Distances(math.inf, math.inf, math.inf)
    mean = torch.stack([_losses(rank) for rank in together]).mean(0)
    theirs = _losses(alone)
    pairs = [pair for rank in together for pair in zip(rank.updates[:1], alone.updates)]
    last = alone.steps[-1].parameters
    return Distances(
        ((mean - theirs).norm() / theirs.norm()).item(),
        max((relative(a.gradients, b.gradients) for a, b in pairs), default=math.nan),
        max(relative(rank.steps[-1].parameters, last) for rank in together),
    )


def _losses(record: Record) -> torch.Tensor:
    losses = [math.nan if step.loss is None else step.loss for step in record.steps]
    return torch.tensor(losses, dtype=torch.float64)


def flat(order: Iterable[tuple]) -> Counter:
    """Return how often each item is in an order."""
    return Counter(itertools.chain.from_iterable(order))


# ------------------------------------------------------------- which items are the same


def _told_by(record: Record, how: str) -> Record:
    """Return the same record with its items told by another attribute of its steps."""
    told = [getattr(step, how) for step in record.steps]
    steps = [
        replace(step, items=each, contents=each, raw=())
        for step, each in zip(record.steps, told)
    ]
    whole = [*map(len, record.contents)] == [*map(len, record.orders)]
    epochs = range(len(record.contents))
    return replace(
        record,
        orders=[[step.items for step in steps if step.epoch == e] for e in epochs],
        steps=steps,
        whole=record.whole and whole,
        identified=record.identified and not record.augmented,
    )


def _strangers(one: Record, ranks: Records) -> bool:
    """Return whether one process knows none of the ranks' items: they are no items then."""
    theirs = flat(step.items for step in one.steps)
    ours = flat(step.items for rank in ranks for step in rank.steps)
    return bool(ours) and not ours.keys() & theirs.keys()


def identified(one: Record, ranks: Records) -> tuple[Record, Records]:
    """Return the records with items that are told alike on all: by index, or content."""
    records = [one, *ranks]
    lengths = {record.length for record in records}
    if len(lengths) > 1:
        steps = [step for record in records for step in record.steps]
        # a batch may pad its items, and a data set does not
        how = "raw" if all(step.raw for step in steps) else "contents"
        one, *ranks = (_told_by(record, how) for record in records)
    if lengths == {None} and _strangers(one, ranks):
        other, *others = (_told_by(record, "columns") for record in records)
        if not _strangers(other, others):
            return other, others  # the second dimension is that of the items
    if all(record.length is None for record in [one, *ranks]) and _strangers(
        one, ranks
    ):
        one, *ranks = (replace(each, identified=False) for each in [one, *ranks])
    return one, ranks


def odd_items(one: Record, ranks: Records) -> list[tuple[int, Any]]:
    """Return rank and index of items that have other contents than in one process."""
    known, odd = {}, []
    for record in (one, *ranks):
        for step in record.steps:
            contents = step.raw or step.contents
            if one.length is not None and len(step.items) == len(contents):
                for item, content in zip(step.items, contents):
                    if known.setdefault((step.epoch, item), content) != content:
                        odd.append((record.rank, item))
    return odd


# ----------------------------------------------------------------- where two runs part


def _alike(ours: list[Sketches], alone: Sketches) -> list[str]:
    """Return names of what is one gradient on all ranks: averaged, or never their own."""
    return [
        name
        for name, numbers in ours[0].items()
        if name in alone
        and all(
            apart({name: each.get(name, [])}, {name: numbers})[0] < LATER
            for each in ours
        )
    ]


class Pair:
    """One process and the ranks of one kind of run.

    Attributes:
        one, ranks: their records, with items that are told alike.
        points: of one process; `of_ranks`: of each rank.
        items_differ: the first point whose items are not those of one process.
        differs: where the first number differs that has to be equal.
        unlike: where gradients differ before an optimizer that may make up for it.
        reordered: a buffer whose rows are those of one process, in another order.
    """

    def __init__(self, one: Record, ranks: Records, shaken: Record | None = None):
        self.one, self.ranks = identified(one, ranks)
        self.shaken = shaken
        self.points = points_of(self.one)
        self.of_ranks = [points_of(rank) for rank in self.ranks]
        self.items_differ = self._items_differ()
        self.unlike: dict[int, Difference] = {}  # by point
        self.reordered = ""
        self.differs = self._start() or self._first()

    def steps(self, record: Record, point: Point) -> list:
        """Return the steps of a point."""
        return record.steps[point.first : point.last + 1]

    def _items_differ(self) -> int | None:
        for number, point in enumerate(self.points):
            if any(number >= len(points) for points in self.of_ranks):
                return number
            ours = [
                step.items
                for rank, points in zip(self.ranks, self.of_ranks)
                for step in self.steps(rank, points[number])
            ]
            if flat(ours) != flat(step.items for step in self.steps(self.one, point)):
                return number
        return None

    def same_items(self, point: int) -> bool:
        """Return whether all items up to this point are those of one process."""
        return self.items_differ is None or point < self.items_differ

    def _start(self) -> Difference | None:
        for rank in self.ranks:
            for ours, theirs in (
                (rank.start, self.one.start),
                (rank.start_buffers, self.one.start_buffers),
            ):
                size, name = apart(ours, theirs)
                if size > FIRST:
                    return Difference(0, 0, None, f"`{name}` before training", size)
        return None

    def _first(self) -> Difference | None:
        """Return the first point at which gradients, weights or buffers differ."""
        for number, point in enumerate(self.points):
            if any(number >= len(points) for points in self.of_ranks):
                what = "the number of steps"
                return Difference(point.last, number, None, what, math.inf)
            theirs = [points[number] for points in self.of_ranks]
            if any(len(each.updates) != len(point.updates) for each in theirs):
                what = "the number of updates"
                return Difference(point.last, number, None, what, math.inf)
            difference = self._gradients(number, point, theirs)
            difference = difference or self._weights(number, point, theirs)
            if difference:
                return difference
        longest = max(map(len, self.of_ranks), default=0)
        if longest > len(self.points) or any(
            len(rank.steps) != len(self.one.steps) and not rank.updates
            for rank in self.ranks
        ):
            at, what = len(self.one.steps), "the number of steps"
            return Difference(at, len(self.points), None, what, math.inf)
        return self._end()

    def _end(self) -> Difference | None:
        """Compare the weights in the end: something may change them after an update."""
        for rank in self.ranks:
            if rank.steps and self.one.steps:
                ours, theirs = rank.steps[-1].parameters, self.one.steps[-1].parameters
                size, name = apart(ours, theirs)
                number = len(self.points) - 1
                if size > max(self.tolerance(number), LATER):
                    at = len(self.one.steps) - 1
                    return Difference(at, number, None, f"parameter `{name}`", size)
        return None

    def tolerance(self, number: int) -> float:
        """Return up to which relative error numbers of a point count as equal.

        Where nothing runs in float64, it is ten times what float32 does to one process
        whose weights begin an epsilon away.
        """
        if not self.shaken:
            return FIRST if number == 0 else LATER
        last = self.points[number].last
        ours, theirs = self.shaken.steps[: last + 1], self.one.steps
        sizes = [apart(a.parameters, b.parameters)[0] for a, b in zip(ours, theirs)]
        pairs = zip(self.shaken.updates, self.one.updates)
        sizes += [
            apart(a.gradients, b.gradients)[0] for a, b in pairs if b.step <= last
        ]
        return 10 * max(*sizes, 1e-7)

    def _gradients(
        self, number: int, point: Point, theirs: list[Point]
    ) -> Difference | None:
        """Compare what the optimizers get; before clipping, which hides their length.

        Gradients that differ between ranks are of their own still: whether the optimizer
        averages them itself is seen by what it does to the weights.
        """
        for k, one in enumerate(point.updates):
            updates = [each.updates[k] for each in theirs]
            clipped = all(each.unclipped for each in [one, *updates])
            for level in ("unclipped", "gradients") if clipped else ("gradients",):
                ours = [getattr(each, level) for each in updates]
                alone = getattr(one, level)
                size, name = max(apart(each, alone) for each in ours)
                if size <= self.tolerance(number):
                    continue
                update = self.one.updates.index(one)
                what = f"the gradient of `{name}`"
                found = Difference(point.last, number, update, what, size)
                alike = _alike(ours, alone)
                rest = {name: alone[name] for name in alike}
                size, name = apart({name: ours[0][name] for name in alike}, rest)
                if size > self.tolerance(number) and not self._is_made_up_for(
                    updates, rest, ours[0]
                ):
                    what = f"the gradient of `{name}`"
                    return Difference(point.last, number, update, what, size)
                self.unlike.setdefault(number, found)
        return None

    @staticmethod
    def _is_made_up_for(updates: list[Update], alone, ours) -> bool:
        """Return whether an optimizer that is not torch's may divide by itself."""
        by_itself = any(each.reduces or not each.of_torch for each in updates)
        return by_itself and made_of(ours, [alone])[1] < LATER

    def _weights(
        self, number: int, point: Point, theirs: list[Point]
    ) -> Difference | None:
        tolerance = max(self.tolerance(number), LATER)
        alone = self.one.steps[point.last]
        for rank, each in zip(self.ranks, theirs):
            ours = rank.steps[each.last]
            size, name = apart(ours.parameters, alone.parameters)
            if size > tolerance:
                return self._part(number, point, f"parameter `{name}`", size)
            if number in self.unlike or not point.updates:
                size, name = self._changed(number, point, rank, each)
                if size > CHANGED:
                    what = f"what the update adds to `{name}`"
                    return self._part(number, point, what, size)
            for name, numbers in alone.buffers.items():
                size = apart_each(ours.buffers, {name: numbers})[0]
                if size > tolerance:
                    if apart_each(ours.sets, {name: alone.sets[name]})[0] > LATER:
                        return self._part(number, point, f"buffer `{name}`", size)
                    self.reordered = name
            both = {n: alone.state[n] for n in alone.state if n in ours.state}
            size, name = apart_each(ours.state, both)
            if size > tolerance:
                return self._part(number, point, f"state `{name}`", size)
        return None

    def _part(self, number: int, point: Point, what: str, size: float) -> Difference:
        """Return a difference; it is of the gradient if that was unlike at this point."""
        if number in self.unlike:
            return self.unlike[number]
        return Difference(point.last, number, None, what, size)

    def _changed(self, number: int, point: Point, rank: Record, ours: Point):
        """Return how far the weights' change is from that in one process.

        A small rate hides in the weights what is wrong with a gradient.
        """

        def change(record: Record, at: Point):
            before = record.steps[at.first - 1].parameters if at.first else record.start
            return changes(record.steps[at.last].parameters, before)

        theirs = change(self.one, point)
        size, name = apart(change(rank, ours), theirs)
        rounding = 1e-14 * length(self.one.start) / (length(theirs) or 1.0)
        return (size, name) if size > 10 * rounding else (0.0, name)


# --------------------------------------------------- what all diagnoses look at


@dataclass
class Case:
    """Ranks of one number of workers beside one process.

    Attributes:
        live: as the program is written.
        still: the run to look for causes in: with BatchNorm, the one in which it uses its
            running statistics; else the same.
        shares: own gradients of one process that gets each rank's batch instead of its
            own at the point where it differs first, if that was tried.
    """

    alone: Runs
    together: list[Runs]
    shares: list[Record] | None = None

    def __post_init__(self):
        self.live = self._pair("float64")
        self.still = self._pair("frozen") if "frozen" in self.alone else self.live
        self.one, self.ranks = self.still.one, self.still.ranks
        self.n = len(self.ranks)
        records = [self.one, *self.ranks]
        self.identified = all(record.identified for record in records)
        # What differs by chance cannot be pinned: not even one index has one content.
        self.odd_items = odd_items(self.one, self.ranks)
        own_indices = len({record.length for record in records}) > 1
        self.loose = any(record.loose for record in records)
        self.loose |= bool(self.odd_items) and self.one.augmented
        self.loose |= own_indices and self.one.drew
        self.rounds = sorted({name for record in records for name in record.rounds})

    def _pair(self, key: str) -> Pair:
        ranks = [runs[key] for runs in self.together]
        return Pair(self.alone[key], ranks, self.alone.get("shaken"))

    def noise(self) -> Records:
        """Return the ranks' records of the run whose noise is as the program draws it."""
        found = [runs.get("noise") for runs in self.together]
        return [record for record in found if record]

    @property
    def updates(self) -> list[list[Update]]:
        """Return the updates of all ranks, one after another."""
        return [list(each) for each in zip(*(record.updates for record in self.ranks))]

    def beside(self, update: int) -> Update | None:
        """Return the update of one process that has the same items; None without one."""
        if update >= len(self.one.updates):
            return None
        found = self.one.updates[update]
        for number, point in enumerate(self.still.points):
            if any(found is each for each in point.updates):
                return found if self.still.same_items(number) else None
        return None

    def right(self, update: int) -> bool:
        """Return whether the gradients of this update are those of one process."""
        alone = self.beside(update)
        if not alone:
            return False
        pairs = [(each.gradients, alone.gradients) for each in self.updates[update]]
        if alone.unclipped:
            pairs += [
                (each.unclipped or {}, alone.unclipped) for each in self.updates[update]
            ]
        return max(apart(*pair)[0] for pair in pairs) < LATER

    def judged(self) -> list[int]:
        """Return the updates that are wrong, or cannot be compared as the items differ."""
        return [u for u in range(len(self.updates)) if not self.right(u)]
