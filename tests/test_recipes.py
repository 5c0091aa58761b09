"""The word for what an old line does today, and what stands in for packages."""

import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from tests.tools import notebooks
from utils import recipes

ELECTIVES = notebooks.ROOT / "02-ddp-pytorch-ray" / "electives"


@pytest.mark.parametrize(
    ("line", "word", "said"),
    [
        ("ScalingConfig(num_workers=2)", "works", ""),
        ("RunConfig(verbose=1)", "refused", "`RunConfig(verbose)` is deprecated"),
        ("train.world_rank()", "gone", "no attribute 'world_rank'"),
        ("from ray.train import Trainer", "gone", "'Trainer' from 'ray.train'"),
        ("TorchTrainer(train_func=train_func)", "gone", "argument 'train_func'"),
        ("session.get_world_rank()", "ignored", "Returning `0`"),
        ("session.get_world_rank(), 1", "ignored", "Returning `0`"),  # it warns again
        ("raise ValueError(here)", "refused", "a folder"),
    ],
)
def test_a_line_gets_its_word(line, word, said):
    found = recipes.today(line, "a folder")
    assert found[0] == word
    assert found[1].endswith(said) and bool(found[1]) == bool(said)


@pytest.mark.weekly
def test_a_stand_in_has_everything():
    program = (
        "from utils.recipes import stand_in; stand_in('lightning', 'none'); "
        "import lightning.any; from lightning.any.where import Thing; "
        "class_ = type('Mine', (Thing.Inner.Most,), {}); class_(); "
        "import none, ray.train.lightning; assert not hasattr(none, '__x__')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


RECIPES = tomllib.loads((ELECTIVES / "old_recipes.toml").read_text())
ROWS = [row for table in RECIPES.values() for row in table.items()]


def runs(name: str) -> str:
    """Return the code of the lesson that the last column of the tables names."""
    if found := re.fullmatch(r"elective (\d)", name):
        (path,) = ELECTIVES.glob(f"0{found[1]}_*.ipynb")
    elif found := re.fullmatch(r"02/(\d\d)", name):
        (path,) = ELECTIVES.parent.glob(f"{found[1]}_*.ipynb")
    else:
        assert re.match("the port|side trip: ", name), name
        (path,) = ELECTIVES.glob("01_*.ipynb")
    cells = nbformat.read(path, 4).cells
    return "\n".join(c.source for c in cells if c.cell_type == "code")


def unknown(new: str, code: str) -> list[str]:
    """Return the names that a replacement calls, and that no line of the code does."""
    names = re.findall(r"(\w+)\(", " ".join(re.findall("`[^`]*`", new)))
    return [name for name in names if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize(("old", "row"), ROWS, ids=[old for old, _ in ROWS])
def test_what_replaces_an_old_line_runs_where_it_says(old, row):
    new, where = row
    if where in ("this table", "the next line"):
        # 01_old_recipes.ipynb runs the line itself, as all of its table's lines
        line = old if new == "the same" else new.strip("`")
        (table,) = (table for table in RECIPES.values() if old in table)
        assert line in table and table[line] == ["the same", "this table"]
        return
    names = unknown(f"`{old}`" if new == "the same" else new, runs(where))
    assert not names, f"{where} does not run {names}"


def test_a_replacement_that_nothing_runs_is_seen():
    new = "`tune.report(metrics, checkpoint=fold())`"
    assert unknown(new, "tune.report({})") == ["fold"]
