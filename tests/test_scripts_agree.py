"""What stands in several scripts, so that each can be copied alone, is the same in all."""

import pytest

from tests import scripts
from utils.show import function_source

pytestmark = [pytest.mark.part01, pytest.mark.part02, pytest.mark.part03]

PART_03 = scripts.ROOT / "03-fsdp-deepspeed"
IMAGES = (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP)
RAY = (scripts.TRAIN_RAY_DDP, scripts.TRAIN_RAY_DDP_WITH_RAY_DATA)
TEXT = (PART_03 / "train_fsdp2.py", PART_03 / "train_deepspeed.py")
# Part 03's steps differ by nature: that of DeepSpeed is its engine's.
SAME = [
    ("train_step", {*IMAGES, *RAY}),
    ("evaluate", IMAGES),
    ("evaluate", TEXT),
    ("report", RAY),
    ("load_latest", RAY),
]


@pytest.mark.parametrize(("name", "paths"), SAME)
def test_functions_of_several_scripts_are_equal(name, paths):
    assert len({function_source(path.read_text(), name) for path in paths}) == 1
