"""Checks of the exercises: a wrong answer gets its name or a hint, not a traceback.

One entry per exercise, in the module of its part (`moving` has those of 03/07, which train
scripts); `sharding` simulates ranks for three of them. The solutions are in each part's
solutions.ipynb.
"""

from collections import Counter
from typing import Any

from utils.checks import electives, moving, part01, part02, part03
from utils.checks.exercise import Exercise
from utils.errors import BadInput

EXERCISES: dict[str, Exercise] = part01.EXERCISES | part02.EXERCISES | part03.EXERCISES
EXERCISES |= electives.EXERCISES | moving.EXERCISES
_wrong_answers: Counter[str] = Counter()  # by exercise, in this process


def check(name: str, answer: Any, *given: Any) -> None:
    """Print whether `answer` solves the exercise `name`, and if not, what helps.

    A typical mistake is named, and so is the case in which a function fails. Each further
    wrong answer in this process gets the next hint.

    Args:
        name: of the exercise.
        answer: the reader's.
        given: functions of the lesson that the answer is judged with.

    Raises:
        BadInput: there is no exercise of that name.
    """
    if name not in EXERCISES:
        raise BadInput(f"No exercise {name!r}: choose from {', '.join(EXERCISES)}.")
    exercise = EXERCISES[name]
    if answer is ... or _does_nothing(answer):
        print(f"Exercise {name}: replace the three dots by your answer.")
        return
    try:
        wrong = exercise.what_is_wrong(answer, *given)
    except Exception as error:  # a wrong answer may be of any type, or raise anything
        hint = exercise.next_hint(_wrong_answers[name])
        reply = f"Not yet ({type(error).__name__}: {error}). {hint}"
    else:
        if wrong is None:
            print("Right!")
            return
        # what is known to be wrong is enough for a start: the hints come after it
        hint = exercise.next_hint(_wrong_answers[name] - bool(wrong))
        reply = " ".join(filter(None, ["Not yet.", wrong, hint]))
    _wrong_answers[name] += 1
    print(reply)


def _does_nothing(answer: Any) -> bool:
    """Return whether a function's body is still `...`, which does what `None` does."""
    code, empty = getattr(answer, "__code__", None), (lambda: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (
        empty.co_code,
        empty.co_consts,
    )
