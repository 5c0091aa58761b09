"""python -m utils.doctor: every fault has its sentence, and status 1 where due."""

import functools
import os
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT
from utils import doctor


def run_doctor(python=sys.executable, **environment):
    return subprocess.run(
        [python, "-m", "utils.doctor"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def states(table):
    """Return the state of every check, by its name, from the printed table."""
    table = table.partition("\n\n")[0]  # below it are the verdict and the block
    lines = [line for line in table.splitlines() if line[:5].strip()]
    return {line[6:18].strip(): line[:5].strip() for line in lines}


def program(folder: Path, name: str, script: str) -> Path:
    """Return an executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def test_prints_every_check_and_exits_with_its_verdict():
    answer = run_doctor()
    checked = states(answer.stdout)
    assert list(checked) == [c.__name__.replace("_", " ") for c in doctor.CHECKS]
    assert set(checked.values()) <= {"ok", "warn", "FAIL"}
    assert (answer.returncode > 0) == ("FAIL" in checked.values())
    assert answer.stderr == ""


def test_whoever_reads_the_table_knows_which_workshop_it_is_of():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert doctor.workshop() == doctor.Result("ok", f"{project['version']} in {ROOT}")


def test_this_environment_passes_what_does_not_depend_on_the_machine():
    for check in (doctor.python, doctor.packages, doctor.torch_build, doctor.run_mode):
        assert check().state == "ok", check()


def test_works_without_any_package(tmp_path):
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"]
    subprocess.run(command, check=True, timeout=PATIENCE)
    answer = run_doctor(tmp_path / "bare" / "bin" / "python", WORKSHOP_MODE="smoke")
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr == ""
    for name in ("torch", "ray", "deepspeed", "psutil"):
        assert f"{name} is missing" in answer.stdout.replace("\n" + " " * 19, " ")
    assert "`make -B setup`" in answer.stdout
    assert states(answer.stdout)["python"] == "ok"


def test_wrong_version_fails_the_whole_table(monkeypatch, capsys):
    installed = metadata.version

    def version(name):
        return {"ray": "2.9.0", "jsonschema": "4.25.1"}.get(name) or installed(name)

    monkeypatch.setattr(metadata, "version", version)
    assert doctor.main() == 1
    found = doctor.packages().found
    assert found == "ray is 2.9.0, not ==2.60.0; jsonschema is 4.25.1, not <4.25"
    assert "ray is 2.9.0, not ==2.60.0" in capsys.readouterr().out


def test_builds_that_do_not_fit_each_other(monkeypatch):
    import torch
    import torchvision

    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    monkeypatch.setattr(torchvision, "__version__", "0.29.2+cu132")
    result = doctor.torch_build()
    assert result.state == "FAIL"
    assert "two different builds" in result.found

    def broken(*args):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision.ops, "nms", broken)
    result = doctor.torch_build()
    assert result.state == "FAIL"
    assert "operator torchvision::nms does not exist" in result.found
    assert "`rm -rf .venv && make setup`" in result.mend


@pytest.mark.parametrize(
    ("version", "state"),
    [((3, 10, 13), "FAIL"), ((3, 11, 0), "ok"), ((3, 13, 0), "ok")],
)
def test_python_version(monkeypatch, version, state):
    monkeypatch.setattr(sys, "version_info", version)
    assert doctor.python().state == state


def test_wrong_run_mode(monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "fast")
    result = doctor.run_mode()
    assert result.state == "FAIL"
    assert "auto, smoke and full" in result.mend


def test_low_disk_and_memory(monkeypatch):
    little = SimpleNamespace(free=1.5e9, available=1.5e9, total=8e9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: little)
    assert doctor.disk().state == "FAIL"
    assert "1.5 GB free in" in doctor.disk().found
    assert "WORKSHOP_STORAGE" in doctor.disk().mend
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    assert doctor.memory() == doctor.Result(
        "FAIL",
        "1.5 GB free",
        f"The lessons with Ray need {doctor.MEMORY_GB} GB: close other programs.",
    )


@pytest.mark.parametrize(
    ("limit", "cache", "free"),
    [("8e9", "5e9", 6.0), ("8e9", "0", 1.0), ("max", "0", 9.0)],
)
def test_memory_of_a_container(monkeypatch, tmp_path, limit, cache, free):
    """What it may use, less what it uses; files in memory make room when it is needed."""
    limit = limit if limit == "max" else str(int(float(limit)))
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("7000000000\n")
    statistics = f"anon 1\nactive_file 3\ninactive_file {int(float(cache))}\nslab 1\n"
    (tmp_path / "memory.stat").write_text(statistics)
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    machine = SimpleNamespace(available=9e9, total=9e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert doctor.memory().found == f"{free:.1f} GB free"
    assert doctor.memory().state == ("ok" if free > doctor.MEMORY_GB else "FAIL")


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_seat_on_a_shared_machine(monkeypatch, tmp_path, version):
    """It has a control group of its own, and the machine has more."""
    own = tmp_path / "cgroup"
    if version == 2:
        own.write_text("0::/workshop/ann\n")
        group, names = tmp_path / "workshop/ann", ("memory.max", "memory.current")
        cache = "inactive_file"
    else:
        own.write_text("5:cpu:/workshop/ann\n4:memory:/workshop/ann\n0::/\n")
        group = tmp_path / "memory/workshop/ann"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        cache = "total_inactive_file"
    group.mkdir(parents=True)
    for name, content in zip(names, ("8000000000\n", "7000000000\n")):
        (group / name).write_text(content)
    (group / "memory.stat").write_text(f"{cache} 1000000000\n")
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    monkeypatch.setattr(doctor, "OWN_CGROUP", own)
    machine = SimpleNamespace(available=90e9, total=90e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert doctor.memory().found == "2.0 GB free"


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
    assert job.wait(timeout=PATIENCE) == 1
    job.stderr.close()


def test_results_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path / "file" / "folder"))
    result = doctor.disk()
    assert result.state == "FAIL"
    assert "set WORKSHOP_STORAGE to another" in result.mend
    monkeypatch.setenv("WORKSHOP_STORAGE", "s3://bucket/folder")
    assert doctor.disk().state == "FAIL"
    assert "is an address: name a path" in doctor.disk().mend


def test_no_compiler(monkeypatch, tmp_path):
    """The lessons run without one: tests/test_zero.py holds them to it."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = doctor.compiler()
    assert (result.state, result.found) == ("warn", "no C++ compiler")
    assert "install build-essential" in result.mend


def test_no_ninja(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(program(tmp_path, "c++", "exit 0")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "install ninja-build" in doctor.compiler().mend
    program(tmp_path, "ninja", "exit 0")
    assert doctor.compiler().state == "ok"


@pytest.mark.skipif(not doctor.shutil.which("c++"), reason="there is no compiler here")
def test_no_python_headers(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    program(tmp_path, "ninja", "exit 0")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    result = doctor.compiler()
    assert result.state == "warn"
    assert "Python.h" in result.found
    assert "python{}.{}-dev".format(*sys.version_info) in result.mend


def test_ray_of_another_user(monkeypatch):
    processes = [
        SimpleNamespace(info={"name": "raylet", "username": "somebody"}),
        SimpleNamespace(info={"name": "bash", "username": "root"}),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: processes)
    result = doctor.ray()
    assert result.state == "warn"
    assert result.found == "one of another user is running"
    mine = {"name": "raylet", "username": psutil.Process().username()}
    processes[1] = SimpleNamespace(info=mine)
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: processes)
    assert doctor.ray().found == "one of yours is running"
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: [])
    assert doctor.ray().state == "ok"


def test_network(monkeypatch):
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda *a, timeout: "answer")
    assert doctor.network().state == "ok"

    def unreachable(*args, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(doctor.urllib.request, "urlopen", unreachable)
    assert doctor.network().state == "warn"


def test_own_name_without_an_address(monkeypatch):
    patient = functools.partial(doctor._answers, seconds=PATIENCE)
    monkeypatch.setattr(doctor, "_answers", patient)
    monkeypatch.delenv("PET_LOCAL_ADDR", raising=False)
    monkeypatch.setattr(doctor.socket, "getnameinfo", lambda *_: ("localhost", "http"))
    monkeypatch.setattr(doctor.socket, "getfqdn", lambda: "localhost")
    assert doctor.names().state == "ok"
    monkeypatch.setattr(doctor.socket, "getfqdn", lambda: "nobody.invalid")  # RFC 2606
    result = doctor.names()
    assert result.state == "FAIL" and "own name has no address" in result.found
    assert "PET_LOCAL_ADDR=127.0.0.1" in result.mend
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.1")
    assert doctor.names().state == "ok"


def test_name_server_that_does_not_answer(monkeypatch):
    asked, answers = threading.Event(), doctor._answers
    hasty = functools.partial(answers, seconds=0.1)
    patient = functools.partial(answers, seconds=PATIENCE)
    # so the own name is not asked for
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.1")
    monkeypatch.setattr(doctor, "_answers", hasty)
    monkeypatch.setattr(doctor.socket, "getnameinfo", lambda *_: asked.wait(PATIENCE))
    result = doctor.names()
    asked.set()
    assert result.state == "warn" and "RES_OPTIONS" in result.mend

    def unknown(*_):
        raise doctor.socket.gaierror("unknown")

    monkeypatch.setattr(doctor, "_answers", patient)
    monkeypatch.setattr(doctor.socket, "getnameinfo", unknown)
    assert doctor.names().state == "ok"


SMI = 'echo "NVIDIA T4, 470.57"'


@pytest.mark.parametrize(
    ("script", "cuda", "visible", "sentence"),
    [
        (SMI, "13.2", "0", "torch is built for CUDA 13.2 and cannot use this driver"),
        (SMI, None, "0", "this torch is built without CUDA"),
        (SMI, "13.2", "", "hidden by CUDA_VISIBLE_DEVICES"),
        ("echo no driver; exit 9", "13.2", "0", "no driver: nvidia-smi fails"),
    ],
)
def test_gpu_that_torch_cannot_use(
    monkeypatch, tmp_path, script, cuda, visible, sentence
):
    import torch

    program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = doctor.gpus()
    assert result.state == "warn"
    assert sentence in result.found
    assert "until then lessons use the CPU" in result.mend


def test_gpu_that_this_torch_has_no_kernels_for(monkeypatch):
    import torch

    def ones(*shape, device):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA K80")
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setenv("WORKSHOP_MODE", "auto")
    result = doctor.gpus()
    assert result.state == "FAIL"
    assert "no kernel image" in result.found
    assert "WORKSHOP_MODE=smoke" in result.mend
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    assert doctor.gpus().state == "warn"


def test_a_check_that_raises_does_not_hide_the_others(monkeypatch, capsys):
    def broken_check():
        raise KeyError("surprise")

    monkeypatch.setattr(doctor, "CHECKS", (broken_check, doctor.python))
    assert doctor.main() == 0
    shown = states(capsys.readouterr().out)
    assert shown == {"broken check": "warn", "python": "ok"}


@pytest.mark.parametrize(
    ("administrator", "status", "said"),
    [
        ((), 0, "\nReady.\n"),
        ((False,), 1, "\n1 to mend before all lessons can run.\n"),
        ((True,), 2, "\n1 to mend before all lessons can run, 1 of them by an"),
        ((False, True), 2, "\n2 to mend before all lessons can run, 1 of them by an"),
    ],
)
def test_the_status_says_who_can_mend_it(
    monkeypatch, capsys, administrator, status, said
):
    found = [doctor.Result("FAIL", "so", "do that", who) for who in administrator]
    checks = []
    for number, result in enumerate(found):
        checks.append(lambda result=result: result)
        checks[-1].__name__ = f"check_{number}"
    monkeypatch.setattr(doctor, "CHECKS", (doctor.run_mode, *checks))
    assert doctor.main() == status
    assert said in capsys.readouterr().out


def test_what_an_administrator_has_to_mend(monkeypatch, tmp_path):
    """A seat that is too small, and an environment that belongs to somebody else."""
    small = SimpleNamespace(available=1e9, total=2e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    assert doctor.memory().administrator
    monkeypatch.setattr(metadata, "version", lambda name: "0")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    monkeypatch.setattr(doctor, "in_environment", lambda: False)
    assert not doctor.packages().administrator
    monkeypatch.setenv("JUPYTERHUB_USER", "seat-07")
    assert doctor.packages().administrator
    monkeypatch.delenv("JUPYTERHUB_USER")
    monkeypatch.setattr(doctor, "in_environment", lambda: True)
    for mine in (True, False):
        monkeypatch.setattr(doctor.os, "access", lambda path, mode, mine=mine: mine)
        result = doctor.packages()
        assert result.state == "FAIL"
        assert result.administrator != mine


def test_the_block_to_paste_names_nobody(monkeypatch):
    monkeypatch.setenv("HOME", "/srv/people/ann")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "not-for-others")
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(doctor.platform, "node", lambda: "seat7")
    shown = {
        "workshop": "0.3.0 in /srv/people/ann/w, /home/bob/x, /scratch/ann/ray",
        "ray": "ray is missing; http://me:pw@seat7:8265 says not-for-others, ann",
    }
    results = {name: doctor.Result("FAIL", text) for name, text in shown.items()}
    block = doctor.to_paste(results | {"disk": doctor.Result("ok", "nothing")})
    assert block.splitlines()[2:4] == [
        "FAIL  workshop: 0.3.0 in ~/w, ~/x, /scratch/<name>/ray",
        "FAIL  ray: ray is missing; http://<secret>@<name>:8265 says <secret>, ann",
    ]
    assert block.startswith("--- paste this") and block.endswith("--- end ---")
    assert "disk" not in block and "commit" in block
