"""Checks of the exercises: a wrong answer gets a hint, not a traceback."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """is_right: tells whether an answer is right. hint: what to think of next."""

    is_right: Callable[[Any], bool]
    hint: str


# One entry per exercise, named after its notebook; the solutions are in solutions.ipynb.
EXERCISES: dict[str, Exercise] = {}


def check(name: str, answer: Any) -> None:
    """Print whether `answer` solves the exercise `name`, with a hint where it does not.

    Raises:
        ValueError: there is no exercise of that name.
    """
    if name not in EXERCISES:
        raise ValueError(f"No exercise {name!r}: choose from {', '.join(EXERCISES)}.")
    exercise = EXERCISES[name]
    if answer is ...:
        print(f"Exercise {name}: replace the three dots by your answer.")
        return
    try:
        right = bool(exercise.is_right(answer))
    except Exception as error:  # a wrong answer may be of any type, or raise anything
        print(f"Not yet ({type(error).__name__}: {error}). {exercise.hint}")
        return
    print("Right!" if right else f"Not yet. {exercise.hint}")
