"""Mistakes in what is drawn by chance."""

import itertools

from .comparing import Case
from .recording import Step


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
