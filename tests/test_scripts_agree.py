"""What people copy: scripts in which equal parts are equal, and little is of utils."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.patience import PATIENCE
from utils.show import function_source

pytestmark = [pytest.mark.part01, pytest.mark.part02, pytest.mark.part03]

PART_03 = scripts.ROOT / "03-fsdp-deepspeed"
WITH_RAY_DATA = scripts.TRAIN_RAY_DDP_WITH_RAY_DATA
IMAGES = (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP)
RAY = (scripts.TRAIN_RAY_DDP, WITH_RAY_DATA)
TEXT = (PART_03 / "train_fsdp2.py", PART_03 / "train_deepspeed.py")
# Part 03's steps differ by nature: that of DeepSpeed is its engine's.
SAME = [
    ("train_step", {*IMAGES, *RAY}),
    ("evaluate", IMAGES),
    ("evaluate", TEXT),
    ("report", RAY),
    ("load_latest", RAY),
]
# How a run is started and ends; the other functions are the training.
SHELL = {"parse_args", "under_torchrun", "with_ray", "fit", "main"}
# Of utils, the training uses what every training needs, and this.
ALLOWED = {"datasets", "models", "settings"} | {
    "checkpoint_files",  # files that are whole, and sentences where that fails
    "generators",  # noise that differs between ranks, and goes on after a restart
    "runs",  # which checkpoint counts, and whether it is of this run
    "stopping",  # a scheduler's SIGTERM, on all ranks after the same step
    "parquet",  # decoding, in a module without torch: tasks on CPUs import it
    "zero",  # what knows DeepSpeed from inside
}


@pytest.mark.parametrize(("name", "paths"), SAME)
def test_functions_of_several_scripts_are_equal(name, paths):
    assert len({function_source(path.read_text(), name) for path in paths}) == 1


@pytest.mark.parametrize(
    "path", [*IMAGES, WITH_RAY_DATA, *TEXT], ids=lambda path: path.stem
)
def test_the_training_of_a_script_needs_little_of_utils(path):
    """Else whoever copies it takes more along than they see."""
    tree, from_module = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("utils"):
            for name in node.names:
                module = (node.module + "." + name.name).split(".")[1]
                from_module[name.asname or name.name] = module
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name not in SHELL:
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            used = {from_module[name] for name in names & from_module.keys()}
            assert used <= ALLOWED, function.name


def test_what_a_script_is_taken_along_with_needs_nothing_else(tmp_path):
    """The modules that every script's first lines name."""
    taken = ("stopping", "runs", "generators", "checkpoint_files", "errors")
    for path in {*IMAGES, *RAY, *TEXT}:
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert all(f"`{name}`" in said for name in taken), path.name
    (tmp_path / "utils").mkdir()
    for name in taken:
        file = Path("utils") / f"{name}.py"
        (tmp_path / file).write_text((scripts.ROOT / file).read_text())
    alone = (
        f"import sys; sys.path[:] = [p for p in sys.path if p != {str(scripts.ROOT)!r}]"
    )
    code = f"{alone}; sys.path.insert(0, '.'); from utils import {', '.join(taken)}"
    code += "; assert all(m.__file__.startswith(sys.argv[1]) for m in (stopping, runs))"
    command = [sys.executable, "-I", "-c", code, tmp_path]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=PATIENCE)
