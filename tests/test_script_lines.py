"""The READMEs' lines that start a script, typed as they stand, learn something."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import scripts

PARTS = sorted(scripts.ROOT.glob("0*/README.md"))
# Lines that need machines or data of the reader, and the tests that run the like of them.
NEED_MORE = {
    # tests/test_launch_multinode.py
    'HOSTS="gpu1 gpu2" NPROC_PER_NODE=8 ./launch_multinode_ddp.sh --epochs 3',
    # tests/test_ray_data_script.py
    "python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder "
    "--num-workers 8",
}
# The loss of a model that guesses: among ten digits, or among 256 bytes of a text.
GUESS = {"01-ddp-pytorch-only": math.log(10), "02-ddp-pytorch-ray": math.log(10)}
GUESS["03-fsdp-deepspeed"] = math.log(256)


def lines_of(page: Path) -> list[str]:
    """Return the lines of a page's code blocks that start a script."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.search(r"\b(train|launch)_\w+\.(py|sh)", line)]


def in_order(page: Path) -> list[list[str]]:
    """Return the lines to run: alone, or after each other with the same checkpoints."""
    found: dict[str, list[str]] = {}
    for line in lines_of(page):
        if line not in NEED_MORE:
            folder = re.search(r"--checkpoint-dir (\S+)", line)
            found.setdefault(folder[1] if folder else line, []).append(line)
    return list(found.values())


LINES = [(page.parent, lines) for page in PARTS for lines in in_order(page)]


def test_every_script_is_started_by_a_line():
    started = {word for _, lines in LINES for line in lines for word in line.split()}
    assert started >= {path.name for path in scripts.ROOT.glob("0*/train_*.py")}
    assert f"./{scripts.LAUNCH_MULTINODE.name}" in started
    of_parts = [line for page in PARTS for line in lines_of(page)]
    assert {*of_parts} >= NEED_MORE, "a README has other words now"
    # those of the page of commands are run with the README of their part
    of_commands = lines_of(scripts.ROOT / "docs" / "commands.md")
    assert of_commands and {*of_commands} <= {*of_parts}


@pytest.mark.weekly
@pytest.mark.ray
@pytest.mark.parametrize(("folder", "lines"), LINES, ids=[ls[-1] for _, ls in LINES])
def test_lines_run_as_they_are_typed(folder, lines, tmp_path):
    """In a copy of their folder, whose `../build` is empty at first; on a GPU machine on
    CPUs. A second line with the same checkpoints goes on with the run of the first."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.ipynb"))
    for line in lines:
        done = subprocess.run(
            line,
            shell=True,
            cwd=copy,
            env=scripts.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout
        assert ("goes on after" in done.stdout) == (line != lines[0]), done.stdout
        losses = re.findall(r"\bloss (\d+\.\d+)", done.stdout)
        assert losses and float(losses[-1]) < GUESS[folder.name] / 2, done.stdout
