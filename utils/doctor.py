"""Say on one screen what this machine can run, and how to mend what it cannot.

    python -m utils.doctor

Ends with status 0 if all lessons can run, 1 if you can mend what is missing, and 2 if an
administrator has to. (`make` ends with 2 for both.) Below the table stands a block to
paste into a question: no secrets or paths of home are in it, and no names of user and
machine in paths and addresses. Needs nothing but Python, so that it can tell which
packages are missing.
"""

import contextlib
import getpass
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from utils import electives as the_electives
from utils import settings
from utils.errors import BadInput
from utils.processes import ray_folder

REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"
DATASET_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz"
CGROUP = Path("/sys/fs/cgroup")  # what a container or a seat may use, on Linux
OWN_CGROUP = Path("/proc/self/cgroup")
MEMORY_GB = 4  # Ray with two workers that train ResNet-18 was measured at 3.8 GB
DISK_GB = 2  # a checkpoint of ResNet-18 with AdamW's state has 0.13 GB


class Result(NamedTuple):
    """Hold what a check found, and how to mend it.

    state: "ok", "warn" (slower, or less possible), "FAIL" (a lesson cannot run).
    administrator: whether only one can mend it.
    """

    state: str
    found: str
    mend: str = ""
    administrator: bool = False


def workshop() -> Result:
    """Say the version of the workshop, and where it is."""
    project = REQUIREMENTS.with_name("pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    return Result("ok", f"{version} in {REQUIREMENTS.parent}")


def python() -> Result:
    """Check the version of Python, and say where it is."""
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Result(
        "ok" if fits else "FAIL",
        f"{platform.python_version()} in {sys.prefix}",
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


def electives() -> Result:
    """Compare what is there of the electives' packages with their pins."""
    pins = the_electives.pins()
    gone, wrong = the_electives.missing(*pins), the_electives.wrong_versions()
    if wrong:
        mend = "Install what is pinned: `make -B electives`."
        return Result("warn", "; ".join(wrong), mend)
    if len(gone) == len(pins):
        return Result("ok", "not installed; `make electives` installs them")
    if gone:
        mend = "Install the others, too: `make -B electives`."
        return Result("warn", f"{', '.join(gone)} missing", mend)
    return Result("ok", f"all {len(pins)} as pinned")


def torch_build() -> Result:
    """Check that torch and torchvision fit each other, by an operator that needs both."""
    mend = "`rm -rf .venv && make setup`, which takes both from the same index"
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5)
    except Exception as error:  # a broken build may raise anything
        return _installed_wrong(f"cannot be used: {_line(error)}", mend)
    versions = torch.__version__, torchvision.__version__
    found = "torch {}, torchvision {}".format(*versions)
    if len({version.partition("+")[2] for version in versions}) > 1:
        return _installed_wrong(f"{found}: two different builds", mend)
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
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    if len(usable) > 1:
        return Result("ok", str(len(usable)))
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
    if total < MEMORY_GB:
        mend = f"The lessons with Ray need {MEMORY_GB} GB: ask for a larger seat."
        return Result("FAIL", f"{total:.1f} GB in all", mend, administrator=True)
    mend = f"The lessons with Ray need {MEMORY_GB} GB: close other programs."
    return Result("FAIL", f"{free:.1f} GB free", mend)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield what control groups (version 2 or 1) may use and do use, in bytes."""
    own = {}
    with contextlib.suppress(OSError):  # not Linux
        lines = OWN_CGROUP.read_text().splitlines()
        own = dict(line.split(":", 2)[1:] for line in lines)
    old = CGROUP / "memory" / own.get("memory", "/")[1:]
    for group in {CGROUP, CGROUP / own.get("", "/")[1:]}:
        if (limit := group / "memory.max").exists() and limit.read_text() != "max\n":
            used = int((group / "memory.current").read_text())
            yield int(limit.read_text()), used - _cache(group, "inactive_file")
    if (limit := old / "memory.limit_in_bytes").exists():
        used = int((old / "memory.usage_in_bytes").read_text())
        yield int(limit.read_text()), used - _cache(old, "total_inactive_file")


def _cache(group: Path, name: str) -> int:
    """Return the bytes of files that were read, and go when memory is needed."""
    statistics = (group / "memory.stat").read_text()
    found = re.search(rf"^{name} (\d+)$", statistics, re.MULTILINE)
    return int(found[1]) if found else 0


def disk() -> Result:
    """Measure the free disk where results go, and where Ray keeps its session."""
    try:
        folders = {settings.storage_path(), ray_folder()}
    except BadInput as error:
        return Result("FAIL", "no place for results", str(error))
    free = {f: shutil.disk_usage(f).free / 1e9 for f in sorted(folders) if f.exists()}
    found = ", ".join(f"{gb:.1f} GB free in {folder}" for folder, gb in free.items())
    if min(free.values()) >= DISK_GB:
        return Result("ok", found)
    mend = (
        f"The lessons need {DISK_GB} GB: free some, or name a folder on another disk, "
    )
    return Result(
        "FAIL", found, mend + "WORKSHOP_STORAGE for results, RAY_TMPDIR for Ray."
    )


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
            mend = "Set WORKSHOP_MODE=smoke to use the CPU, or update the GPU's driver."
            return Result(state, f"{found}: {_line(error)}", mend)
        return Result("ok", found)
    smi = shutil.which("nvidia-smi")
    if not smi:
        return Result("ok", "none: the lessons use the CPU")
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    if answer.returncode:
        why, mend = "nvidia-smi fails", "Repair the driver"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        why, mend = "hidden by CUDA_VISIBLE_DEVICES", "Unset CUDA_VISIBLE_DEVICES"
    elif torch.version.cuda is None:
        why, mend = (
            "this torch is built without CUDA",
            "Run `rm -rf .venv && make setup`",
        )
    else:
        why = f"torch is built for CUDA {torch.version.cuda} and cannot use this driver"
        mend = f"Update the driver to one for CUDA {torch.version.cuda}"
    found = "; ".join((answer.stdout + answer.stderr).strip().splitlines())
    return Result("warn", f"{found}: {why}", f"{mend}; until then lessons use the CPU.")


def compiler() -> Result:
    """Find what DeepSpeed compiles its own optimizers with: C++20, ninja, Python.h."""
    mend = (
        "The lessons run without (see utils.zero); DeepSpeed's own optimizers, as for "
    )
    mend += (
        "offload, are compiled at their first use: install {} (so called on Ubuntu)."
    )
    cxx = shutil.which(os.environ.get("CXX", "c++"))
    if not cxx:
        return Result("warn", "no C++ compiler", mend.format("build-essential"))
    scripts = sysconfig.get_path("scripts")  # `make` puts it on the PATH of notebooks
    if not shutil.which("ninja", path=f"{scripts}{os.pathsep}{os.environ['PATH']}"):
        return Result("warn", f"{cxx}, but no ninja", mend.format("ninja-build"))
    compile_it = [cxx, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    answer = subprocess.run(
        [*compile_it, "-I", sysconfig.get_path("include")],
        input="#include <concepts>\n#include <Python.h>\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    if answer.returncode == 0:
        return Result("ok", f"{cxx}, ninja and Python.h")
    needed = "python{}.{}-dev and g++ 11 or later".format(*sys.version_info)
    return Result("warn", answer.stderr.strip().splitlines()[0], mend.format(needed))


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
            what, _, mend = sentence.rpartition(": ")
            return Result("FAIL", what, f"{mend[:1].upper()}{mend[1:]}")
        return Result("ok", sentence)
    processes = [p.info for p in psutil.process_iter(["name", "username"])]
    owners = {str(p["username"]) for p in processes if p["name"] == "raylet"}
    if not owners:
        return Result("ok", "none is running: the lessons start their own")
    mend = "The lessons leave it alone and start another; RAY_ADDRESS=auto joins it."
    whose = "yours" if psutil.Process().username() in owners else "another user"
    return Result("warn", f"one of {whose} is running", mend)


def names() -> Result:
    """Look up this machine's own name, and who connects, as torchrun and ranks do."""
    if not (
        "PET_LOCAL_ADDR" in os.environ  # torchrun's own variable for --local-addr
        or _answers(lambda: socket.getaddrinfo(socket.getfqdn(), None))
    ):
        mend = "Add it to the line of 127.0.0.1 in /etc/hosts, or, for torchrun on "
        mend += "this machine alone, `export PET_LOCAL_ADDR=127.0.0.1`."
        found = "this machine's own name has no address: torchrun would wait for it"
        return Result("FAIL", found, mend)

    def look_up() -> bool:
        with contextlib.suppress(OSError):  # no is an answer, too
            socket.getnameinfo(("::ffff:127.0.0.1", 80, 0, 0), 0)
        return True

    if not _answers(look_up):
        mend = '`export RES_OPTIONS="timeout:1 attempts:1"` makes that 1 s.'
        found = "a name server does not answer: each start of ranks waits 10 s for it"
        return Result("warn", found, mend)
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


CHECKS: tuple[Callable[[], Result], ...] = (workshop, python, packages, electives)
CHECKS += (torch_build, run_mode, cores, memory, disk, gpus, compiler, ray, names)
CHECKS += (network,)


def main() -> int:
    """Print the table, and the block to paste; returns the status to end with."""
    results = {}
    for check in CHECKS:
        try:
            result = check()
        except Exception as error:  # one check that fails must not hide the others
            result = Result("warn", f"cannot be checked: {_line(error)}")
        name = check.__name__.replace("_", " ")
        results[name] = result
        start = f"{result.state:<5} {name:<12} "
        _print(start, result.found)
        _print(" " * len(start), result.mend)
    failed = [result for result in results.values() if result.state == "FAIL"]
    theirs = sum(result.administrator for result in failed)
    verdict = f"{len(failed)} to mend before all lessons can run"
    verdict += f", {theirs} of them by an administrator." if theirs else "."
    print(f"\n{verdict if failed else 'Ready.'}")
    print(f"\n{to_paste(results)}")
    return 2 if theirs else int(bool(failed))


def to_paste(results: dict[str, Result]) -> str:
    """Return what a question needs: versions, and all that is not well.

    No secret and no path of home is in it, and no name of user and machine in a path or
    address. Elsewhere a name may be a word, as `ray` is.
    """
    lines = [f"{platform.system()} {platform.machine()}, commit {_commit()}"]
    for name, (state, found, *_) in results.items():
        if state != "ok" or name in ("workshop", "python", "torch build", "run mode"):
            lines.append(f"{state:<5} {name}: {without_names(found)}")
    return "\n".join(["--- paste this into a question ---", *lines, "--- end ---"])


def without_names(text: str) -> str:
    """Return a text without secrets, paths of home, and names in paths and addresses."""
    for name, value in os.environ.items():
        if re.search("TOKEN|KEY|SECRET|PASSW|CREDENTIAL", name) and len(value) > 3:
            text = text.replace(value, "<secret>")
    text = re.sub(r"//[^/\s@]+@", "//<secret>@", text)  # of an address
    text = text.replace(str(REQUIREMENTS.parent), "<workshop>")
    text = re.sub(rf"{re.escape(str(Path.home()))}(?=/|$|\W)", "~", text)
    text = re.sub(r"/(?:home|Users)/[^/\s,;:]+", "~", text)
    for name in {_user(), platform.node()} - {""}:
        # as a part of a path or of an address: a user may be called `ray`
        text = re.sub(rf"(?<=[/@.]){re.escape(name)}(?![\w-])", "<name>", text)
    host = re.escape(platform.node())
    return re.sub(rf"(?<![\w.-]){host}(?=:\d)", "<name>", text) if host else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may give its user no name
        return ""


def _commit() -> str:
    command = ["git", "-C", str(REQUIREMENTS.parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _installed_wrong(found: str, command: str) -> Result:
    """Say who installs what is pinned: you, where this environment is yours."""
    seat = "JUPYTERHUB_USER" in os.environ  # of a hub, in an image
    if os.access(sys.prefix, os.W_OK) or not (in_environment() or seat):
        return Result("FAIL", found, f"Install what is pinned: {command}.")
    mend = f"This environment is not yours to change: its owner runs {command}."
    return Result("FAIL", found, mend, administrator=True)


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
