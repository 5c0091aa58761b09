"""The parity tests notice releases of DeepSpeed that trained something else.

From 0.17.6 to 0.18.2, stage 2 kept the gradients of the last pass only when it accumulated:
https://github.com/deepspeedai/DeepSpeed/issues/7718. From 0.18.3 to 0.19.5, a term of the
loss that does not go through the engine was not divided by the number of passes:
https://github.com/deepspeedai/DeepSpeed/issues/8224. Notebook 03/03 tells the story.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT

PASSES = "test_two_passes_of_half_the_batch_are_one_of_all"
TERMS = "test_a_term_that_goes_round_the_engine_counts_once"


def outcomes(folder: Path, version: str, test: str) -> dict[str, str]:
    """Run a test of stages with this DeepSpeed; return PASSED or FAILED by stage.

    It is in a folder of its own, which Python searches before the environment.
    """
    old, tools = folder / "old", folder / "tools"  # with pip, whatever made ours
    subprocess.run([sys.executable, "-m", "venv", tools], check=True, timeout=PATIENCE)
    install = [tools / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--target", old, f"deepspeed=={version}"]
    subprocess.run(install, check=True, timeout=PATIENCE)
    searched = os.pathsep.join([str(old), str(ROOT)])
    test = f"tests/test_sharding.py::{test}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": searched},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    found = re.findall(r"^(PASSED|FAILED) \S+\[(\d)\]", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return {stage: outcome for outcome, stage in found}


@pytest.mark.weekly
@pytest.mark.part03
def test_accumulation_at_stage_2_fails_under_0_18_1_and_no_other_stage(tmp_path):
    expected = {"0": "PASSED", "1": "PASSED", "2": "FAILED", "3": "PASSED"}
    assert outcomes(tmp_path, "0.18.1", PASSES) == expected


@pytest.mark.weekly
@pytest.mark.part03
def test_a_term_round_the_engine_fails_under_0_19_5_at_all_stages(tmp_path):
    expected = dict.fromkeys("123", "FAILED")
    assert outcomes(tmp_path, "0.19.5", TERMS) == expected
