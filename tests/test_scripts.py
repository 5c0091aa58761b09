"""The scripts of parts 01 and 02 learn, go on where they were, and agree."""

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until
from utils.launch import run_ranks

pytestmark = pytest.mark.ray


def train_on_two_ranks(*arguments) -> tuple[str, str]:
    """Run `main` of train_ddp.py on two ranks; return what each of them printed."""

    def rank() -> str:
        sys.argv = [scripts.TRAIN_DDP.name, *map(str, arguments)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            scripts.load(scripts.TRAIN_DDP).main()
        return printed.getvalue()

    return tuple(run_ranks(rank, 2))


def kill_a_ray_worker(folder: Path) -> None:
    """Kill one of the workers of a run in its second epoch, and write down that it was."""
    listed = folder / "checkpoint_manager_snapshot.json"
    wait_until(lambda: listed.exists() and "checkpoint_2" in listed.read_text())
    workers = scripts.workers_of_ray(psutil.Process())
    workers[-1].kill()
    (folder / "killed").write_text(f"one of {len(workers)}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[Path, tuple[Path, str]]:
    """Return checkpoint folder and output of both scripts.

    After the first epoch a worker under Ray is killed, and torchrun's run is resumed: both
    go on from a checkpoint, with the same rounding.
    """
    results = {}
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        folder = tmp_path_factory.mktemp(path.stem)
        results[path] = folder, ""
    folder, _ = results[scripts.TRAIN_DDP]
    arguments = ["--checkpoint-dir", folder, "--epochs"]
    first, other = train_on_two_ranks(*arguments, 1)
    second, another = train_on_two_ranks(*arguments, 2)
    assert other == another == ""  # rank 0 speaks
    results[scripts.TRAIN_DDP] = folder, first + second

    folder, _ = results[scripts.TRAIN_RAY_DDP]
    killer = threading.Thread(target=kill_a_ray_worker, args=[folder], daemon=True)
    killer.start()
    command = [sys.executable, scripts.TRAIN_RAY_DDP.name, "--num-workers", "2"]
    done = subprocess.run(
        [*command, "--epochs", "2", "--checkpoint-dir", folder],
        cwd=scripts.TRAIN_RAY_DDP.parent,
        env=scripts.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    results[scripts.TRAIN_RAY_DDP] = folder, done.stdout
    return results


def saved_state(folder: Path) -> dict:
    """Return the state after the second of two epochs, the newest of two that are kept."""
    states = {json.loads(f.read_text())["epoch"]: f for f in folder.glob("*/run.json")}
    assert sorted(states) == [1, 2]
    newest = states[2]
    found = torch.load(newest.with_name("checkpoint.pt"), weights_only=True)
    return found | json.loads(newest.read_text())["metrics"]


@pytest.mark.weekly
def test_both_scripts_learn(trained):
    """To 95% in a third epoch, which the notebooks train."""
    ddp, ray = (saved_state(folder)["test_accuracy"] for folder, _ in trained.values())
    assert ddp == ray >= 0.9


@pytest.mark.weekly
def test_ray_replaced_a_worker_that_was_killed(trained):
    """And the run went on from its checkpoint: it ends with torchrun's weights, below."""
    folder, _ = trained[scripts.TRAIN_RAY_DDP]
    assert (folder / "killed").read_text() == "one of 2"


@pytest.mark.weekly  # 02/02 compares them in every change
def test_both_scripts_end_with_the_same_weights(trained):
    ddp, ray = (saved_state(folder)["model"] for folder, _ in trained.values())
    for name, value in ddp.items():
        torch.testing.assert_close(value, ray[name], rtol=0, atol=1e-6)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "path", [scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP], ids=lambda path: path.name
)
def test_a_run_prints_one_line_per_epoch_and_no_warnings(trained, path):
    lines = trained[path][1].splitlines()
    for number in (1, 2):
        found = [line for line in lines if re.search(rf"epoch {number}\b.*loss", line)]
        assert len(found) == 1 and "test accuracy" in found[0]
    unwanted = "Warning|Reporting training result|Checkpoint successfully created"
    assert not [line for line in lines if re.search(unwanted, line)]
