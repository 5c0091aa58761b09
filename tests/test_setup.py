"""`make setup` in a folder with a space: interrupted, with a wrong Python, on a full disk.

A stub takes the place of Python and uv. It records how it is called, and makes the files
that the real ones would make; nothing is installed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.scripts import ROOT
from tests.waiting import TIMEOUT_S, wait_until

PYTHON = r"""#!/bin/bash
echo "python $*" >> "$CALLS"
case "$*" in
  -c\ *) shift; exec "$REAL_PYTHON" -c "$PRELUDE
$1" ;;
  "-m venv --clear .venv")
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/pip ;;
  "-m pip --version") [ -e .venv/pip ] ;;
  "-m pip install "*) sleep "${INSTALL_SECONDS:-0}"; exit "${INSTALL_STATUS:-0}" ;;
  "-m ipykernel install "*) exit "${KERNEL_STATUS:-0}" ;;
  *) echo "PATH=$PATH" >> "$CALLS"; echo "OMP=$OMP_NUM_THREADS" >> "$CALLS" ;;
esac
"""
UV = r"""#!/bin/bash
echo "uv $*" >> "$CALLS"
case "$1" in
  venv) mkdir -p .venv/bin && cp "$(command -v python3)" .venv/bin/python ;;
  pip) exit "${INSTALL_STATUS:-0}" ;;
