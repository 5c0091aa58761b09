"""Prometheus scrapes a run of which everything is known, and says the same numbers."""

import shutil
import subprocess
import sys
import tempfile

import pytest

from tests import scripts
from tests.patience import PATIENCE, wait_until
from utils.processes import free_port

pytestmark = pytest.mark.part02

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
TASKS = 'sum(ray_tasks{Name="counted", State="FINISHED"})'


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
            running.wait(PATIENCE)


def said(address: str, number: str, expected: float) -> float:
    """Return what Prometheus says, once it is about that."""
    values = [None]

    def is_said() -> bool:
        if answer := produce.ask(address, number):
            values.append(float(answer[0]["value"][1]))
        return values[-1] == pytest.approx(expected, rel=0.01)

    wait_until(is_said, said=lambda: values[-1])
    return values[-1]


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
def test_the_numbers_are_those_of_the_run(known):
    address, running = known
    assert said(address, TASKS, 20) == 20
    assert said(address, HELD, 5 * OBJECT) == pytest.approx(5 * OBJECT, rel=0.001)
    assert said(address, SPILLED, 0) == 0
    assert said(address, produce.NUMBERS["nodes"], 1) == 1
    assert said(address, produce.NUMBERS["full"], 0.5) == pytest.approx(0.5, rel=0.01)

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


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
def test_every_target_answers_and_another_name_does_not(known):
    address, _ = known

    def all_up() -> bool:
        """Ask once for all: a scrape that comes later than a second counts as a 0."""
        up = [one["value"][1] for one in produce.ask(address, "up")]
        return up == ["1"] * 3

    wait_until(all_up)
    assert produce.ask(address, "ray_no_such_number") == []


def test_the_page_asks_for_these_numbers():
    page = (produce.HERE / "README.md").read_text()
    for name in produce.NUMBERS:
        assert f"`{produce.NUMBERS[name]}`" in page, name
