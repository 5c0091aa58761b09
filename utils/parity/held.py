"""Mistakes in what ranks hold: weights, buffers, options, modes."""

import math
from collections.abc import Callable, Iterable

from .comparing import FIRST, LATER, Case
from .recording import Records
from .sketches import apart, numbers


def _thousands(sizes: Iterable[int]) -> str:
    return " and ".join(f"{size:,}" for size in dict.fromkeys(sizes))


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
                groups = [e.options[k] for e in updates if k < len(e.options)]
                ours = [group.get(name, value) for group in groups]
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
        changed.append(before.get(name) != each.steps[number].buffers.get(name))
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


def _trains(case: Case) -> bool:
    return any(
        step.parameters[name] != numbers
        for record in [case.one, *case.ranks]
        if record.steps
        for name, numbers in (record.steps[0].parameters | record.start).items()
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
