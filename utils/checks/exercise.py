"""What an exercise is, and how a check says what is wrong with an answer."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """An exercise: how to judge an answer, and what to say about a wrong one.

    is_right: tells whether an answer is right; a string says what is wrong with it. After
        the answer it gets what else a lesson gives to `check`.
    hint: what to think of next; of several, each wrong answer gets the next one.
    mistakes: typical wrong numbers, each with a sentence that names the mistake.
    """

    is_right: Callable[..., bool | str]
    hint: str | tuple[str, ...]
    mistakes: Mapping[float, str] = field(default_factory=dict)

    def judge(self, answer: Any, *given: Any) -> tuple[bool, str]:
        """Return whether the answer is right, and what is wrong, if that is known."""
        verdict = self.is_right(answer, *given)
        if isinstance(verdict, str):
            return False, verdict
        if verdict:
            return True, ""
        for number, sentence in self.mistakes.items():
            if _is_near(answer, number):
                return False, sentence
        return False, ""

    def next_hint(self, number: int) -> str:
        """Return the hint for the `number`-th time, from 0; then the last."""
        hints = (self.hint,) if isinstance(self.hint, str) else self.hint
        return hints[min(number, len(hints) - 1)] if number >= 0 else ""


def cases(*expected: tuple[tuple, Any]) -> Callable[[Callable], bool | str]:
    """Return an `is_right` for a function: pairs of arguments, and what it must return.

    The first case that fails is named.
    """

    def is_right(function: Callable) -> bool | str:
        for arguments, value in expected:
            got = function(*copy.deepcopy(arguments))
            if got != value:
                listed = ", ".join(map(repr, arguments))
                return f"Called with ({listed}), it returns {got!r} and not {value!r}."
        return True

    return is_right


def join(seconds: float = 20) -> tuple[int, int]:
    """Join the process group of this run; returns rank and world size.

    Ends once all ranks are there: else one that has nothing to send might be gone before
    the others have found it, and they would blame the network. Waiting for another rank
    ends in an error after `seconds` from then on, however long that takes.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import set_timeout

    dist.init_process_group("gloo")
    dist.barrier()
    set_timeout(timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def stands_still(error: RuntimeError) -> bool:
    """Return whether gloo gave it up, as another rank is elsewhere, or has ended.

    Of several operations that wait at once, one times out and closes the connections of
    all; which of the two the caller sees is chance.
    """
    said = ("Timed out", "Application timeout", "by peer")
    return any(words in str(error) for words in said)


def _is_near(answer: Any, number: float) -> bool:
    try:
        return abs(float(answer) - number) <= 1e-3 * abs(number)
    except (TypeError, ValueError):
        return False
