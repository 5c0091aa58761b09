"""The parity test notices a release of DeepSpeed that trained something else.

From 0.17.6 to 0.18.2, stage 2 kept the gradients of the last pass only when it accumulated:
https://github.com/deepspeedai/DeepSpeed/issues/7718. Notebook 03/03 tells the story.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT

TEST = "tests/test_sharding.py::test_two_passes_of_half_the_batch_are_one_of_all"


@pytest.mark.weekly
@pytest.mark.part03
def test_accumulation_at_stage_2_fails_under_0_18_1_and_no_other_stage(tmp_path):
    """In a folder of its own, which Python searches before the environment."""
    old, tools = tmp_path / "old", tmp_path / "tools"  # with pip, whatever made ours
    subprocess.run([sys.executable, "-m", "venv", tools], check=True, timeout=PATIENCE)
    install = [tools / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--target", old, "deepspeed==0.18.1"]
    subprocess.run(install, check=True, timeout=PATIENCE)
    searched = os.pathsep.join([str(old), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", TEST],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": searched},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    found = re.findall(r"^(PASSED|FAILED) \S+\[(\d)\]", done.stdout, re.MULTILINE)
    expected = {"0": "PASSED", "1": "PASSED", "2": "FAILED", "3": "PASSED"}
    assert {stage: outcome for outcome, stage in found} == expected, done.stdout
