"""DeepSpeed, loaded by utils.zero: nothing is compiled, and no compiler is needed."""

import json
import subprocess
import sys

import pytest
import torch

from tests import scripts, sharding
from tests.waiting import TIMEOUT_S
from utils import zero
from utils.processes import free_port


def train() -> tuple[list[float], bool]:
    losses = sharding.zero(3, torch.float32, 2)["losses"]
    return losses, "torch._inductor.compile_fx" in sys.modules


@pytest.mark.slow
def test_zero_trains_without_a_compiler():
    """Left alone, DeepSpeed would compile an operator when it starts on a CPU.

    And it would import torch's own compiler, 2 s in each process, for an optimizer that
    nobody asked for. In a process of its own: the ranks' server has loaded DeepSpeed.
    """
    code = (
        "import json; from tests import test_zero; print(json.dumps(test_zero.train()))"
    )
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PATH": "/nowhere"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = scripts.environment() | rank | {"PYTHONPATH": str(scripts.ROOT)}
    environment.pop("CXX", None)
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    losses, has_compiler = json.loads(run.stdout.splitlines()[-1])
    assert losses[1] < losses[0]
    assert not has_compiler


def test_deepspeed_is_not_loaded_for_two_devices():
    zero.load_for("cpu")
    with pytest.raises(RuntimeError, match="is loaded for cpu, not for cuda"):
        zero.load_for("cuda")


def test_importing_its_configuration_starts_nothing():
    """Who wants ranks that find DeepSpeed imported calls `launch.preload`."""
    code = (
        "import sys; from utils import launch; before = list(launch._preloaded); "
        "import utils.zero, utils.zero_config; assert launch._preloaded == before; "
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
