"""What people copy: equal parts are equal, and distributed lines are marked."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.waiting import TIMEOUT_S
from utils.show import function_source

SCRIPTS = sorted(scripts.ROOT.glob("0*/train_*.py"))
# Part 03's steps differ by nature: that of DeepSpeed is its engine's.
SAME = {
    "train_step": ["train_ddp", "train_ray_ddp", "train_ray_ddp_with_ray_data"],
    "evaluate of images": ["train_ddp", "train_ray_ddp"],
    "evaluate of texts": ["train_fsdp2", "train_deepspeed"],
    "report": ["train_ray_ddp", "train_ray_ddp_with_ray_data"],
    "load_latest": ["train_ray_ddp", "train_ray_ddp_with_ray_data"],
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
        r"\bDDP\(|fully_shard\(|prepare_(model|data_loader)\(|seed_(rank|loader)\(",
        r"share_of_batch\(|Subset\(|\.(set_epoch|initialize|init_distributed)\(",
    )
    lines = path.read_text().splitlines()
    distributed = [line for line in lines if re.search("|".join(calls), line)]
    assert len(distributed) > 3
    assert [line for line in distributed if not re.search(r"# NEW\b", line)] == []


def test_what_a_script_is_taken_along_with_needs_nothing_else(tmp_path):
    """The modules that every script's docstring names, in a folder of their own."""
    taken = ("stopping", "runs", "generators", "checkpoint_files", "errors")
    for path in SCRIPTS:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert all(f"`{name}`" in docstring for name in taken), path.name
    (tmp_path / "utils").mkdir()
    for name in taken:
        file = Path("utils") / f"{name}.py"
        (tmp_path / file).write_text((scripts.ROOT / file).read_text())
    program = tmp_path / "mine.py"
    program.write_text(
        "import sys\n"
        # this environment finds the workshop's own `utils` from everywhere
        "sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from utils import {', '.join(taken)}\n"
        f"assert stopping.__file__.startswith({str(tmp_path)!r})\n"
    )
    subprocess.run([sys.executable, "-I", program], check=True, timeout=TIMEOUT_S)
