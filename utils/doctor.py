"""Say on one screen what this machine can run, and how to fix what it cannot.

    python -m utils.doctor

Ends with status 0 if all lessons can run, 1 if you can fix what is missing, and 2 if an
administrator has to. (`make` ends with 2 for both.) Needs nothing but Python, so that it
can tell which packages are missing.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from utils import processes, settings
from utils.errors import BadInput

REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"
DATASET_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz"
MEMORY_GB = 4  # Ray with two workers that train ResNet-18 was measured at 3.8 GB
DISK_GB = 2  # a checkpoint of ResNet-18 with AdamW's state has 0.13 GB


class Result(NamedTuple):
    """Hold what a check found, and how to fix it.

    state: "ok", "warn" (slower, or less possible), "FAIL" (a lesson cannot run).
    administrator: whether only one can fix it.
    """

    state: str
    found: str
    fix: str = ""
    administrator: bool = False


def workshop() -> Result:
    """Say the version of the workshop, and where it is."""
    project = REQUIREMENTS.with_name("pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    return Result("ok", f"{version} in {REQUIREMENTS.parent}")


def python() -> Result:
    """Check the version of Python, and say where it is."""
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = f"{platform.python_version()} in {sys.prefix}"
    if " " in sys.prefix:  # Ray does not quote it; `nodes` goes around that
        found += (
            ". It has a space: the lessons run, but Ray's own commands (`ray start`, "
        )
        found += "`ray job`) may fail, see docs/troubleshooting.md"
    return Result(
        "ok" if fits else "FAIL",
        found,
        ""
        if fits
        else "Python 3.11 to 3.13 is needed: `make setup PYTHON=python3.12`.",
    )


def packages() -> Result:
    """Compare the installed packages with the pins of requirements.txt."""
    wrong, pins = [], requirements()
    for name, relation, wanted in pins:
        try:
            there = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if not (there == wanted if relation == "==" else _key(there) < _key(wanted)):
            wrong.append(f"{name} is {there}, not {relation}{wanted}")
    if wrong:
        return _installed_wrong("; ".join(wrong), "`make -B setup`")
    return Result("ok", f"all {len(pins)} as pinned in {REQUIREMENTS.name}")


def requirements() -> list[tuple[str, str, str]]:
    """Read the pins: (name, "==" or "<", version)."""
    pin = r"^([\w.-]+)(?:\[.*?\])?(==|<)([\w.]+)"
    return re.findall(pin, REQUIREMENTS.read_text(), re.MULTILINE)


def torch_build() -> Result:
    """Check that torch and torchvision fit each other, by an operator that needs both."""
    fix = "`rm -rf .venv && make setup`, which takes both from the same index"
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5)
    except Exception as error:  # a broken build may raise anything
        return _installed_wrong(f"cannot be used: {_line(error)}", fix)
    versions = torch.__version__, torchvision.__version__
    found = "torch {}, torchvision {}".format(*versions)
    if len({version.partition("+")[2] for version in versions}) > 1:
        return _installed_wrong(f"{found}: two different builds", fix)
    return Result("ok", found)


def run_mode() -> Result:
    """Say what WORKSHOP_MODE means on this machine."""
    try:
        setting = os.environ.get("WORKSHOP_MODE", "not set")
        return Result("ok", f"{settings.mode()} (WORKSHOP_MODE is {setting})")
    except BadInput as error:
        return Result("FAIL", setting, str(error))


def cores() -> Result:
    """Count the CPU cores that this process may use."""
    usable = processes.cpus()
    if usable > 1:
        return Result("ok", str(usable))
    return Result("warn", "1", "All lessons run, but two workers take turns on it.")


def memory() -> Result:
    """Measure the free memory of this machine, or of the container that this is."""
    import psutil

    machine = psutil.virtual_memory()
    free, total = machine.available / 1e9, machine.total / 1e9
    for limit, used in _limits():
        total, free = min(total, limit / 1e9), min(free, (limit - used) / 1e9)
    if free >= MEMORY_GB:
        return Result("ok", f"{free:.1f} GB free")
    needed = f"The lessons with Ray need {MEMORY_GB} GB"
    if total < MEMORY_GB:
        fix = f"{needed}: ask for a larger seat."
        return Result("FAIL", f"{total:.1f} GB in all", fix, administrator=True)
    return Result("FAIL", f"{free:.1f} GB free", f"{needed}: close other programs.")


def _limits() -> Iterator[tuple[int, int]]:
    """Yield what control groups (version 2) may use and do use, in bytes."""
    for group in processes.cgroups("memory"):
        limit = group / "memory.max"
        if limit.exists() and limit.read_text() != "max\n":
            used = int((group / "memory.current").read_text())
            # files that were read go when memory is needed
            statistics = (group / "memory.stat").read_text()
            cache = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
            yield int(limit.read_text()), used - (int(cache[1]) if cache else 0)


def disk() -> Result:
    """Measure the free disk where results go, and where Ray keeps its session."""
    try:
        folders = {settings.storage_path(), _ray_folder()}
    except BadInput as error:
        return Result("FAIL", "no place for results", str(error))
    free = {f: shutil.disk_usage(f).free / 1e9 for f in sorted(folders) if f.exists()}
    found = ", ".join(f"{gb:.1f} GB free in {folder}" for folder, gb in free.items())
    if min(free.values()) >= DISK_GB:
        return Result("ok", found)
    fix = (
        f"The lessons need {DISK_GB} GB: free some, or name a folder on another disk, "
    )
    fix += "WORKSHOP_STORAGE for results, RAY_TMPDIR for Ray."
    return Result("FAIL", found, fix)


def _ray_folder() -> Path:
    """Return where Ray writes, as `get_default_system_temp_dir` in ray/_common/utils.py."""
    own = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    return Path(os.environ.get("RAY_TMPDIR") or own or "/tmp")


def user() -> Result:
    """Check what a container or a batch system may not give: a home, and open files."""
    import resource

    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < processes.FEWEST_FILES:  # infinity is -1
        return Result(
            "FAIL",
            f"a process may open {files} files",
            f"Ray needs {processes.FEWEST_FILES}. This is the hard limit (`ulimit -Hn`), "
            "which an administrator has to raise.",
            administrator=True,
        )
    if not processes.has_home():
        home = os.environ.get("HOME", "not set")
        return Result(
            "warn",
            f"no home folder to write to (HOME: {home})",
            "The scripts run; JupyterLab needs one: "
            "`mkdir -p build/home && export HOME=$PWD/build/home`.",
        )
    return Result("ok", f"home {Path.home()}; a process may open {files:,} files")


def gpus() -> Result:
    """Find GPUs, and check that this torch can compute on them."""
    import torch

    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        found = ", ".join(torch.cuda.get_device_name(number) for number in devices)
        try:
            for number in devices:
                torch.ones(1, device=f"cuda:{number}").add(1).item()
        except RuntimeError as error:
            state = "warn" if settings.mode() == "smoke" else "FAIL"
            fix = f"Set WORKSHOP_MODE=smoke to use the CPU, or use {_needed()}."
            return Result(state, f"{found}: {_line(error)}", fix)
        if len(devices) == 1:
            found += ": one, so in full mode there is one worker, and nothing is sent. "
            found += "WORKSHOP_MODE=smoke has two, on CPUs"
        return Result("ok", found)
    smi = shutil.which("nvidia-smi")
    if not smi:
        return Result("ok", "none: the lessons use the CPU")
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    smi_says = "; ".join((answer.stdout + answer.stderr).strip().splitlines())
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        why, fix = "hidden by CUDA_VISIBLE_DEVICES", "Unset CUDA_VISIBLE_DEVICES"
    else:
        built = (
            f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        )
        why = f"torch, built {built}, cannot use it"
        fix = f"Use {_needed()}"
        if not torch.version.cuda:
            fix = "`rm -rf .venv && make setup` installs the torch for GPUs"
    return Result(
        "warn", f"{smi_says}: {why}", f"{fix}; until then lessons use the CPU."
    )


def _needed() -> str:
    """Say by number which driver and GPUs this torch needs.

    Source: https://docs.nvidia.com/deploy/cuda-compatibility/
    """
    import torch

    cuda = (torch.version.cuda or "13").partition(".")[0]
    driver = {"12": "525", "13": "580"}.get(cuda, "that of CUDA " + cuda)
    kernels = [each for each in torch.cuda.get_arch_list() if each.startswith("sm_")]
    oldest = int(kernels[0][3:]) / 10 if kernels else 7.5
    return (
        f"NVIDIA's driver {driver} or newer, and a GPU of compute capability {oldest:g} "
        "or higher"
    )


def ray() -> Result:
    """Join the cluster that RAY_ADDRESS names; else look for a Ray that runs here."""
    import psutil

    if os.environ.get("RAY_ADDRESS", "local") != "local":
        join = "from utils.cluster import start_ray; start_ray(1)"
        answer = subprocess.run(
            [sys.executable, "-c", join], capture_output=True, text=True, timeout=300
        )
        said = (answer.stderr if answer.returncode else answer.stdout).strip()
        sentence = re.sub(r"^[\w.]+: ", "", said.splitlines()[-1])  # of a traceback
        if answer.returncode:
            what, _, fix = sentence.rpartition(": ")
            return Result("FAIL", what, f"{fix[:1].upper()}{fix[1:]}")
        return Result("ok", sentence)
    if not any(p.info["name"] == "raylet" for p in psutil.process_iter(["name"])):
        return Result("ok", "none is running: the lessons start their own")
    fix = "The lessons leave it alone and start another; RAY_ADDRESS=auto joins it."
    return Result("warn", "one is running already", fix)


def names() -> Result:
    """Look up this machine's own name, and who connects, as torchrun and ranks do."""
    given = "PET_LOCAL_ADDR" in os.environ  # torchrun's own variable for --local-addr
    if not given and not _answers(lambda: socket.getaddrinfo(socket.getfqdn(), None)):
        fix = "Add it to the line of 127.0.0.1 in /etc/hosts, or, for torchrun on "
        fix += "this machine alone, `export PET_LOCAL_ADDR=127.0.0.1`."
        found = "this machine's own name has no address: torchrun would wait for it"
        return Result("FAIL", found, fix)

    def look_up() -> bool:
        with contextlib.suppress(OSError):  # no is an answer, too
            socket.getnameinfo(("::ffff:127.0.0.1", 80, 0, 0), 0)
        return True

    if not _answers(look_up):
        fix = '`export RES_OPTIONS="timeout:1 attempts:1"` makes that 1 s.'
        found = "a name server does not answer: each start of ranks waits 10 s for it"
        return Result("warn", found, fix)
    return Result("ok", "ranks find each other on this machine")


