"""What an exercise is, and the judges that several exercises share.

A judge is a function of an answer. It returns True if that is right, and else a sentence
that says what is wrong, or False.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from utils.launch import run_ranks

Judge = Callable[..., bool | str]
_HANGS = "this rank hangs"


@dataclass(frozen=True)
class Exercise:
    """An exercise: how to judge an answer, and what to say about a wrong one.

    judge: returns True, or what is wrong. After the answer it gets what else a lesson
        gives to `check`.
    hint: what to think of next; of several, each wrong answer gets the next one.
    mistakes: typical wrong answers, each with the sentence that it gets. A number is
        recognised by its value, and a function by what the judge says of it: use them
        with `cases`, which says what it returns. tests/test_checks.py gives each of them
        to `check`.
    """

    judge: Judge
    hint: str | tuple[str, ...]
    mistakes: Mapping[Any, str] = field(default_factory=dict)

    def what_is_wrong(self, answer: Any, *given: Any) -> str | None:
        """Return None if the answer is right, else what is wrong, "" if unknown."""
        verdict = self.judge(answer, *given)
        if verdict and not isinstance(verdict, str):
            return None
        for mistake, sentence in self.mistakes.items():
            if callable(mistake):
                same = verdict and verdict == self.judge(mistake)
            else:
                same = answer == mistake or is_near(answer, mistake)
            if same:
                return sentence
        return verdict or ""

    def next_hint(self, number: int) -> str:
        """Return the hint for the `number`-th time, from 0; then the last."""
        hints = (self.hint,) if isinstance(self.hint, str) else self.hint
        return hints[min(number, len(hints) - 1)] if number >= 0 else ""


def cases(*expected: tuple[tuple, Any]) -> Judge:
    """Return a judge of a function: pairs of arguments, and what it must return.

    The first case that fails is named.
    """

    def judge(function: Callable) -> bool | str:
        for arguments, value in expected:
            got = function(*copy.deepcopy(arguments))
            if not _is_same(got, value):
                called = ", ".join(map(_shown, arguments))
                return (
                    f"Called with ({called}), it returns {_shown(got)} and not "
                    f"{_shown(value)}."
                )
        return True

    return judge


def same_as(right: Callable, *arguments: tuple) -> Judge:
    """Return a judge of a function that must return what `right` returns."""

    def judge(function: Callable) -> bool | str:
        return cases(*((each, right(*each)) for each in arguments))(function)

    return judge


def words(expected: Mapping[str, str], others: set[str], clues: Mapping[str, str]):
    """Return a judge of a dictionary with a word for each of A, B, C and D.

    Args:
        expected: the right word for each.
        others: words that are right for none of them.
        clues: what helps who has the wrong word, for some of them.
    """
    allowed = {*expected.values(), *others}

    def judge(answer: Any) -> bool | str:
        if not isinstance(answer, dict) or answer.keys() != expected.keys():
            return "Give a dictionary with a word for each of A, B, C and D."
        if unknown := {*map(str, answer.values())} - allowed:
            return f"{sorted(unknown)} is none of the words."
        for key, word in expected.items():
            if answer[key] != word:
                return f"{key} is something else. {clues.get(key, '')}".strip()
        return True

    return judge


def by_ranks(
    call: Callable[[Any], Any],
    judge: Callable[[list], bool | str],
    *world_sizes: int,
    seconds: float = 20,
    hangs: str = "Rank {} stands in a collective that not all ranks call.",
) -> Judge:
    """Return a judge that runs an answer on ranks, and looks at what they return.

    Args:
        call: each rank calls it with the answer, in a process group with gloo.
        judge: gets what all ranks returned, a list by rank.
        world_sizes: how many ranks, one try after the other.
        seconds: how long a rank may wait for another one.
        hangs: what to say if a rank waits for longer; {} is its number.
    """

    def judge_on_ranks(answer: Any) -> bool | str:
        for n in world_sizes:
            found = run_ranks(_on_rank, n, call, answer, seconds, timeout=120)
            if _HANGS in found:
                return hangs.format(found.index(_HANGS))
            if (verdict := judge(found)) is not True:
                return verdict
        return True

    return judge_on_ranks


def _on_rank(call: Callable[[Any], Any], answer: Any, seconds: float) -> Any:
    join(seconds)
    try:
        return call(answer)
    except RuntimeError as error:
        if has_timed_out(error):
            return _HANGS
        raise


def join(seconds: float = 20) -> None:
    """Join the process group of this run.

    Ends once all ranks are there: else one that has nothing to send might be gone before
    the others have found it, and they would blame the network. Waiting for another rank
    ends in an error after `seconds` from then on, however long that takes.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import set_timeout

    dist.init_process_group("gloo")
    dist.barrier()
    set_timeout(timedelta(seconds=seconds))


def has_timed_out(error: RuntimeError) -> bool:
    """Return whether gloo gave it up, as another rank is elsewhere, or has ended.

    Of several operations that wait at once, one times out and closes the connections of
    all; which of the two the caller sees is chance.
    """
    timed_out = ("Timed out", "Application timeout", "by peer")
    return any(words in str(error) for words in timed_out)


def unfair(
    shares: Sequence[Sequence], items: list, uneven: int = 0, left_out: int = 0
) -> str:
    """Return what is wrong with how `items` are dealt out to ranks, "" if nothing is.

    Args:
        shares: what each rank gets.
        items: all of them; no two are equal.
        uneven: by how many the lengths of shares may differ.
        left_out: how many items may be dealt to nobody.
    """
    dealt = [item for share in shares for item in share]
    lengths = [len(share) for share in shares]
    if strange := sorted(set(dealt) - set(items)):
        return f"{strange[0]} is dealt out, which is not there."
    missing = sorted(set(items) - set(dealt))
    if len(missing) > left_out:
        return f"nobody gets {len(missing)} of them, such as {missing[0]}."
    if repeated := sorted({item for item in dealt if dealt.count(item) > 1}):
        return f"{len(repeated)} are dealt out more than once, such as {repeated[0]}."
    if max(lengths) - min(lengths) > uneven:
        return f"the workers get {lengths} of them: some would wait for the others."
    return ""


def is_near(answer: Any, number: Any, relative: float = 1e-3) -> bool:
    """Return whether an answer is a number that is near to another one."""
    try:
        return abs(float(answer) - number) <= relative * abs(number)
    except (TypeError, ValueError):
        return False


def _is_same(got: Any, value: Any) -> bool:
    if isinstance(value, list | tuple):
        try:
            return len(got) == len(value) and all(map(_is_same, got, value))
        except TypeError:
            return False
    if isinstance(value, int | float):
        return is_near(got, value, relative=1e-6)
    return got == value


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)
