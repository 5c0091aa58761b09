"""The three questions at the end of a lesson's main line, with their folded answers.

They stand in one cell of text, and are written there: this module only reads them.
"""

import re
from typing import NamedTuple

HEADING = "## Three questions"
QUESTION = re.compile(
    r"\*\*(?P<asked>\d\. [^\n]+\?)\*\*\n\n"
    r"<details><summary>Answer</summary>\n\n(?P<answer>[^\n]+)\n\n</details>"
)


class Question(NamedTuple):
    """A question, its answer, and the headings of this notebook that it links to."""

    asked: str
    answer: str
    anchors: list[str]


def questions(cells: list) -> list[Question]:
    """Return the questions of a lesson; none unless they end its main line.

    Args:
        cells: of the main line, as `outline.main_line` returns them.
    """
    if not cells or not cells[-1].source.startswith(HEADING):
        return []
    return [
        Question(
            match["asked"],
            match["answer"],
            re.findall(r"\]\(#([^)]+)\)", match["answer"]),
        )
        for match in QUESTION.finditer(cells[-1].source)
    ]
