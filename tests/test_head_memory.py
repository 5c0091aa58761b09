"""What a run costs the head of a cluster in memory: the table of cluster/README.md."""

import contextlib
import re
import shlex
import sys
import time
from collections import defaultdict

import psutil
import pytest

from tests.tools.notebooks import ROOT
from utils import nodes

from ray.job_submission import JobSubmissionClient  # isort: skip

pytestmark = [pytest.mark.part02, pytest.mark.xdist_group("ray")]
# The rows of the page, by what the processes in them are called.
ROWS = {
    "driver": "train_ray_ddp|JobSupervisor",
    "TrainController": "TrainController",
    "its four helpers": "GroupCleaner|SynchronizationActor|DatasetManager|Preemption",
}
WORKER = "each of the two training workers"


def said() -> dict[str, int]:
    """Return the private memory in MiB by row of the page."""
    page = (ROOT / "02-ddp-pytorch-ray/cluster/README.md").read_text()
    table = page.split("| | where | MiB |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|,]+?)[,|].*\| (\d+) \|$", table, re.MULTILINE)
    return {name.strip(): int(number) for name, number in rows}


def private(raylet: int) -> dict[int, tuple[str, float]]:
    """Return by process of a node its name, and what it shares with no other, in MiB."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(raylet).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline())
                found[process.pid] = name, process.memory_full_info().uss / 2**20
    return found


@pytest.mark.weekly
def test_a_run_costs_the_head_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.delenv(
        "RAY_ADDRESS", raising=False
    )  # a client of jobs goes there first
    cluster = nodes.start(2, workers=2, head_cpus=0)
    peaks = defaultdict(float)  # by name and process
    try:
        head = cluster.head_node
        raylets = {
            each: each.all_processes["raylet"][0].process.pid
            for each in cluster.list_all_nodes()
        }
        client = JobSubmissionClient(nodes.dashboard(cluster))
        script = ROOT / "02-ddp-pytorch-ray" / "train_ray_ddp.py"
        variables = {"WORKSHOP_STORAGE": str(tmp_path), "WORKSHOP_MODE": "smoke"}
        job = client.submit_job(
            entrypoint=shlex.join([sys.executable, str(script), "--epochs", "1"]),
            runtime_env={"env_vars": variables},
        )
        while not (status := client.get_job_status(job)).is_terminal():
            for node, raylet in raylets.items():
                for pid, (name, size) in private(raylet).items():
                    peaks[node is head, name, pid] = max(
                        peaks[node is head, name, pid], size
                    )
            time.sleep(0.5)
        assert status == "SUCCEEDED", client.get_job_logs(job)
    finally:
        nodes.stop(cluster)
    # a process has several names while it starts: its largest counts
    largest: dict[tuple[bool, int], tuple[float, str]] = {}
    for (on_head, name, pid), size in peaks.items():
        largest[on_head, pid] = max(largest.get((on_head, pid), (0, "")), (size, name))
    measured = {
        row: sum(
            size
            for (on_head, _), (size, name) in largest.items()
            if on_head and re.search(names, name)
        )
        for row, names in ROWS.items()
    }
    workers = [size for size, name in largest.values() if "RayTrainWorker" in name]
    measured[WORKER] = max(workers)
    print(measured)
    assert said().keys() == measured.keys() and len(workers) == 2
    for row, mib in said().items():
        assert 0.7 * mib < measured[row] < 1.3 * mib, (row, measured)
