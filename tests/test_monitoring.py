"""Prometheus scrapes a run of which everything is known, and answers with its numbers."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until
from utils.processes import free_port

produce = scripts.load(
    scripts.ROOT / "02-ddp-pytorch-ray/cluster/monitoring/produce.py"
)
OBJECT = 30 * 2**20  # bytes
# 5 objects of 30 MiB are put into a store of 300, and 20 tasks run; 9 more when told to.
RUN = """
import sys
from utils.cluster import start_ray
import numpy as np
import ray

start_ray(2, object_store_memory=300 * 2**20, _temp_dir=sys.argv[1])
kept = [ray.put(np.zeros(30 * 2**20, np.uint8)) for _ in range(5)]

@ray.remote(num_cpus=0)
def counted(number):
    return number

ray.get([counted.remote(number) for number in range(20)])
print("ready", flush=True)
sys.stdin.readline()
kept += [ray.put(np.zeros(30 * 2**20, np.uint8)) for _ in range(9)]
print("more", flush=True)
sys.stdin.read()
"""
HELD = 'sum(ray_object_store_memory{Location="MMAP_SHM"})'
SPILLED = 'sum(ray_object_store_memory{Location="SPILLED"})'


@pytest.fixture(scope="module")
def known():
    """Yield Prometheus's address, with this repository's configuration, and the run."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed here")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        running = subprocess.Popen(
            [sys.executable, "-c", RUN, folder],
            cwd=scripts.ROOT,
            env=scripts.environment() | {"RAY_metrics_report_interval_ms": "1000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            addresses = f"{folder}/prom_metrics_service_discovery.json"
            with produce.prometheus(free_port(9190), addresses) as found:
                while "ready" not in (line := running.stdout.readline()):
                    assert line, "the run ended early"
                yield found, running
        finally:
            running.stdin.close()
            running.wait(TIMEOUT_S)


def wait_for(address: str, number: str, expected: float) -> None:
    """Wait until Prometheus answers with that number, to a thousandth."""
    answers: list = []

    def is_there() -> bool:
        answers.extend(produce.ask(address, number))
        values = [float(one["value"][1]) for one in answers[-1:]]
        return values == [pytest.approx(expected, rel=0.001)]

    wait_until(is_there, said=lambda: answers[-1:])


@pytest.mark.weekly
@pytest.mark.ray
def test_prometheus_has_the_numbers_of_the_run(known):
    address, running = known
    wait_for(address, "sum(up)", 3)  # a node, the autoscaler, the dashboard
    wait_for(address, 'sum(ray_tasks{Name="counted", State="FINISHED"})', 20)
    wait_for(address, HELD, 5 * OBJECT)
    wait_for(address, SPILLED, 0)
    wait_for(address, produce.NUMBERS["nodes"], 1)
    wait_for(address, produce.NUMBERS["full"], 0.5)
    assert produce.ask(address, "ray_no_such_number") == []

    running.stdin.write("\n")  # now more than fits
    running.stdin.flush()
    assert "more" in running.stdout.readline()

    def much_elsewhere() -> float:
        """Return 0 also where a scrape was late: Prometheus answers nothing then."""
        answer = produce.ask(address, SPILLED)
        found = float(answer[0]["value"][1]) if answer else 0.0
        return found if found >= 4 * OBJECT else 0.0

    spilled = wait_until(much_elsewhere)
    assert 4 * OBJECT <= spilled < 14 * OBJECT  # at least what is more than the store
    whole = round(spilled / OBJECT)
    assert spilled == pytest.approx(whole * OBJECT, rel=0.001)


def test_the_page_asks_for_these_numbers_and_ray_has_them():
    """Ray's own dashboards ask for them, too."""
    page = (produce.HERE / "README.md").read_text()
    for name in produce.NUMBERS:
        assert f"`{produce.NUMBERS[name]}`" in page, name
    folder = Path(importlib.util.find_spec("ray").origin).parent
    dashboards = folder / "dashboard" / "modules" / "metrics" / "dashboards"
    known = "".join(path.read_text() for path in dashboards.glob("*.py"))
    labels = {"ray_train", "ray_io_cluster"}
    names = set(re.findall(r"\b(?:ray|autoscaler)_\w+", page)) - labels
    assert len(names) >= 5
    assert [name for name in names if not re.search(rf"\b{name}\b", known)] == []
