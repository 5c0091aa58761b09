"""The word for what an old line does today, and what stands in for packages."""

import subprocess
import sys

import pytest

from utils import recipes


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


def test_a_stand_in_has_everything():
    program = (
        "from utils.recipes import stand_in; stand_in('lightning', 'none'); "
        "import lightning.any; from lightning.any.where import Thing; "
        "class_ = type('Mine', (Thing.Inner.Most,), {}); class_(); "
        "import none, ray.train.lightning; assert not hasattr(none, '__x__')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
