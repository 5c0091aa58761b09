"""Checks of the exercises: a wrong answer gets a hint, not a traceback.

One entry per exercise, named after its notebook, in the module of its part; the solutions
are in each part's solutions.ipynb.
"""

from typing import Any

from utils.checks import part01, part02, part03
from utils.checks.exercise import Exercise

EXERCISES: dict[str, Exercise] = part01.EXERCISES | part02.EXERCISES | part03.EXERCISES


def check(name: str, answer: Any) -> None:
    """Print whether `answer` solves the exercise `name`, with a hint where it does not.

    Raises:
        ValueError: there is no exercise of that name.
    """
    if name not in EXERCISES:
        raise ValueError(f"No exercise {name!r}: choose from {', '.join(EXERCISES)}.")
    exercise = EXERCISES[name]
    if answer is ... or _does_nothing(answer):
        print(f"Exercise {name}: replace the three dots by your answer.")
        return
    try:
        right = bool(exercise.is_right(answer))
    except Exception as error:  # a wrong answer may be of any type, or raise anything
        print(f"Not yet ({type(error).__name__}: {error}). {exercise.hint}")
        return
    print("Right!" if right else f"Not yet. {exercise.hint}")


def _does_nothing(answer: Any) -> bool:
    """Whether it is a function whose body is still `...`, which does what `None` does."""
    code, empty = getattr(answer, "__code__", None), (lambda: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (
        empty.co_code,
        empty.co_consts,
    )
