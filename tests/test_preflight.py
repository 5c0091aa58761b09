"""utils.preflight: what fits a cluster, and what all of its nodes see."""

import os

from utils.cluster import start_ray

import pytest
import ray

from utils import preflight
from utils.errors import BadInput

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def started():
    start_ray(2)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("nodes", "workers", "resources", "fits"),
    [
        ([{"CPU": 4}], 4, {"CPU": 1}, True),
        ([{"CPU": 4}], 5, {"CPU": 1}, False),
        # one worker has to fit one node
        ([{"CPU": 3}, {"CPU": 3}], 3, {"CPU": 2}, False),
        ([{"CPU": 4}, {"CPU": 4}], 4, {"CPU": 2}, True),
        ([{"CPU": 8, "GPU": 1}], 2, {"CPU": 1, "GPU": 0.5}, True),
        ([{"CPU": 8}], 1, {"GPU": 1}, False),
        ([], 1, {"CPU": 1}, False),
    ],
)
def test_workers_have_to_fit_the_nodes(monkeypatch, nodes, workers, resources, fits):
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    dead = [{"Alive": False, "Resources": {"CPU": 100, "GPU": 100}}]
    monkeypatch.setattr(preflight.ray, "nodes", lambda: alive + dead)
    for name in ("cluster_resources", "available_resources"):  # nobody else is there
        monkeypatch.setattr(preflight.ray, name, lambda: {"CPU": 100, "GPU": 100})
    if fits:
        preflight.check_fits(workers, resources)
    else:
        with pytest.raises(BadInput, match="has room for"):
            preflight.check_fits(workers, resources)


def test_a_token_for_anyscale_on_a_laptop_is_no_cluster(monkeypatch):
    monkeypatch.delenv("WORKSHOP_AUTOSCALING", raising=False)
    monkeypatch.setenv("ANYSCALE_CLI_TOKEN", "a secret")
    assert not preflight.is_autoscaling()
    monkeypatch.setenv("ANYSCALE_CLUSTER_ID", "ses_1")  # set on all nodes of a cluster
    assert preflight.is_autoscaling()


@pytest.mark.parametrize(
    ("mode", "gpus", "grows", "expected"),
    [
        ("smoke", 4, "1", False),
        ("full", 4, "0", True),  # on other nodes: this machine may have none
        ("full", 0, "0", False),
        ("full", 0, "1", True),  # none yet, but the cluster adds nodes
    ],
)
def test_gpus_are_judged_from_the_cluster(monkeypatch, mode, gpus, grows, expected):
    monkeypatch.setenv("WORKSHOP_MODE", mode)
    monkeypatch.setenv("WORKSHOP_AUTOSCALING", grows)
    monkeypatch.setattr(preflight, "own_ray", False)
    monkeypatch.setattr(preflight.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(preflight.ray, "cluster_resources", lambda: {"GPU": gpus})
    assert preflight.use_gpu() == expected
    assert ("GPU" in preflight.default_resources()) == expected


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(("free", "waits"), [(2.0, False), (1.0, True)])
def test_a_run_that_waits_says_for_what(monkeypatch, capsys, grows, free, waits):
    """Once, and not every minute with a traceback, as Ray Train does by default."""
    held = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    monkeypatch.setenv(held, "")  # so that it is as before after this test
    monkeypatch.delenv(held)
    monkeypatch.setattr(preflight, "grows", lambda: grows)
    there = [] if grows else [{"Alive": True, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr(preflight.ray, "nodes", lambda: there)
    monkeypatch.setattr(preflight.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(preflight.ray, "available_resources", lambda: {"CPU": free})
    preflight.check_fits(2, {"CPU": 1})
    said = capsys.readouterr().out
    assert ("2 CPU, 1 are free: this run waits until other jobs" in said) == waits
    assert ("the cluster has grown" in said) == (waits and grows)
    assert (held in os.environ) == waits


def test_workers_that_leave_no_cpu_to_read_data_are_refused(started, monkeypatch):
    cpus = int(ray.cluster_resources()["CPU"])
    preflight.check_spare_cpus(cpus - 1)
    with pytest.raises(BadInput, match="none is left to read and decode the data"):
        preflight.check_spare_cpus(cpus)
    monkeypatch.setattr(preflight, "grows", lambda: True)
    preflight.check_spare_cpus(1000)  # the cluster gets more


def test_a_storage_path_that_workers_see_differently_is_refused(
    started, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # A folder of the same name that is another folder in every process, as on other nodes.
    preflight.check_shared("/proc/self/cwd")  # on one node, all see the same
    nodes = ray.nodes()
    monkeypatch.setattr(preflight.ray, "nodes", lambda: nodes * 2)
    preflight.check_shared(tmp_path)
    assert os.listdir(tmp_path) == []  # nothing is left behind
    with pytest.raises(BadInput, match="is not shared: node"):
        preflight.check_shared("/proc/self/cwd")


def test_data_that_only_some_nodes_have_are_refused(started, tmp_path, monkeypatch):
    """A folder to read from only, and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    nodes = ray.nodes()
    monkeypatch.setattr(preflight.ray, "nodes", lambda: nodes * 2)
    monkeypatch.setattr(preflight.Path, "touch", read_only)
    preflight.check_shared(tmp_path)
    preflight.check_shared("s3://bucket/is/not/looked/at")
    for path in ("/proc/self/cwd", "/proc/self/cwd/a.parquet"):
        with pytest.raises(BadInput, match=r"do not see a\.parquet in it"):
            preflight.check_shared(path)


def test_a_folder_that_is_not_there_is_not_called_unshared(
    started, tmp_path, monkeypatch
):
    """Whoever reads it says that it is missing."""
    nodes = ray.nodes()
    monkeypatch.setattr(preflight.ray, "nodes", lambda: nodes * 2)
    preflight.check_shared(tmp_path / "not there")


def read_only(*_):
    raise OSError(30, "Read-only file system")
