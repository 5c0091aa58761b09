"""What an exercise is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """is_right: tells whether an answer is right. hint: what to think of next."""

    is_right: Callable[[Any], bool]
    hint: str
