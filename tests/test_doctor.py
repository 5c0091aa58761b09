"""python -m utils.doctor: every fault has its sentence, and status 1 or 2 where due."""

import functools
import os
import resource
import subprocess
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
import torch
import torchvision

from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S
from utils import doctor


def run_doctor(python=sys.executable, **environment):
    return subprocess.run(
        [python, "-m", "utils.doctor"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def states(table):
    """Return the state of every check, by its name, from the printed table."""
    table = table.partition("\n\n")[0]  # below it is the verdict
    lines = [line for line in table.splitlines() if line[:5].strip()]
    return {line[6:18].strip(): line[:5].strip() for line in lines}


def program(folder, name, script):
    """Write an executable shell script."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def fail(error):
    """Return a function that raises, whatever it is called with."""

    def failing(*_, **__):
        raise error

    return failing


# Faults: each takes pytest's monkeypatch and a folder, and breaks this machine.


def old_python(patch, _):
    patch.setattr(sys, "version_info", (3, 10, 13))


def wrong_packages(patch, _):
    there = {name: version for name, _, version in doctor.requirements()}
    there |= {"ray": "2.9.0", "jsonschema": "4.25.1"}
    patch.setattr(metadata, "version", there.get)


def two_builds(patch, _):
    patch.setattr(torch, "__version__", "2.15.0+cpu")
    patch.setattr(torchvision, "__version__", "0.29.2+cu132")


def broken_build(patch, _):
    error = RuntimeError("operator torchvision::nms does not exist")
    patch.setattr(torchvision.ops, "nms", fail(error))


def wrong_mode(patch, _):
    patch.setenv("WORKSHOP_MODE", "fast")


def memory_of(patch, folder, available, total):
    patch.setattr(doctor.processes, "CGROUPS", folder)
    machine = SimpleNamespace(available=available, total=total)
    patch.setattr(psutil, "virtual_memory", lambda: machine)


def little_memory(patch, folder):
    memory_of(patch, folder, 1.5e9, 8e9)


def small_seat(patch, folder):
    memory_of(patch, folder, 1e9, 2e9)


def little_disk(patch, _):
    little = SimpleNamespace(free=1.5e9)
    patch.setattr(doctor.shutil, "disk_usage", lambda folder: little)


def no_home(patch, folder):
    (folder / "file").touch()
    patch.setenv("HOME", str(folder / "file" / "home"))


def few_files(patch, _):
    patch.setattr(resource, "getrlimit", lambda which: (64, 256))


def one_gpu(patch, folder):
    gpu_without_kernels(patch, folder)
    patch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))


def results_below_a_file(patch, folder):
    (folder / "file").touch()
    patch.setenv("WORKSHOP_STORAGE", str(folder / "file" / "folder"))


def results_in_a_bucket(patch, _):
    patch.setenv("WORKSHOP_STORAGE", "s3://bucket/folder")


def gpu_without_kernels(patch, _):
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA K80")
    patch.setattr(torch, "ones", fail(RuntimeError("CUDA error: no kernel image")))
    patch.setenv("WORKSHOP_MODE", "auto")


def gpu_that_torch_does_not_see(patch, folder, cuda="13.2", visible="0"):
    program(folder, "nvidia-smi", 'echo "NVIDIA T4, 470.57"')
    patch.setenv("PATH", str(folder), prepend=os.pathsep)
    patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.cuda, "is_available", lambda: False)


def a_ray_that_runs(patch, _):
    patch.delenv("RAY_ADDRESS", raising=False)
    there = [SimpleNamespace(info={"name": name}) for name in ("bash", "raylet")]
    patch.setattr(psutil, "process_iter", lambda attributes: there)


def no_address_of_own_name(patch, _):
    patch.delenv("PET_LOCAL_ADDR", raising=False)
    patch.setattr(doctor.socket, "getfqdn", lambda: "nobody.invalid")  # RFC 2606


def silent_name_server(patch, _):
    patch.setenv("PET_LOCAL_ADDR", "127.0.0.1")  # so the own name is not asked for
    hasty = functools.partial(doctor._answers, seconds=0.1)
    patch.setattr(doctor, "_answers", hasty)
    never = threading.Event()
    patch.setattr(doctor.socket, "getnameinfo", lambda *_: never.wait(TIMEOUT_S))


def no_network(patch, _):
    patch.setattr(doctor.urllib.request, "urlopen", fail(OSError("no route to host")))


@pytest.mark.parametrize(
    ("fault", "check", "state", "found", "fix"),
    [
        (old_python, "python", "FAIL", "", "make setup PYTHON=python3.12"),
        (
            wrong_packages,
            *("packages", "FAIL"),
            "ray is 2.9.0, not ==2.60.0; jsonschema is 4.25.1, not <4.25",
            "`make -B setup`",
        ),
        (two_builds, "torch_build", "FAIL", "two different builds", "rm -rf .venv"),
        (broken_build, "torch_build", "FAIL", "torchvision::nms", "rm -rf .venv"),
        (wrong_mode, "run_mode", "FAIL", "fast", "auto, smoke and full"),
        (little_memory, "memory", "FAIL", "1.5 GB free", "close other programs"),
        (small_seat, "memory", "FAIL", "2.0 GB in all", "ask for a larger seat"),
        (no_home, "user", "warn", "no home folder to write to", "export HOME="),
        (few_files, "user", "FAIL", "may open 256 files", "an administrator has to"),
        (one_gpu, "gpus", "ok", "K80: one, so in full mode there is one worker", ""),
        (little_disk, "disk", "FAIL", "1.5 GB free in", "WORKSHOP_STORAGE"),
        (results_below_a_file, "disk", "FAIL", "no place", "to another"),
        (results_in_a_bucket, "disk", "FAIL", "no place", "is an address: name a path"),
        (gpu_without_kernels, "gpus", "FAIL", "no kernel image", "WORKSHOP_MODE=smoke"),
        (
            gpu_that_torch_does_not_see,
            *("gpus", "warn", "470.57: torch, built for CUDA 13.2, cannot use it"),
            "NVIDIA's driver 580 or newer, and a GPU of compute capability",
        ),
        (
            functools.partial(gpu_that_torch_does_not_see, cuda=None),
            *("gpus", "warn", "built without CUDA", "rm -rf .venv && make setup"),
        ),
        (
            functools.partial(gpu_that_torch_does_not_see, visible=""),
            *("gpus", "warn", "hidden by", "Unset CUDA_VISIBLE_DEVICES; until then"),
        ),
        (a_ray_that_runs, "ray", "warn", "one is running", "RAY_ADDRESS=auto joins"),
        (
            no_address_of_own_name,
            *("names", "FAIL", "own name has no address", "PET_LOCAL_ADDR=127.0.0.1"),
        ),
        (silent_name_server, "names", "warn", "does not answer", "RES_OPTIONS"),
        (no_network, "network", "warn", "none", "their data is shipped"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_has_a_sentence_that_says_how_to_fix_it(
    monkeypatch, tmp_path, fault, check, state, found, fix
):
    fault(monkeypatch, tmp_path)
    result = getattr(doctor, check)()
    assert result.state == state
    assert found in result.found
    assert fix in result.fix


def test_this_machine_passes_what_does_not_depend_on_it(monkeypatch):
    """A control: with nothing broken, the checks above find nothing."""
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda *_, timeout: "answer")
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.1")
    # of an address that no name server knows
    unknown = fail(doctor.socket.gaierror("unknown"))
    monkeypatch.setattr(doctor.socket, "getnameinfo", unknown)
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    patient = functools.partial(doctor._answers, seconds=TIMEOUT_S)
    monkeypatch.setattr(doctor, "_answers", patient)
    checks = (doctor.python, doctor.packages, doctor.torch_build, doctor.run_mode)
    for check in (*checks, doctor.user, doctor.ray, doctor.names, doctor.network):
        assert check().state == "ok", check()


def test_a_gpu_that_is_not_asked_for_fails_nothing(monkeypatch, tmp_path):
    gpu_without_kernels(monkeypatch, tmp_path)
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    assert doctor.gpus().state == "warn"


@pytest.mark.parametrize("own", ["", "workshop/ann"], ids=["container", "shared seat"])
@pytest.mark.parametrize(
    ("limit", "cache", "free"),
    [("8000000000", "5000000000", 6.0), ("8000000000", "0", 1.0), ("max", "0", 9.0)],
)
def test_memory_is_that_of_the_container(
    monkeypatch, tmp_path, own, limit, cache, free
):
    """What it may use, less what it uses; files in memory make room when it is needed."""
    memory_of(monkeypatch, tmp_path, 9e9, 9e9)
    (tmp_path / "own").write_text(f"0::/{own}\n")
    monkeypatch.setattr(doctor.processes, "OWN_CGROUP", tmp_path / "own")
    group = tmp_path / own
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("7000000000\n")
    statistics = f"anon 1\nactive_file 3\ninactive_file {cache}\nslab 1\n"
    (group / "memory.stat").write_text(statistics)
    assert doctor.memory().found == f"{free:.1f} GB free"
    assert doctor.memory().state == ("ok" if free > doctor.MEMORY_GB else "FAIL")


@pytest.mark.parametrize("names", [("RAY_TMPDIR", "TMPDIR"), ("TMPDIR",), ()])
def test_the_disk_is_that_to_which_ray_writes(names, tmp_path, monkeypatch):
    from ray._common import utils as theirs

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    assert str(doctor._ray_folder()) == theirs.get_default_system_temp_dir()


@pytest.mark.parametrize(
    ("writable", "environment", "seat", "administrator"),
    [
        (True, True, False, False),
        (False, True, False, True),
        (False, False, True, True),  # of a hub, in an image
        (False, False, False, False),  # no environment yet: `make setup` makes one
    ],
)
def test_packages_are_installed_by_whoever_owns_the_environment(
    monkeypatch, writable, environment, seat, administrator
):
    monkeypatch.setattr(metadata, "version", lambda name: "0")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: writable)
    monkeypatch.setattr(doctor, "in_environment", lambda: environment)
    monkeypatch.delenv("JUPYTERHUB_USER", raising=False)
    if seat:
        monkeypatch.setenv("JUPYTERHUB_USER", "seat-07")
    assert doctor.packages().administrator == administrator


def test_a_seat_that_is_too_small_is_for_an_administrator(monkeypatch, tmp_path):
    small_seat(monkeypatch, tmp_path)
    assert doctor.memory().administrator


@pytest.mark.parametrize(
    ("administrator", "status", "said"),
    [
        ((), 0, "\nReady.\n"),
        ((False,), 1, "\n1 to fix before all lessons can run.\n"),
        ((False, True), 2, "\n2 to fix before all lessons can run, 1 of them by an"),
    ],
)
def test_the_status_says_who_can_fix_it(
    monkeypatch, capsys, administrator, status, said
):
    def check(who):
        def check_it():
            return doctor.Result("FAIL", "so", "do that", who)

        return check_it

    found = map(check, administrator)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.run_mode, *found))
    assert doctor.main() == status
    assert said in capsys.readouterr().out


def test_a_check_that_raises_does_not_hide_the_others(monkeypatch, capsys):
    broken = fail(KeyError("surprise"))
    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.run_mode))
    assert doctor.main() == 0
    shown = states(capsys.readouterr().out)
    assert shown == {"failing": "warn", "run mode": "ok"}


def test_prints_every_check_and_exits_with_its_verdict():
    answer = run_doctor()
    checked = states(answer.stdout)
    assert list(checked) == [c.__name__.replace("_", " ") for c in doctor.CHECKS]
    assert set(checked.values()) <= {"ok", "warn", "FAIL"}
    assert (answer.returncode > 0) == ("FAIL" in checked.values())
    assert answer.stderr == ""


def test_works_without_any_package(tmp_path):
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    answer = run_doctor(tmp_path / "bare" / "bin" / "python", WORKSHOP_MODE="smoke")
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr == ""
    for name in ("torch", "ray", "deepspeed", "psutil"):
        assert f"{name} is missing" in answer.stdout.replace("\n" + " " * 19, " ")
    assert "`make -B setup`" in answer.stdout
    assert states(answer.stdout)["python"] == "ok"


def test_a_reader_that_stops_reading_sees_no_traceback():
    """As in `python -m utils.doctor | head -1`."""
    code = "import sys, runpy; sys.stdout.reconfigure(line_buffering=True); "
    code += "sys.stdin.read(); runpy.run_module('utils.doctor', run_name='__main__')"
    job = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    job.stdout.close()
    job.stdin.close()
    assert job.stderr.read() == b""
    assert job.wait(timeout=TIMEOUT_S) == 1
    job.stderr.close()
