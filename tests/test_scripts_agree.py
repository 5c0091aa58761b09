"""What people copy: equal parts are equal, and distributed lines are marked."""

import re

import pytest

from tests import scripts
from utils.show import function_source

SCRIPTS = sorted(scripts.ROOT.glob("0*/train_*.py"))
# They stand in each script, as what is distributed has to be in sight there.
OF_IMAGES = ["train_ddp", "train_ray_ddp", "train_ray_ddp_with_ray_data"]
SAME = {
    "train_step": OF_IMAGES,
    "save_checkpoint": OF_IMAGES,
    "load_checkpoint": OF_IMAGES,
    "evaluate of images": ["train_ddp", "train_ray_ddp"],
    "evaluate of texts": ["train_fsdp2", "train_deepspeed"],
}
BY_NAME = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


@pytest.mark.parametrize("what", SAME)
def test_functions_of_several_scripts_are_equal(what):
    paths = [path for path in SCRIPTS if path.stem in SAME[what]]
    assert len(paths) > 1
    sources = {function_source(path.read_text(), what.split()[0]) for path in paths}
    assert len(sources) == 1


@BY_NAME
def test_lines_that_one_device_lacks_are_marked(path):
    """Each call of a collective, each wrap, and where the data is dealt out."""
    calls = (
        r"\bdist\.(?!get_|group|new_group|init_device_mesh)\w+\(",
        r"\bDDP\(|fully_shard\(|prepare_(model|data_loader)\(|seed_rank\(|Sampler\(",
        r"share_of_batch\(|Subset\(|\.(set_epoch|initialize|init_distributed)\(",
        r"\bdcp\.\w+\(|clip_grad_norm_\(|sd\.get_model_state_dict\(|Trainer\(",
        r"\bengine\.(backward|save_checkpoint|load_checkpoint)\(|get_rank\(\) == 0:",
    )
    lines = path.read_text().splitlines()
    distributed = [line for line in lines if re.search("|".join(calls), line)]
    assert len(distributed) > 3
    assert [line for line in distributed if not re.search(r"# NEW\b", line)] == []