esac
"""
TOOLS = ("awk", "bash", "cp", "id", "make", "mkdir", "rm", "sleep", "touch")
STUBS = ("python -m", "uv ")  # what is compared of the calls
FILES = ("Makefile", "requirements.txt", "constraints.txt", "pyproject.toml")
INSTALL = "python -m pip install -r requirements.txt"


class Clone:
    """A copy of what the set-up needs, in a folder with a space in its name."""

    def __init__(self, folder):
        self.folder = folder / "my clone"
        self.folder.mkdir()
        for name in FILES:
            shutil.copy(ROOT / name, self.folder)
        shutil.copytree(ROOT / "docs" / "lab", self.folder / "docs" / "lab")
        self.calls = folder / "calls"
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in TOOLS:  # and no uv, wherever it may be on this machine
            (self.programs / name).symlink_to(shutil.which(name))
        self.program("python3", PYTHON)
        self.environment = {
            "PATH": str(self.programs),
            "CALLS": str(self.calls),
            "REAL_PYTHON": sys.executable,
            "PRELUDE": "import shutil; shutil.disk_usage = lambda _: Disk();"
            "Disk = type('Disk', (), {'free': 50e9})",
        }
        self.ready = self.folder / ".venv" / ".ready"

    def program(self, name, script):
        (self.programs / name).write_text(script)
        (self.programs / name).chmod(0o755)

    def start(self, *targets, **environment):
        self.calls.write_text("")
        return subprocess.Popen(
            ["make", *targets],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def make(self, *targets, **environment):
        """Run make; (exit status, what it printed, what the stubs were called with)."""
        process = self.start(*targets, **environment)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        calls = self.calls.read_text().splitlines()
        return process.returncode, output, [c for c in calls if c.startswith(STUBS)]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_first_call_installs_and_the_second_does_nothing(clone):
    status, output, calls = clone.make("setup")
    assert status == 0, output
    assert "interrupted" not in output
    assert calls[0] == "python -m venv --clear .venv"
    assert calls[1] == INSTALL
    assert calls[2].startswith("python -m ipykernel install --prefix .venv")
    assert calls[2].endswith("--display-name Python (Ray Train)")
    assert clone.ready.exists()
    status, _, calls = clone.make("setup")
    assert (status, calls) == (0, [])
    assert clone.calls.read_text() == ""


@pytest.mark.parametrize("pins", ["requirements.txt", "constraints.txt"])
def test_changed_pins_are_installed_into_the_same_environment(clone, pins):
    clone.make("setup")
    (clone.folder / ".venv" / "kept").touch()
    later = time.time() + 60
    os.utime(clone.folder / pins, (later, later))
    status, output, calls = clone.make("setup")
    assert status == 0
    assert INSTALL in calls
    assert "interrupted" not in output
    assert (clone.folder / ".venv" / "kept").exists()


def test_interrupted_install_goes_on(clone):
    process = clone.start("setup", INSTALL_SECONDS="10000")
    wait_until(lambda: INSTALL in clone.calls.read_text(), process)
    os.killpg(
        process.pid, signal.SIGINT
    )  # Ctrl-C, to the session that was started here
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert not clone.ready.exists()
    status, output, calls = clone.make("setup")
    assert status == 0
    assert "An earlier set-up was interrupted: starting it over." in output
    assert calls[0] == "python -m pip --version"
    assert calls[1] == INSTALL  # into what is there
    assert clone.ready.exists()


@pytest.mark.parametrize("left_over", ["nothing", "python", "broken link"])
def test_half_made_environment_is_made_again(clone, left_over):
    programs = clone.folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    if left_over == "python":  # and no pip yet
        shutil.copy(clone.programs / "python3", programs / "python")
    elif left_over == "broken link":
        (programs / "python").symlink_to("/nowhere/python3")
    status, output, calls = clone.make("setup")
    assert status == 0, output
    assert "python -m venv --clear .venv" in calls
    assert clone.ready.exists()


def test_a_file_called_venv_is_not_touched(clone):
    (clone.folder / ".venv").write_text("mine")
    status, output, calls = clone.make("setup")
    assert status != 0
    assert "There is a file called .venv where the environment belongs" in output
    assert calls == []
    assert (clone.folder / ".venv").read_text() == "mine"


def test_python_that_no_package_supports(clone):
    for version in ("(3, 10, 13)", "(3, 14, 0)"):
        status, output, calls = clone.make(
            "setup", PRELUDE=f"import sys; sys.version_info = {version}"
        )
        assert status != 0
        assert "Python 3.11 to 3.13 is needed, and this is 3." in output
        assert "`make setup PYTHON=python3.12`" in output
        assert calls == []
    clone.program("python3.12", PYTHON)
    clone.program("python3", "#!/bin/bash\nexit 9\n")
    assert clone.make("setup", "PYTHON=python3.12")[0] == 0


def test_a_python_that_is_named_is_not_ignored(clone):
    """Where .venv has been made with another one, which may hold work of the reader."""
    clone.program("python3.12", PYTHON.replace("$PRELUDE", "$PRELUDE; $NEWER"))
    newer = {"NEWER": "import sys; sys.version_info = (3, 12, 1)"}
    if sys.version_info[:2] == (3, 12):
        newer["NEWER"] = "import sys; sys.version_info = (3, 13, 1)"
    clone.make("setup")
    (clone.folder / ".venv" / "kept").touch()
    for target in ("setup", "lab"):
        status, output, calls = clone.make(target, "PYTHON=python3.12", **newer)
        assert status != 0
        assert f"has Python {sys.version_info[0]}.{sys.version_info[1]}, and" in output
        assert "python3.12 is Python 3.1" in output
        assert "delete the folder .venv" in output
        assert calls == []
    assert (clone.folder / ".venv" / "kept").exists()
    assert clone.make("setup", "PYTHON=python3")[::2] == (0, [])  # the same: nothing
    assert clone.make("setup")[::2] == (0, [])  # none named: nothing
    shutil.rmtree(clone.folder / ".venv")
    status, output, calls = clone.make("setup", "PYTHON=python3.12", **newer)
    assert status == 0, output
    assert INSTALL in calls


def test_full_disk_is_said_before_anything_is_installed(clone):
    prelude = clone.environment["PRELUDE"].replace("50e9", "3e9")
    status, output, calls = clone.make("setup", PRELUDE=prelude)
    assert status != 0
    assert "need 10 GB of free disk, and this folder has 3.0" in output
    assert calls == []


@pytest.mark.parametrize("fails", ["pip", "uv", "kernel"])
def test_failed_install_is_said_and_tried_again(clone, fails):
    if fails == "uv":
        clone.program("uv", UV)
    step = "KERNEL_STATUS" if fails == "kernel" else "INSTALL_STATUS"
    status, output, _ = clone.make("lab", **{step: "1"})
    assert status != 0
    said = "The packages could not be installed (the lines above say why)" in output
    assert said == (fails != "kernel")
    assert not clone.ready.exists()
    status, _, calls = clone.make("lab")
    assert status == 0
    assert any("pip install" in call for call in calls)
    assert clone.ready.exists()
    assert clone.make("-B", "setup", **{step: "1"})[0] != 0
    assert not clone.ready.exists()


def test_uv_is_used_where_it_is(clone):
    clone.program("uv", UV)
    status, output, calls = clone.make("setup")
    assert status == 0, output
    assert calls[:2] == [
        "uv venv --quiet --clear --python python3 .venv",
        "uv pip install --compile-bytecode --python .venv/bin/python -r requirements.txt",
    ]
    assert not any("-m pip" in call for call in calls)


@pytest.mark.parametrize("target", ["lab", "test", "record"])
def test_programs_of_the_environment_come_first_with_one_thread_each(clone, target):
    """A notebook's `!torchrun`, and DeepSpeed's ninja, are those of .venv. The number of
    threads is set before Python starts, as notebooks import torch before utils."""
    clone.make("setup")
    for environment, threads in (({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")):
        status, output, _ = clone.make(target, **environment)
        assert status == 0, output
        *_, path, number = clone.calls.read_text().splitlines()
        assert path.startswith(f"PATH={clone.folder}/.venv/bin:")
        assert number == f"OMP={threads}"


def test_lab_listens_on_this_machine_only(clone):
    """JupyterLab runs code for whoever reaches it."""
    clone.make("lab")
    calls = clone.calls.read_text().splitlines()
    (started,) = [call for call in calls if call.startswith("python -m jupyter lab ")]
    assert "--ServerApp.ip=127.0.0.1" in started.split()


def test_doctor_installs_nothing(clone):
    """It says what is missing, also where nothing is there."""
    status, output, calls = clone.make("doctor")
    assert status == 0, output
    assert calls == ["python -m utils.doctor"]
    assert not (clone.folder / ".venv").exists()


def test_clean_removes_what_was_made_and_nothing_else(clone):
    clone.make("setup")
    (clone.folder / "build").mkdir()
    (clone.folder / "notes.txt").write_text("mine")
    before = {*FILES, "docs", "notes.txt"}
    assert clone.make("clean")[0] == 0
    assert {path.name for path in clone.folder.iterdir()} == before
