"""Pressing stop in a notebook: no process of the cell is left, and the next cell works.

The kernel is a real one. Jupyter's stop sends SIGINT to it and to what it started.
"""

import uuid

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests import scripts
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, end_left_over
from tests.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

RANKS = """
import os, time
from pathlib import Path
from utils.launch import run_ranks

def sleep(folder, seconds):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(seconds)
    return os.environ["RANK"]
"""
# Two CPUs: the next fit gets its workers only if those of the one before are gone.
FIT = """
from utils.cluster import start_ray
import ray.train, torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

start_ray(2, num_cpus=2)

def train_fn(config):
    for _ in range(config["steps"]):
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        Path(config["folder"], str(dist.get_rank())).touch()
        time.sleep(0.1)
    return ranks.item()

def fit(folder, steps):
    return TorchTrainer(
        train_fn,
        train_loop_config={"folder": folder, "steps": steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=f"{steps} steps", storage_path=folder),
    ).fit().return_value
"""


class Kernel:
    """A kernel that runs cells, and the processes that it started."""

    def __init__(self):
        self.marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(
            env=scripts.environment() | RECORDING_ENVIRONMENT | self.marker,
            cwd=scripts.ROOT,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    def run(self, code: str, files=()) -> tuple[str, str]:
        """Run a cell, and stop it once all `files` are there.

        Returns what it answered with (the name of the error, or "ok"), and all that it
        showed: streams, result and warnings.
        """
        request, shown = self.client.execute(code), []
        if files:
            wait_until(lambda: all(file.exists() for file in files))
            self.manager.interrupt_kernel()
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            content = message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if content.get("execution_state") == "idle":
                break
            shown.append(
                content.get("text") or content.get("data", {}).get("text/plain")
            )
        while True:
            reply = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if reply["parent_header"]["msg_id"] == request:
                answer = reply["content"].get("ename", reply["content"]["status"])
                return answer, "".join(filter(None, shown))

    def processes(self) -> dict[int, str]:
        """Return what it started, and itself: process ids and command lines."""
        found = {}
        for process in psutil.process_iter():
            try:
                if self.marker.items() <= process.environ().items():
                    found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:  # ended meanwhile, or of another user
                pass
        return found

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        end_left_over(self.marker)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


def test_stop_in_the_middle_of_run_ranks(kernel, tmp_path):
    there = [tmp_path / "0", tmp_path / "1"]
    works = f"run_ranks(sleep, 2, {str(tmp_path)!r}, 0)"
    assert kernel.run(RANKS + works) == ("ok", "['0', '1']")
    before = kernel.processes()  # the server that ranks are forked from stays
    for file in there:
        file.unlink()

    stopped = kernel.run(f"run_ranks(sleep, 2, {str(tmp_path)!r}, 600)", there)
    assert stopped == ("KeyboardInterrupt", "")  # and no traceback of a rank
    wait_until(lambda: kernel.processes() == before)
    assert kernel.run(works) == ("ok", "['0', '1']")


@pytest.mark.weekly  # that of run_ranks, above, in every change
def test_stop_in_the_middle_of_a_fit(kernel, tmp_path):
    assert kernel.run(RANKS + FIT)[0] == "ok"
    there = [tmp_path / "0", tmp_path / "1"]
    answer, shown = kernel.run(f"fit({str(tmp_path)!r}, 6000)", there)
    assert answer == "SystemExit"
    assert "To exit: use 'exit'" in shown  # what the lesson says to expect

    def actors():
        return [t for t in kernel.processes().values() if "Train" in t]

    wait_until(lambda: not actors())
    assert kernel.run(f"fit({str(tmp_path)!r}, 3)")[0] == "ok"
