"""The READMEs' lines that start a script, typed as they stand, learn something."""

import math
import re
import shutil
import subprocess

import pytest

from tests import readme, scripts

LINES = readme.script_lines()
# The loss of a model that guesses: among ten digits, or among 256 bytes of a text.
GUESS = {"01-ddp-pytorch-only": math.log(10), "02-ddp-pytorch-ray": math.log(10)}
GUESS["03-fsdp-deepspeed"] = math.log(256)


def test_all_scripts_are_started_by_a_line():
    started = {word for _, lines in LINES for line in lines for word in line.split()}
    assert started >= {path.name for path in scripts.ROOT.glob("0*/train_*.py")}
    assert f"./{scripts.LAUNCH_MULTINODE.name}" in started


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
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
