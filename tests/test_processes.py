"""utils.processes: what holds in every process that imports utils."""

import inspect
import os
import platform
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from utils.cluster import start_ray

import cloudpickle
import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.waiting import TIMEOUT_S
from utils import processes
from utils.launch import run_ranks


@pytest.mark.parametrize("first", ["torch", "utils.settings"])
def test_one_thread_whatever_is_imported_first(monkeypatch, first):
    """Also where nothing has set the variable before Python started."""
    code = f"import {first}, torch, utils.settings; print(torch.get_num_threads())"
    for setting, threads in ((None, "1"), ("2", "2")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if setting:
            monkeypatch.setenv("OMP_NUM_THREADS", setting)
        command = [sys.executable, "-c", code]
        answer = subprocess.check_output(command, text=True, timeout=TIMEOUT_S)
        assert answer.strip() == threads


V2 = {"own": "0::/pod/ann\n", "pod/cpu.max": "200000 100000\n"}
V1 = {"own": "3:memory:/\n2:cpu,cpuacct:/ann\n0::/\n"}
V1 |= {"cpu,cpuacct/ann/cpu.cfs_quota_us": "350000\n"}
V1 |= {"cpu,cpuacct/ann/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, 16),  # not Linux
        (V2, 2),  # a limit of the group above holds, too
        (V2 | {"pod/ann/cpu.max": "150000 100000\n"}, 1),
        (V2 | {"pod/ann/cpu.max": "50000 100000\n"}, 1),  # half a CPU
        (V2 | {"pod/cpu.max": "max 100000\n"}, 16),
        (V1, 3),
        (V1 | {"cpu,cpuacct/ann/cpu.cfs_quota_us": "-1\n"}, 16),
    ],
)
def test_a_seat_has_its_own_cpus_and_not_those_of_its_node(
    monkeypatch, tmp_path, files, found
):
    monkeypatch.setattr(processes, "CGROUPS", tmp_path)
    monkeypatch.setattr(processes, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processes.cpus() == found


def test_a_batch_of_ray_data_is_no_reason_to_warn():
    code = (
        "import sys; from importlib import import_module\n"
        "for name in sys.argv[1:]: import_module(name)\n"
        "import numpy, torch\n"
        "batch = numpy.zeros(2)\n"
        "batch.flags.writeable = False\n"
        "torch.as_tensor(batch)"
    )
    for modules, warns in ([], True), (["utils"], False):  # a control, too
        command = [sys.executable, "-c", code, *modules]
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S)
        assert (b"array is not writable" in done.stderr) == warns


def test_a_free_port_is_the_next_one_that_nobody_listens_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        assert first < processes.free_port(first) < first + 1000


def test_no_connection_takes_a_free_port_before_it_is_used():
    """One test in two thousand failed for that."""
    found = [processes.free_port() for _ in range(50)]
    settings = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if settings.exists():
        assert max(found) < int(settings.read_text().split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux alone")
def test_a_port_is_given_once_to_this_process_and_to_others(monkeypatch):
    """Ranks of two jobs that start at once would meet at one address."""
    # above where others begin, so that none of them takes one meanwhile
    monkeypatch.setattr(processes.secrets, "randbelow", lambda most: most + 500)
    first, second = processes.free_port(), processes.free_port()
    assert 29500 <= first < second
    asked = "from utils import processes as p; p.secrets.randbelow = lambda n: n + 500"
    command = [sys.executable, "-c", f"{asked}; print(p.free_port())"]
    other = int(subprocess.check_output(command, text=True, timeout=TIMEOUT_S))
    again = int(subprocess.check_output(command, text=True, timeout=TIMEOUT_S))
    assert other == again > second  # a process that has ended reserves none
    first = processes.free_port(8400)  # as the dashboard of a Ray wants it
    assert processes.free_port(8400) == first  # after a Ray that has ended
    command = [sys.executable, "-c", f"{asked}; print(p.free_port({first}))"]
    assert int(subprocess.check_output(command, text=True, timeout=TIMEOUT_S)) > first


FULL = "RAY_local_fs_capacity_threshold"


@pytest.mark.weekly
@pytest.mark.ray
def test_ray_obeys_these_variables():
    """It spills no object to a disk that is full enough, and gives workers their cores."""
    assert FULL in processes.RAY_AT_START
    program = """
from utils.cluster import start_ray
import numpy, os, ray
start_ray(1, address="local", object_store_memory=80 << 20)
print("niceness", ray.get(ray.remote(lambda: os.nice(0)).remote()))
try:
    kept = [ray.put(numpy.ones(10 << 20, numpy.uint8)) for _ in range(12)]
except ray.exceptions.OutOfDiskError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {FULL: "0.0001"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert f"niceness {os.nice(0)}\n" in done.stdout, done.stderr
    assert "Local disk is full" in done.stdout, done.stderr


# Of thousands, where glibc gives a freed block of 40 MiB back: it does so by itself.
MANY = 1000


def faults() -> int:
    """Return this thread's page faults for a large block, after freeing one like it."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        block = b"x" * (40 << 20)
        del block
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.fixture
def by_value():
    """Send functions from here as those of a notebook: without importing this."""
    module = sys.modules[__name__]
    for library in (cloudpickle, ray.cloudpickle):
        library.register_pickle_by_value(module)
    yield
    for library in (cloudpickle, ray.cloudpickle):
        library.unregister_pickle_by_value(module)


@pytest.fixture
def script(tmp_path) -> Path:
    """Write a script that imports utils as the workshop's do, and prints its faults."""
    path = tmp_path / "train.py"
    lines = ["import resource", "from utils import settings", inspect.getsource(faults)]
    path.write_text("\n".join([*lines, "print(faults())"]))
    return path


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_ranks_keep_the_memory_that_they_freed(by_value, script):
    """Of torchrun and of run_ranks; and what is set by glibc's own variables counts."""
    assert max(run_ranks(faults, 2)) < MANY
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = subprocess.check_output(
        [*torchrun, "--nproc_per_node=2", script], text=True, timeout=TIMEOUT_S
    )
    assert max(map(int, ranks.split())) < MANY
    theirs = os.environ | {"MALLOC_ARENA_TEST_": "8"}  # its default
    alone = [sys.executable, script]
    assert int(subprocess.check_output(alone, env=theirs, timeout=TIMEOUT_S)) > MANY


@pytest.mark.parametrize(
    ("most", "set_to"), [(2**31, 1 << 30), (32 << 20, 32 << 20), (None, None)]
)
def test_the_allocator_gets_what_the_c_library_takes(monkeypatch, most, set_to):
    """Before glibc 2.35 at most 32 MiB, else the rest would do harm alone; musl nothing."""
    settings = {}

    def mallopt(parameter: int, value: int) -> int:
        if parameter == processes.M_MMAP_THRESHOLD and value > most:
            return 0
        settings[parameter] = value
        return 1

    library = SimpleNamespace(mallopt=mallopt) if most else SimpleNamespace()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    processes.keep_freed_memory()
    trim, threshold = processes.M_TRIM_THRESHOLD, processes.M_MMAP_THRESHOLD
    assert settings == ({trim: 1 << 30, threshold: set_to} if most else {})


@pytest.mark.weekly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.ray
def test_ray_workers_keep_the_memory_that_they_freed(by_value, tmp_path):
    def train():
        without = faults()
        from utils import settings  # noqa: F401

        return without, faults()

    start_ray(num_workers=1)
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=tmp_path),
    )
    try:
        without, kept = trainer.fit().return_value
    finally:
        ray.shutdown()
    assert kept < MANY < without
