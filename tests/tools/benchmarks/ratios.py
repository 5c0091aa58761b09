"""Ratios of two variants that are measured in one run, and what can be said of a bar.

Seconds of two runs on a shared machine compare badly; the ratio of two neighbours in time
compares well. So A and B alternate (A B B A A B B A ...), each pair gives one ratio, and
two neighbours of the same variant give a control: how far from 1 a ratio is seen to be
where there is no difference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

MET, MISSED, NOT_DECIDED = "met", "missed", "not decided"


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios, its 95% bootstrap interval, and the A/A control.

    `spread` is the ratio that the control might be taken for: the end of its own 95%
    interval that is further from 1, as a number above 1.
    """

    value: float
    low: float
    high: float
    spread: float
    pairs: int

    def inverse(self) -> "Ratio":
        """Return A over B, where this is B over A."""
        ends = 1 / self.value, 1 / self.high, 1 / self.low
        return Ratio(*ends, self.spread, self.pairs)

    def verdict(
        self, at_most: float | None = None, at_least: float | None = None
    ) -> str:
        """Return whether a bar is met: only if the whole interval clears it.

        Not decided where the interval contains the bar, and where the control's spread
        is wider than the distance to it.
        """
        bar = at_least if at_most is None else at_most
        assert bar is not None, "there is no bar"
        if abs(np.log(self.value / bar)) < np.log(self.spread):
            return NOT_DECIDED
        if self.low <= bar <= self.high:
            return NOT_DECIDED
        return MET if (self.value < bar) == (at_least is None) else MISSED


def interleave(
    a: Callable[[], float], b: Callable[[], float], pairs: int = 10, warm_up: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `a` and `b` return (seconds, bytes), by pair: A B B A A B B A ..."""
    measured = []
    for number in range(-warm_up, pairs):
        if number % 2:
            second, first = b(), a()
        else:
            first, second = a(), b()
        if number >= 0:
            measured.append((first, second))
    a_measured, b_measured = np.array(measured).T
    return a_measured, b_measured


def ratio(a: ArrayLike, b: ArrayLike) -> Ratio:
    """Return B over A, from pairs in the order of `interleave`."""
    log_a, log_b = np.log(a), np.log(b)
    low, high = interval(log_b - log_a)
    # Pair 0 ends with B and pair 1 begins with it, pair 1 ends with A, and so on.
    neighbours = [
        (log_a if number % 2 else log_b)[number : number + 2]
        for number in range(len(log_a) - 1)
    ]
    control = interval([later - earlier for earlier, later in neighbours])
    middle, furthest = np.median(log_b - log_a), max(abs(end) for end in control)
    value, low, high, spread = (
        float(np.exp(each)) for each in (middle, low, high, furthest)
    )
    return Ratio(value, low, high, spread, len(log_a))


def interval(values: ArrayLike) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    found = bootstrap(
        (np.asarray(values),),
        np.median,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = map(float, found.confidence_interval)
    return low, high
