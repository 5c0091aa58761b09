"""Show which exercises a reader has solved, tried and not begun, lesson by lesson."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.tools.notebooks import all_notebooks, code, electives, title

CHECK = re.compile(r'^check\(\s*"([^"]+)"', re.MULTILINE)


def exercises(path: Path) -> list[str]:
    """Return the names of the exercises that a lesson checks, in order."""
    return [name for source in code(path) for name in CHECK.findall(source)]


def lines(record: dict[str, bool]) -> Iterator[str]:
    """Yield a row per lesson, and the names of what was tried and is not solved.

    Args:
        record: whether each exercise that was tried is solved (utils.checks.progress).
    """
    yield f"{'lesson':<10} {'solved':>6} {'tried':>6} {'not begun':>9}"
    left, total = [], [0, 0, 0]
    for path in (*all_notebooks(), *electives()):
        if path.stem == "solutions":
            continue
        names = exercises(path)
        solved = sum(record.get(name, False) for name in names)
        tried = [name for name in names if record.get(name) is False]
        row = [solved, len(tried), len(names) - solved - len(tried)]
        total = [a + b for a, b in zip(total, row)]
        left += [f"{label(path)}, {name}" for name in tried]
        yield _row(label(path), row) + f"  {title(path)}"
    yield _row("all", total)
    if left:
        yield "Tried, and not yet solved: " + "; ".join(left) + "."


def label(path: Path) -> str:
    """Return what a lesson is called in the README, such as "01/02"; "elective 3"."""
    number = path.name[:2]
    if path in electives():
        return f"elective {int(number)}"
    return f"{path.parent.name[:2]}/{number}"


def _row(name: str, numbers: list[int]) -> str:
    return f"{name:<10} {numbers[0]:>6} {numbers[1]:>6} {numbers[2]:>9}"
