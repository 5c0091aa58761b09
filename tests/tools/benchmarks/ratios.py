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
PAIRS = 10
fewer_pairs: int | None = None  # instead of PAIRS, and of what a comparison asks for


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios, its 95% bootstrap interval, and the A/A control.

    spread: the end of the control's own 95% interval that is further from 1, as a number
    above 1. A ratio between 1 / spread and spread may be the machine's doing.
    """

    value: float
    low: float
    high: float
    spread: float

    def inverse(self) -> "Ratio":
        """Return A over B, where this is B over A."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low, self.spread)

    def verdict(self, bar: float, at_least: bool = False) -> str:
        """Return whether the ratio is at most (or at least) `bar`.

        Not decided where the interval contains the bar, and where the control's spread
        is wider than the distance to it.
        """
        if abs(np.log(self.value / bar)) < np.log(self.spread):
            return NOT_DECIDED
        if self.low <= bar <= self.high:
            return NOT_DECIDED
        return MET if (self.value > bar) == at_least else MISSED


def interleave(
    a: Callable[[], float],
    b: Callable[[], float],
    pairs: int = PAIRS,
    warm_up: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `a` and `b` return (seconds, bytes), by pair: A B B A A B B A ...

    warm_up: begin with one more pair, B A, that does not count.
    """
    measured = []
    for number in range(-int(warm_up), fewer_pairs or pairs):
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
    # Pair 0 ends with B and pair 1 begins with it, pair 1 ends with A, and so on.
    repeated = [
        np.diff((log_a if number % 2 else log_b)[number : number + 2])[0]
        for number in range(len(log_a) - 1)
    ]
    control = max(np.abs(_interval(repeated)))
    logs = np.median(log_b - log_a), *_interval(log_b - log_a), control
    return Ratio(*(float(np.exp(each)) for each in logs))


def _interval(values: ArrayLike) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    found = bootstrap((values,), np.median, method="percentile", rng=0)
    return found.confidence_interval
