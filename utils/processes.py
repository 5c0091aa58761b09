"""Prepare a process of the workshop, before torch and Ray are imported.

`import utils` calls `prepare`, so it holds in notebooks, scripts, ranks and workers alike.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from utils.errors import BadInput

# What Ray reads when it is imported. What it reads later is set by `cluster.start_ray`.
RAY_AT_IMPORT = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # Ray Data and others would start a second Ray, without room for our workers, where
    # `start_ray` was forgotten.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Ray would restart its workers through `uv run`, in an environment without packages.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Against Ray's default. The new Parquet reader starts 32 actors that read footers, in
    # every epoch again, and packs files into tasks of 128 MiB. 02/03 measures both.
    "RAY_DATA_USE_DATASOURCE_V2": "0",
    # Raylets' notes, full of pids and addresses, reach a driver even if
    # log_to_driver=False. Whoever waits for one that died gets an exception. On a slow
    # machine Ray warns of many started processes, which is no fault. Two notes of
    # Ray Train's workers repeat every report, and hide what a script prints between them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "worker died or was killed|retries remaining|Raylet is terminated"
        "|has been marked dead|cannot be scheduled right now"
        "|worker processes have been started"
        "|Reporting training result|Checkpoint successfully created"
        # What a fit says of its start, on a cluster from every process. Ray's logs have it.
        "|Requesting resources: |(Attempting to start|Started) training worker group"
        r"|^- \(ip=.*world_rank=|Setting up process group for: |Moving model to device: "
        "|Wrapping provided model in |and max_restarts > 0"
        # Ray Data's account of each execution, and torch's of a network without names
        "|(Starting execution|Execution plan) of Dataset |Dataset .* execution finished in"
        "|Progress bars disabled|exclude_resources|client socket cannot be retrieved"
    ),
}

# Ray's own settings, which its raylets read.
RAY_AT_START = {
    # Ray's default is 15: beside programs without niceness that take all they get, a worker
    # gets a thirtieth of a core (sched(7)). Measured beside a busy loop per core: three
    # small fits at a time took 190 s, with this 35 s.
    "RAY_worker_niceness": "0",
    # How full a disk may be for Ray to write objects to it. At its default of 0.95, on a
    # disk of 1 TB with 50 GB free, `ray.put` raises "Local disk is full".
    "RAY_local_fs_capacity_threshold": "0.99",
}
LONGEST_FOLDER = 38  # characters of a temporary folder
# Open files of a process. With 64 Ray does not start; it has trained with 192 on two cores,
# and broken with 256 on more.
FEWEST_FILES = 512
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# What limits a container or a seat, on Linux.
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def prepare() -> bool:
    """Set the environment of this process and of those that it starts.

    Returns whether Ray was imported before, and so without its settings. Variables that
    are set already stay as they are.
    """
    # One thread per process, as torchrun sets it: ranks on one machine share its cores,
    # and equal threads everywhere make results and times comparable.
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it is imported
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    # So that `!torchrun` is found also if this Python's environment is not activated.
    commands, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if commands not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([commands, path])
    # Where ipywidgets is not installed, tqdm and Ray would say so when they are imported.
    warnings.filterwarnings("ignore", message="IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    # Of Ray Data's batches, which nobody writes to. It hides this itself, but not from two
    # threads at once: seen, now and then, on a busy machine.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    keep_freed_memory()
    shorten_temporary_folders()
    # NVIDIA's containers set 1, which costs the digits that lessons prove.
    os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "0"
    too_late = "ray" in sys.modules and not RAY_AT_IMPORT.keys() <= os.environ.keys()
    for name, value in (RAY_AT_IMPORT | RAY_AT_START).items():
        os.environ.setdefault(name, value)
    # Torch asks a name server who connects to a rank, and warns where none answers, once
    # per rank of every run. A reader without a network sees what others see: in processes
    # that are started from here, as torch reads it when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return too_late


def shorten_temporary_folders() -> None:
    """Give TMPDIR and RAY_TMPDIR a short name, if they have a long one.

    A batch system may give a job a folder of its own whose name has 100 characters. A
    socket's name has at most 107 (unix(7)), and Ray adds 69. The short name is a link,
    which goes with this process; what it starts inherits it.
    """
    for variable in ("TMPDIR", "RAY_TMPDIR") if sys.platform == "linux" else ():
        folder = os.environ.get(variable, "")
        if len(folder) > LONGEST_FOLDER and Path(folder).is_dir():
            with contextlib.suppress(OSError):  # then Ray's error is made a sentence
                link = Path(tempfile.mkdtemp(dir="/tmp", prefix="tmp-")) / "t"
                atexit.register(shutil.rmtree, link.parent, ignore_errors=True)
                link.symlink_to(Path(folder).absolute())
                os.environ[variable] = str(link)
                tempfile.tempdir = None  # it may have been looked up before


def has_home() -> bool:
    """Return whether this user has a home to write to; in a container it may not."""
    with contextlib.suppress(RuntimeError):  # no variable, and a user without a name
        return os.access(Path.home(), os.W_OK)
    return False


def keep_freed_memory() -> None:
    """Let this process keep the memory that a training step frees, for the next step.

    Else glibc gives large blocks, and the free end of its heap, back to the kernel, which
    hands them out again page by page, each filled with zeros. Measured with ResNet-18 on
    two CPU ranks: 13,700 page faults per step and rank and 118 ms per step; with this no
    faults and 98 ms (row 14 of tests/tools/benchmarks/RESULTS.md). The price: up to 1 GiB
    that was freed stays with the process.

    It works in the running process, so for scripts, ranks and Ray's workers alike. If one
    of glibc's own variables (`MALLOC_...`) is set, that counts, and nothing is done here;
    nor on macOS and with musl. Source: mallopt(3).
    """
    theirs = any(name.startswith("MALLOC_") for name in os.environ)
    if theirs or sys.platform != "linux":
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # musl has none
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
        # the manual allows 32 MiB; where glibc refuses more it answers 0
        mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 32 << 20)


def cpus() -> int:
    """Return how many CPUs this process may use: those of its seat, not of its machine.

    That is its affinity, or what its control groups allow, if that is less. In a pod with
    two CPUs on a node of 16, `os.cpu_count()` is 16, and a Ray of that size would start 16
    workers: 0.7 GB and 11 core seconds.

    Sources: sched_getaffinity(2); docs.kernel.org, "Control Group v2", cpu.max.
    """
    here = range(os.cpu_count() or 1)
    usable = len(getattr(os, "sched_getaffinity", lambda _: here)(0))
    for group in cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:  # version 1, where -1 is no limit
                quota = int((group / "cpu.cfs_quota_us").read_text())
                period = int((group / "cpu.cfs_period_us").read_text())
            if quota > 0:
                usable = min(usable, max(1, quota // period))
    return usable


def cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of version 1 or 2: the own one
    and those above it, whose limits hold, too. A container sees its own as the root."""
    with contextlib.suppress(OSError):  # not Linux
        for line in OWN_CGROUP.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in (names or controller).split(","):
                root = CGROUPS / names
                own = root / path.strip("/")
                yield from (g for g in (own, *own.parents) if g.is_relative_to(root))


def free_port(first: int = 0) -> int:
    """Return a port of 127.0.0.1 that is free: any, or the next one from `first` on.

    Any is below the ports that the kernel gives to connections, one of which could be taken
    before the caller listens on it. On Linux no other process gets it from here while this
    one lives: of people who start Ray at the same moment, all but one would wait a minute
    for a port that is taken. Nor does this process get it as any once more.

    Raises:
        BadInput: all of a thousand ports from `first` on are in use.
    """
    begin = first or 20000 + secrets.randbelow(9000)  # no seed makes two of them equal
    for port in range(begin, begin + 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux" and not (first and port in _reserved):
                _reserve(port)
            return port
    raise BadInput(f"All ports from {begin} to {begin + 999} are in use: free one.")


_reserved: set[int] = set()  # by this process


def _reserve(port: int) -> None:
    """Hold a name for this port until this process ends; raise OSError if it is held.

    It is a socket's abstract name, which the kernel frees: no file is left. See unix(7).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        name.bind(f"\0workshop-port-{port}")
        name.detach()  # stays open, without an object that warns at the end
    _reserved.add(port)