def network() -> Result:
    """Ask whether the host of MNIST answers, through the proxies of the environment."""
    request = urllib.request.Request(DATASET_URL, method="HEAD")
    if _answers(lambda: urllib.request.urlopen(request, timeout=2)):
        return Result("ok", "MNIST, FashionMNIST and CIFAR-10 can be downloaded")
    return Result("warn", "none", "The lessons run without: their data is shipped.")


def _answers(ask: Callable[[], object], seconds: float = 3) -> bool:
    """Return whether `ask` returns within so many seconds, and raises no OSError."""
    answers = []

    def try_it() -> None:
        with contextlib.suppress(OSError):
            answers.append(ask())

    # In a thread, as a name server may take much longer to say no.
    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


CHECKS: tuple[Callable[[], Result], ...] = (
    *(workshop, python, packages, torch_build, run_mode, cores, memory, disk),
    *(user, gpus, ray, names, network),
)


def main() -> int:
    """Print the table; return the status to end with."""
    failed = []
    for check in CHECKS:
        try:
            result = check()
        except Exception as error:  # one check that fails must not hide the others
            result = Result("warn", f"cannot be checked: {_line(error)}")
        start = f"{result.state:<5} {check.__name__.replace('_', ' '):<12} "
        _print(start, result.found)
        _print(" " * len(start), result.fix)
        if result.state == "FAIL":
            failed.append(result)
    theirs = sum(result.administrator for result in failed)
    verdict = f"{len(failed)} to fix before all lessons can run"
    verdict += f", {theirs} of them by an administrator." if theirs else "."
    print(f"\n{verdict if failed else 'Ready.'}")
    return 2 if theirs else int(bool(failed))


def _installed_wrong(found: str, command: str) -> Result:
    """Say who installs what is pinned: you, where this environment is yours."""
    seat = "JUPYTERHUB_USER" in os.environ  # of a hub, in an image
    if os.access(sys.prefix, os.W_OK) or not (in_environment() or seat):
        return Result("FAIL", found, f"Install what is pinned: {command}.")
    fix = f"This environment is not yours to change: its owner runs {command}."
    return Result("FAIL", found, fix, administrator=True)


def in_environment() -> bool:
    """Return whether this Python is one of a virtual environment."""
    return sys.prefix != sys.base_prefix


def _print(start: str, text: str) -> None:
    indent = " " * len(start)
    for line in textwrap.wrap(text, 96 - len(start)):
        print(start + line)
        start = indent


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # whoever reads this has seen enough, as `head` has
        os._exit(1)
