"""No run of train_ddp.py ends in an abort: N launches of two ranks, N clean exits.

Runs have been seen to end in an abort where DDP's objects outlived the process group; the
script frees them first. Each rank leaves through the interpreter's own end, as under
torchrun. To make many launches affordable the ranks are forked from one process that has
imported torch, and train a small model on a few images.
"""

import os
import subprocess
import sys

import pytest

from tests import scripts
from tests.waiting import TIMEOUT_S
from utils.processes import free_port

# argv: a port for each launch
PROGRAM = """
import gc, os, sys
import torch
from torch.utils.data import TensorDataset
from tests import scripts
from utils import datasets

ports = sys.argv[1:]
train_ddp = scripts.load(scripts.TRAIN_DDP)
train_ddp.models.resnet18 = lambda in_channels: torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10)
)
datasets.DATASETS["digits"] = lambda split: TensorDataset(
    torch.rand(8, 1, 28, 28), torch.arange(8)
)
gc.freeze()  # nothing imported so far has to be walked in each child again
for port in ports:
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            sys.argv = ["train_ddp.py", "--epochs=1", "--batch-size=2"]
            sys.stdout = open(os.devnull, "w")
            train_ddp.main()
            sys.exit()  # through the interpreter's own end
        children.append(pid)
    print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


def exit_codes(launches: int) -> list[str]:
    ports = [str(free_port()) for _ in range(launches)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ports],
        cwd=scripts.ROOT,
        env=os.environ | {"PYTHONPATH": str(scripts.ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(30, marks=pytest.mark.weekly),
    ],
)
def test_launches_end_cleanly(launches):
    assert exit_codes(launches) == ["0 0"] * launches
