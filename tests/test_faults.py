"""Faults of controllers, drivers, nodes and storage: no checkpoint is lost.

That of a worker is tried in 02-ddp-pytorch-ray/04_fault_tolerance.ipynb.

Every run here ends with the weights of a run without Ray in which nothing happens.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from utils.cluster import start_ray

import numpy as np
import psutil
import pytest
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.waiting import TIMEOUT_S
from utils.events import note, noted, wait_for, when

pytestmark = [pytest.mark.slow, pytest.mark.ray]

EPOCHS = 4


def one_epoch(model, optimizer, epoch):
    """Shuffle by a generator that knows the epoch; dropout draws from the global state."""
    generator = torch.Generator().manual_seed(epoch)
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(99))
    for batch in torch.randperm(256, generator=generator).split(32):
        optimizer.zero_grad()
        model(inputs[batch]).square().mean().backward()
        optimizer.step()


def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 1)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def undisturbed():
    model, optimizer = build()
    for epoch in range(EPOCHS):
        one_epoch(model, optimizer, epoch)
    return weights(model)


def train_fn(config):
    """Note each start and epoch; the first attempt waits in epoch `wait_in` for a file."""
    import tempfile

    model, optimizer = build()
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        first_epoch = state["epoch"] + 1
    node = ray.get_runtime_context().get_node_id()
    note(config["log"], "start", epoch=first_epoch, node=node)
    for epoch in range(first_epoch, EPOCHS):
        one_epoch(model, optimizer, epoch)
        if epoch == config["wait_in"] and first_epoch < epoch:
            ray.train.get_all_reported_checkpoints()  # waits until they count
            note(config["log"], "waits", node=node)
            while not Path(config["log"] + ".go").exists():
                time.sleep(0.05)
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch, "random": torch.get_rng_state()}
            torch.save(state, Path(folder, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint)
        note(config["log"], "saved", epoch=epoch)
    return weights(model)


def fit(folder, log, wait_in=None, max_failures=0, resources=None):
    config = {"log": str(log), "wait_in": wait_in}
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker=resources),
        run_config=RunConfig(
            name="faults",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    return trainer.fit().return_value


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    start_ray(1)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


def kill_driver(log, folder):
    """Fit in another process until it waits; then kill it, and all of its Ray."""
    code = (
        "import sys; from pathlib import Path; from tests import test_faults as t\n"
        "t.start_ray(1); t.ray.cloudpickle.register_pickle_by_value(t)\n"
        "t.fit(Path(sys.argv[1]), Path(sys.argv[2]), wait_in=1)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(log)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(log, "waits", unless=lambda: driver.poll() is not None)
    its_ray = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait(timeout=TIMEOUT_S)
    for process in its_ray:  # as when the driver's machine loses its power
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_controller(_):
    for process in psutil.Process().children(recursive=True):
        if "TrainController" in " ".join(process.cmdline()):
            process.kill()


@pytest.mark.weekly  # 02/04 kills a driver in every change
def test_sigkill_of_driver_and_controller(tmp_path):
    """One run loses both, one after the other: the driver with all its Ray.

    Each time a new fit() with the same name and storage path goes on where it was.
    """
    logs = [tmp_path / name for name in ("driver", "controller", "last")]
    kill_driver(logs[0], tmp_path)

    killed = when(logs[1], "waits", kill_controller)
    with pytest.raises(ray.exceptions.RayActorError):
        fit(tmp_path, logs[1], wait_in=2)
    killed.result(timeout=TIMEOUT_S)

    result = fit(tmp_path, logs[2])
    starts = [[entry["epoch"] for entry in noted(log, "start")] for log in logs]
    assert starts == [[0], [1], [2]]
    assert np.array_equal(result, undisturbed())


@pytest.mark.weekly  # tests/test_full_disk.py fills one in every change
def test_storage_that_fills_up_and_turns_read_only(small_disk, tmp_path):
    """Each ends the run with an error; mended, it goes on where it was."""
    logs = [tmp_path / name for name in ("full", "protected", "mended")]
    filler = small_disk / "filler"

    def fill(_):
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(8_000_000))
        Path(f"{logs[0]}.go").touch()

    def remount(option):
        command = ["mount", "-o", f"remount,{option}", str(small_disk)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)

    def protect(_):
        remount("ro")
        Path(f"{logs[1]}.go").touch()

    filled = when(logs[0], "waits", fill)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(small_disk, logs[0], wait_in=1)
    filled.result(timeout=TIMEOUT_S)
    assert [entry["epoch"] for entry in noted(logs[0], "saved")] == [0]
    filler.unlink()

    protected = when(logs[1], "waits", protect)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(small_disk, logs[1], wait_in=2)
    protected.result(timeout=TIMEOUT_S)
    remount("rw")

    assert np.array_equal(fit(small_disk, logs[2]), undisturbed())
    starts = [[entry["epoch"] for entry in noted(log, "start")] for log in logs]
    assert starts == [[0], [1], [2]]


@pytest.mark.weekly  # 02/05 kills a node, and tests/test_nodes.py cuts one off
def test_sigkill_of_a_node(tmp_path, monkeypatch):
    """Two nodes with room for the worker: the one it runs on is killed."""
    ray.shutdown()
    log, resources = tmp_path / "log", {"CPU": 1, "trainer": 1}
    quick = {"health_check_period_ms": 500}  # not 3000: lost after five misses
    head = {"num_cpus": 2, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, resources={"trainer": 1}) for _ in range(2)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # right after a loss Ray may wait for a place on the lost node, for 60 s if not told
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    try:
        start_ray(1, resources_per_worker=resources, runtime_env={})

        def kill_its_node(entry):
            (node,) = [n for n in nodes if n.node_id == entry["node"]]
            cluster.remove_node(node, allow_graceful=False)

        killed = when(log, "waits", kill_its_node)
        result = fit(tmp_path, log, wait_in=2, max_failures=3, resources=resources)
    finally:
        ray.shutdown()
        cluster.shutdown()
    killed.result(timeout=TIMEOUT_S)
    starts = noted(log, "start")
    assert [entry["epoch"] for entry in starts] == [0, 2]
    assert starts[0]["node"] != starts[1]["node"]
    assert np.array_equal(result, undisturbed())
