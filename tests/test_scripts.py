"""The scripts of parts 01 and 02 learn, go on where they were, and agree."""

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until
from utils import datasets
from utils.errors import BadInput
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
    listed = folder / "train_ray_ddp" / "checkpoint_manager_snapshot.json"
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
    files = [*folder.glob("step-*.pt"), *folder.glob("*/checkpoint_*/checkpoint.pt")]
    states = [torch.load(file, weights_only=True) for file in files]
    assert sorted(state["epoch"] for state in states) == [1, 2]
    return max(states, key=lambda state: state["epoch"])


@pytest.mark.weekly
def test_both_scripts_learn(trained):
    """To 95% in a third epoch, which the notebooks train."""
    ddp, ray = (saved_state(folder)["accuracy"] for folder, _ in trained.values())
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


def options(folder: Path, **changes) -> Namespace:
    found = {
        "checkpoint_dir": folder,
        "run": {"script": "a.py", "--lr": 1},
        "keep": 2,
        "epochs": 3,
    }
    return Namespace(**found | changes)


def test_a_rank_that_does_not_see_the_checkpoint_asks_for_a_shared_folder(tmp_path):
    """Rank 0 finds its checkpoint on its node; rank 1, on another one, would start anew."""

    def load():
        train_ddp = scripts.load(scripts.TRAIN_DDP)
        train_ddp.set_up()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        args = options(tmp_path / os.environ["RANK"])
        at = {"epoch": 1, "images": 0, "steps": 5, "accuracy": 0.5}
        train_ddp.save_checkpoint(args, model, optimizer, at)
        args.checkpoint_dir = tmp_path / "0"
        if dist.get_rank() == 1:  # it has a disk of its own
            train_ddp.torch.load = lambda *_, **__: Path("nowhere").read_bytes()
        try:
            return train_ddp.load_checkpoint(args, model, optimizer)["epoch"]
        except BadInput as problem:
            return str(problem)

    first, second = run_ranks(load, 2)
    assert first == 1
    assert "name a folder that all nodes share" in second


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_goes_on_in_its_middle_with_the_images_that_are_left(ranks):
    """And the next one has an order of its own, also with one rank alone."""

    def order(epoch: int, start: int) -> list[int]:
        dist.init_process_group("gloo")
        sampler = datasets.ResumableSampler(range(12), seed=3)
        sampler.set_epoch(epoch, start)
        assert len(sampler) == len(list(sampler))
        return list(sampler)

    whole = run_ranks(order, ranks, 0, 0)
    assert sorted(number for share in whole for number in share) == [*range(12)]
    assert run_ranks(order, ranks, 0, 2) == [share[2:] for share in whole]
    assert run_ranks(order, ranks, 1, 0) != whole
