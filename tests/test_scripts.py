"""The scripts of parts 01 and 02 learn, go on where they were, and agree."""

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests import scripts
from utils.errors import BadInput
from utils.launch import run_ranks

pytestmark = [pytest.mark.part01, pytest.mark.part02]


def train_on_two_ranks(*arguments) -> tuple[str, str]:
    """`main` of train_ddp.py on two ranks; what each of them printed."""

    def rank() -> str:
        sys.argv = [scripts.TRAIN_DDP.name, *map(str, arguments)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            scripts.load(scripts.TRAIN_DDP).main()
        return printed.getvalue()

    return tuple(run_ranks(rank, 2))


def kill_a_ray_worker(folder: Path) -> None:
    """SIGKILL to one of the workers of a run, in its second epoch; leaves a note."""
    noted = folder / "train_ray_ddp" / "checkpoint_manager_snapshot.json"
    deadline = time.time() + 200
    while time.time() < deadline:
        if noted.exists() and "checkpoint_2" in noted.read_text():
            workers = [
                process
                for process in psutil.Process().children(recursive=True)
                if "RayTrainWorker" in " ".join(process.cmdline())
            ]
            workers[-1].kill()
            (folder / "killed").write_text(f"one of {len(workers)}")
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[Path, tuple[Path, str]]:
    """Of both scripts: checkpoint folder and output.

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
    second, another = train_on_two_ranks(*arguments, 2, "--resume")
    assert other == another == ""  # rank 0 speaks
    results[scripts.TRAIN_DDP] = folder, first + second

    folder, _ = results[scripts.TRAIN_RAY_DDP]
    killer = threading.Thread(target=kill_a_ray_worker, args=[folder])
    killer.start()
    command = [sys.executable, scripts.TRAIN_RAY_DDP.name, "--num-workers", "2"]
    done = subprocess.run(
        [*command, "--epochs", "2", "--checkpoint-dir", folder],
        cwd=scripts.TRAIN_RAY_DDP.parent,
        env=scripts.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    results[scripts.TRAIN_RAY_DDP] = folder, done.stdout
    return results


def saved_state(folder: Path) -> dict:
    (file,) = folder.rglob("checkpoint.pt")
    return torch.load(file, weights_only=True)


@pytest.mark.slow
def test_both_scripts_learn(trained):
    """To 95% in a third epoch, which the notebooks train."""
    ddp, ray = (saved_state(folder)["accuracy"] for folder, _ in trained.values())
    assert ddp == ray >= 0.9


@pytest.mark.slow
def test_ray_replaced_a_worker_that_was_killed(trained):
    """And the run went on from its checkpoint: it ends with torchrun's weights, below."""
    folder, _ = trained[scripts.TRAIN_RAY_DDP]
    assert (folder / "killed").read_text() == "one of 2"


@pytest.mark.slow
def test_both_scripts_end_with_the_same_weights(trained):
    ddp, ray = (saved_state(folder)["model"] for folder, _ in trained.values())
    for name, value in ddp.items():
        torch.testing.assert_close(value, ray[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP], ids=lambda path: path.name
)
def test_every_epoch_is_one_line_without_noise(trained, path):
    lines = trained[path][1].splitlines()
    for number in (1, 2):
        (line,) = [line for line in lines if re.search(rf"epoch {number}\b", line)]
        assert "test accuracy" in line
    noise = "Warning|Reporting training result|Checkpoint successfully created"
    assert not [line for line in lines if re.search(noise, line)]


def test_a_restart_without_a_shared_folder_is_said(tmp_path):
    """Rank 0 finds its checkpoint on its node; rank 1, on another one, would start anew."""

    def load():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        train_ddp = scripts.load(scripts.TRAIN_DDP)
        train_ddp.set_up()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        folder = tmp_path / os.environ["RANK"]
        path = folder / "checkpoint.pt"
        if dist.get_rank() == 0:
            train_ddp.save_checkpoint(path, model, optimizer, 0, 0.5)
        path = train_ddp.command_line.find_checkpoint(folder, resume=False)
        try:
            return train_ddp.load_checkpoint(path, model, optimizer)
        except BadInput as problem:
            return str(problem)

    first, second = run_ranks(load, 2)
    assert first == 1
    assert "on several nodes, name a folder that all of them share" in second


def test_a_single_worker_of_ray_goes_on_with_the_next_order(monkeypatch, tmp_path):
    """Ray gives it no DistributedSampler; resumed, it must not repeat the first order."""
    script = scripts.load(scripts.TRAIN_RAY_DDP)

    def orders(first_epoch):
        seen = []

        def train_epoch(model, optimizer, train_loader):
            seen.append(torch.cat([labels for _, labels in train_loader]).tolist())
            return 0.0

        monkeypatch.setattr(script, "train_epoch", train_epoch)
        monkeypatch.setattr(script, "load_latest", lambda *_: first_epoch)

        def train_alone(config):  # Ray ends the group afterwards
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            script.train_fn(config)

        TorchTrainer(
            train_alone,
            train_loop_config={"dataset": "digits", "epochs": 2, "batch_size": 32}
            | {"lr": 1e-3},
            scaling_config=ScalingConfig(num_workers=0),  # in this process
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
        return seen

    monkeypatch.setattr(script, "evaluate", lambda *_: 0.0)
    monkeypatch.setattr(script, "report", lambda *_: None)
    first, second = orders(0)
    assert first != second
    assert orders(1) == [second]
