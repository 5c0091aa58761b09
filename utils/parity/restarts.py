"""Stop a training in its middle, start it anew, and say what it has not saved."""

import random
from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import NamedTuple

from .comparing import LATER, points_of
from .diagnosing import Finding
from .groups import Failure, Job, Runs, train_group
from .recording import Record
from .sketches import Sketches, apart, apart_each, numbers
from .training import BadInput


class _Pair(NamedTuple):
    """A rank that was never stopped, and one that began again after `done` steps."""

    whole: Record
    again: Record
    done: int


def _differ(what: str, ours: Sketches, theirs: Sketches, by=apart) -> str:
    size, name = by(ours, theirs)
    return f"`{name}` of {what} is {size:.1e} from where it was" if size > LATER else ""


def weights(pair: _Pair) -> str:
    """Find weights that are not those of the stop."""
    there = pair.whole.steps[pair.done - 1].parameters
    theirs = {name: there[name] for name in pair.again.start}
    return _differ("the model", pair.again.start, theirs)


def buffers(pair: _Pair) -> str:
    """Find buffers that are not those of the stop."""
    theirs = pair.whole.steps[pair.done - 1].buffers
    return _differ("the model", pair.again.start_buffers, theirs, apart_each)


def beside(pair: _Pair) -> str:
    """Find what is held beside the model and is not as at the stop."""
    theirs = pair.whole.steps[pair.done - 1].state
    ours = {name: n for name, n in pair.again.start_state.items() if name in theirs}
    kept = {name: numbers for name, numbers in theirs.items() if name in ours}
    return _differ("what is held beside the model", ours, kept, apart_each)


def place(pair: _Pair) -> str:
    """Find other items than those that would have come next."""
    ours, theirs = pair.again.steps, pair.whole.steps[pair.done :]
    if len(ours) != len(theirs):
        return f"{len(theirs)} steps were left, and it takes {len(ours)}"
    for number, (a, b) in enumerate(zip(ours, theirs)):
        if a.items != b.items:
            return f"step {number} after the restart has other items"
    return ""


def _updates(pair: _Pair) -> list[tuple]:
    """Return updates after the restart, beside those of the training never stopped."""
    before = sum(update.step < pair.done for update in pair.whole.updates)
    return [*zip(pair.again.updates, pair.whole.updates[before:])]


def rates(pair: _Pair) -> str:
    """Find another learning rate than the schedule's."""
    for u, (ours, theirs) in enumerate(_updates(pair)):
        if ours.rates != theirs.rates:
            return (
                f"update {u} after the restart has a learning rate of "
                f"{numbers(ours.rates[:1])}, and {numbers(theirs.rates[:1])} without one"
            )
    return ""


def counters(pair: _Pair) -> str:
    """Find updates that come after another number of batches."""
    pairs = _updates(pair)
    if [a.step + pair.done for a, _ in pairs] != [b.step for _, b in pairs]:
        return "the optimizer steps after other batches than without a restart"
    return ""


def averages(pair: _Pair) -> str:
    """Find weights that equal gradients move otherwise: by another state of Adam, say."""
    pairs = _updates(pair)
    if not pairs or apart(pairs[0][0].gradients, pairs[0][1].gradients)[0] > LATER:
        return ""
    at = pairs[0][0].step
    ours, theirs = pair.again.steps[at], pair.whole.steps[pair.done + at]
    return _differ("the model after one update", ours.parameters, theirs.parameters)


def anything(pair: _Pair) -> str:
    """Find weights that end elsewhere."""
    if not pair.again.steps:
        return ""
    ours, theirs = pair.again.steps[-1], pair.whole.steps[-1]
    return _differ("the model at the end", ours.parameters, theirs.parameters)


def noise(pair: _Pair) -> str:
    """Find other random numbers than those that would have come next."""
    for number, (a, b) in enumerate(
        zip(pair.again.steps, pair.whole.steps[pair.done :])
    ):
        ours = a.draws, a.random_items, a.random_step
        if ours != (b.draws, b.random_items, b.random_step):
            return f"step {number} after the restart draws other numbers"
    return ""


