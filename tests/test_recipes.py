"""The table of old lines in the electives: what replaces a line runs where it says."""

import re
import tomllib

import pytest

from tests.tools import notebooks

ELECTIVES = notebooks.ROOT / "02-ddp-pytorch-ray" / "electives"
RECIPES = tomllib.loads((ELECTIVES / "old_recipes.toml").read_text())
ROWS = [(old, *row) for table in RECIPES.values() for old, row in table.items()]


def lesson(name: str) -> str:
    """Return the code of the lesson that the last column of the tables names."""
    if found := re.fullmatch(r"elective (\d)", name):
        (path,) = ELECTIVES.glob(f"0{found[1]}_*.ipynb")
    elif found := re.fullmatch(r"02/(\d\d)", name):
        (path,) = ELECTIVES.parent.glob(f"{found[1]}_*.ipynb")
    else:
        assert re.match("the port|side trip: ", name), name
        (path,) = ELECTIVES.glob("01_*.ipynb")
    return "\n".join(notebooks.code(path))


def missing(new: str, code: str) -> list[str]:
    """Return the names that a replacement calls, and that no line of the code does."""
    names = re.findall(r"(\w+)\(", " ".join(re.findall("`[^`]*`", new)))
    return [name for name in names if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize(("old", "new", "where"), ROWS, ids=[row[0] for row in ROWS])
def test_a_reader_finds_what_replaces_an_old_line(old, new, where):
    if where in ("this table", "the next line"):
        # 01_old_recipes.ipynb runs the line itself, as all of its table's lines
        line = old if new == "the same" else new.strip("`")
        (table,) = (table for table in RECIPES.values() if old in table)
        assert table.get(line) == ["the same", "this table"]
        return
    names = missing(f"`{old}`" if new == "the same" else new, lesson(where))
    assert not names, f"{where} does not run {names}"


def test_a_replacement_that_no_lesson_runs_is_seen():
    new = "`tune.report(metrics, checkpoint=fold())`"
    assert missing(new, "tune.report({})") == ["fold"]