_KEPT = "after a restart, {} not as if nothing had happened: save and load {}"
TABLE: list[tuple[str, Callable[[_Pair], str]]] = [
    (_KEPT.format("the weights are", "the model's state"), weights),
    (_KEPT.format("the buffers are", "them with the weights"), buffers),
    (
        _KEPT.format("what is held beside the model is", "the teacher or average, too"),
        beside,
    ),
    (
        _KEPT.format("the items are", "the epoch and the step, and return both"),
        place,
    ),
    (_KEPT.format("the learning rate is", "scheduler and optimizer"), rates),
    (_KEPT.format("the updates are", "counters of steps"), counters),
    (_KEPT.format("an update is", "the optimizer's state"), averages),
    (_KEPT.format("the end is", "all that has a state"), anything),
]
NOISE = _KEPT.format("the noise is", "the states of the random generators"), noise


def find(table: list, pair: _Pair) -> Finding | None:
    """Return what is not as if nothing had happened; the first is its cause."""
    for sentence, look in table:
        if evidence := look(pair):
            return Finding("not saved", sentence, evidence)
    return None


def restart(
    job: Job,
    groups: dict[int, list[list[Runs]]],
    timeout: float,
    stop: int | None = None,
) -> tuple[list[str], list[Finding]]:
    """Stop N workers, start them anew, also another number, and judge how they go on.

    Args:
        job: of the one training that all `groups` trained, with its `save` and `load`.
        groups: by number of workers.
        stop: after which step; None takes one by chance.

    Returns:
        Lines that say what was tried, and findings.
    """
    sizes = [*groups]
    size = sizes[min(1, len(sizes) - 1)]
    whole = [runs[0] for runs in groups[size]]
    ends = [point.last + 1 for point in points_of(whole[0]["float64"])]
    # two updates are left, if there are so many: a schedule shows at the second
    stop = stop or random.SystemRandom().choice(ends[:-2] or ends[:-1] or [0])
    if not stop:
        return ["A restart needs two updates, and there is one: not tried."], []
    stopped = {"float64": replace(job.run, stop=stop)}
    if "noise" in whole[0]:
        stopped["noise"] = replace(job.noisy(job.payloads[0]), stop=stop)
    lines, findings = [], []
    with TemporaryDirectory() as folder:
        at = {k: replace(run, folder=f"{folder}/{k}") for k, run in stopped.items()}
        done = train_group(Job(job.payloads, job.run, at), size, timeout)
        lines.append(f"Stopped {size} workers after step {stop}.")
        for n in dict.fromkeys([size, *sizes]):
            if [
                point.last + 1 for point in points_of(groups[n][0][0]["float64"])
            ] != ends:
                lines.append(
                    f"  Not tried with {n}, as an update takes other steps there."
                )
                continue
            if isinstance(done, Failure):
                findings.append(Finding("fails", "`save` fails", done.sentence))
                break
            runs = {k: replace(run, stop=0, resume=True) for k, run in at.items()}
            if n != size:
                runs.pop("noise", None)
            again = train_group(Job(job.payloads, job.run, runs), n, timeout)
            if isinstance(again, Failure):
                if again.kind == "bad":
                    raise BadInput(again.sentence)
                said = f"{n} workers cannot go on from it"
                findings.append(Finding("fails", said, again.sentence))
                continue
            found = _compare(groups[n], again, stop)
            ends_so = "do not end" if found else "end"
            lines.append(f"  Begun anew, {n} workers {ends_so} as if undisturbed.")
            findings += [found] if found else []
    return lines, findings[:1]  # the others are the same with other numbers of workers


def _compare(group: list[list[Runs]], again: list[list[Runs]], stop: int):
    for rank, runs in enumerate(again):
        whole, here = group[rank][0], runs[0]
        pair = _Pair(whole["float64"], here["float64"], stop)
        if found := find(TABLE, pair):
            return found
        if "noise" in here:
            pair = _Pair(whole["noise"], here["noise"], stop)
            if found := find([NOISE], pair):
                return found
    return None
