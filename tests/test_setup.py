"""`make setup` in a folder with a space: what is interrupted, wrong or full is mended.

A stub takes the place of Python and uv. It records how it is called, and makes the files
that the real ones would make; nothing is installed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.network import LOOPBACK_ONLY, nobody_listens
from tests.patience import PATIENCE, wait_until
from tests.readme import typed
from tests.skips import may_mount
from tests.tools.notebooks import ROOT

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
  *) echo "PATH=$PATH" >> "$CALLS" ;;
esac
"""
FAILS = '  "-m coverage run "*) exit "$TEST_STATUS" ;;\n'
UV = r"""#!/bin/bash
echo "uv $*" >> "$CALLS"
case "$1" in
  venv) mkdir -p .venv/bin && cp "$(command -v python3)" .venv/bin/python ;;
  pip) exit "${INSTALL_STATUS:-0}" ;;
esac
"""
TOOLS = ("awk", "bash", "cp", "id", "make", "mkdir", "rm", "sleep", "touch")
STUBS = ("python -m", "uv ", "PATH=")  # what is compared of the calls
FILES = ("Makefile", "requirements.txt", "constraints.txt", "pyproject.toml")
INSTALL = "python -m pip install -r requirements.txt"
ELECTIVES = "02-ddp-pytorch-ray/electives"


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
        output, _ = process.communicate(timeout=PATIENCE)
        calls = self.calls.read_text().splitlines()
        return process.returncode, output, [c for c in calls if c.startswith(STUBS)]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.mark.covers("make setup", "pip install -r requirements.txt")
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
    process.communicate(timeout=PATIENCE)
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


@pytest.mark.parametrize("uv", [False, True])
def test_failed_install_is_said_and_tried_again(clone, uv):
    if uv:
        clone.program("uv", UV)
    status, output, _ = clone.make("lab", INSTALL_STATUS="1")
    assert status != 0
    assert "The packages could not be installed (the lines above say why)" in output
    assert not clone.ready.exists()
    status, _, calls = clone.make("lab")
    assert status == 0
    assert any("pip install" in call for call in calls)
    assert clone.ready.exists()
    assert clone.make("-B", "setup", INSTALL_STATUS="1")[0] != 0
    assert not clone.ready.exists()


def test_kernel_that_cannot_be_registered_is_not_forgotten(clone):
    assert clone.make("setup", KERNEL_STATUS="1")[0] != 0
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


def test_from_a_wheelhouse_pip_installs_and_asks_nobody(clone):
    clone.program("uv", UV)  # does not read what pip reads
    status, output, _ = clone.make("setup", "WHEELHOUSE=build/wheelhouse")
    assert status != 0 and "There is no folder build/wheelhouse" in output
    (clone.folder / "build" / "wheelhouse").mkdir(parents=True)
    show = 'echo "from $PIP_FIND_LINKS, index $PIP_NO_INDEX" >> "$CALLS";'
    clone.program("python3", PYTHON.replace('sleep "${INSTALL_SECONDS:-0}";', show, 1))
    status, output, calls = clone.make("setup", "WHEELHOUSE=build/wheelhouse")
    assert status == 0, output
    assert INSTALL in calls and not any(call.startswith("uv") for call in calls)
    assert "from build/wheelhouse, index 1" in clone.calls.read_text()


@pytest.mark.parametrize("target", ["lab", "test", "tour", "record", "doctor"])
def test_programs_of_the_environment_come_first(clone, target):
    """A notebook's `!torchrun`, and DeepSpeed's ninja, are those of .venv."""
    clone.make("setup")
    status, output, calls = clone.make(target)
    assert status == 0, output
    assert calls[-1].startswith(f"PATH={clone.folder}/.venv/bin:")


@pytest.mark.parametrize("target", ["lab", "test", "tour", "record"])
def test_one_thread_per_process_unless_the_reader_says_otherwise(clone, target):
    """Set before Python starts: notebooks import torch before utils."""
    clone.program("python3", PYTHON.replace("PATH=$PATH", "PATH=$OMP_NUM_THREADS"))
    assert clone.make(target)[2][-1] == "PATH=1"
    assert clone.make(target, OMP_NUM_THREADS="3")[2][-1] == "PATH=3"


def test_lab_listens_on_this_machine_only(clone):
    """JupyterLab runs code for whoever reaches it."""
    clone.make("lab")
    calls = clone.calls.read_text().splitlines()
    (started,) = [call for call in calls if call.startswith("python -m jupyter lab ")]
    assert "--ServerApp.ip=127.0.0.1" in started.split()


@pytest.mark.covers("make test", "make test PART=02")
@pytest.mark.covers("make test-all", "make test-weekly")
@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["test"], "--nbval -n 2 -m not slow and not weekly --note-run=test"),
        (["test", "PART=02"], "--nbval -n 2 -m part02 and not weekly"),
        (
            ["test-all"],
            "--nbval -n 2 -m not weekly and not side_trip and not elective "
            "--note-run=test-all",
        ),
        (["test-weekly"], "-m weekly --note-run=test-weekly"),
    ],
)
def test_a_tier_is_chosen_by_marks(clone, arguments, chosen):
    (clone.folder / "02-part").mkdir()
    status, output, calls = clone.make(*arguments)
    assert status == 0, output
    (call,) = [call for call in calls if call.startswith("python -m pytest")]
    assert call.partition(" -o ")[0] == f"python -m pytest {chosen}"


@pytest.fixture
def with_electives(clone):
    """Return a copy that has the electives' pins, too."""
    folder = clone.folder / ELECTIVES
    folder.mkdir(parents=True)
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / ELECTIVES / name, folder)
    return clone


@pytest.mark.covers("make electives", "make test-electives")
def test_electives_are_installed_beside_the_others_and_once(with_electives):
    install = f"python -m pip install -r {ELECTIVES}/requirements.txt"
    tests = "--nbval -n 2 -m elective and not weekly --note-run=test-electives"
    status, output, calls = with_electives.make("electives")
    assert status == 0, output
    assert calls.index(INSTALL) < calls.index(install)
    assert with_electives.make("electives")[::2] == (0, [])
    status, output, calls = with_electives.make("test-electives")
    assert status == 0, output
    assert f"python -m pytest {tests}" in calls and install not in calls


def test_electives_that_cannot_be_installed_leave_the_others(with_electives):
    assert with_electives.make("setup")[0] == 0
    status, output, _ = with_electives.make("electives", INSTALL_STATUS="1")
    assert status != 0
    assert "packages of the electives could not be installed" in output
    assert with_electives.ready.exists()
    assert with_electives.make("setup")[::2] == (0, [])  # which the other lessons need
    assert with_electives.make("electives")[0] == 0


@pytest.mark.parametrize("status", [0, 1])
def test_coverage_prints_its_table_also_if_a_test_fails(clone, status):
    clone.program("python3", PYTHON.replace("  *) echo", FAILS + "  *) echo"))
    assert clone.make("setup")[0] == 0
    found, output, calls = clone.make("coverage", TEST_STATUS=str(status))
    assert bool(found) == bool(status), output
    assert [call for call in calls if call.startswith("python -m coverage")] == [
        "python -m coverage run -m pytest --nbval -n 2 -m not weekly and not elective",
        "python -m coverage combine --quiet",
        "python -m coverage report",
    ]


def test_a_part_that_does_not_exist_is_named(clone):
    status, output, calls = clone.make("test", "PART=7")
    assert status != 0
    assert "There is no part 7: name a numbered folder" in output
    assert not any("pytest" in call for call in calls)


@pytest.mark.covers("make doctor")
def test_doctor_installs_nothing(clone):
    """It says what is missing, also where nothing is there."""
    status, output, calls = clone.make("doctor")
    assert status == 0, output
    assert [call for call in calls if not call.startswith("PATH=")] == [
        "python -m utils.doctor"
    ]
    assert not (clone.folder / ".venv").exists()


@pytest.mark.runs("make clean")
def test_clean_removes_what_was_made_and_nothing_else(clone):
    clone.make("setup")
    (clone.folder / "build").mkdir()
    (clone.folder / "notes.txt").write_text("mine")
    before = {*FILES, "docs", "notes.txt"}
    _, target = typed("make clean")
    assert clone.make(target)[0] == 0
    assert {path.name for path in clone.folder.iterdir()} == before


@pytest.mark.weekly
def test_what_was_collected_before_installs_without_a_network(tmp_path):
    """As docs/installing.md says it, with the real pip, and all packages."""
    page = (ROOT / "docs" / "installing.md").read_text()
    (paragraph,) = re.findall(r"^## Without a network\n\n(.*)$", page, re.MULTILINE)
    quoted = re.findall(r"`([^`]+)`", paragraph)
    collect, install = [command for command in quoted if "make " in command]
    folder = tmp_path / "my clone"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "utils", folder / "utils")

    python = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", python], check=True, timeout=PATIENCE)
    places = os.environ["PATH"].split(os.pathsep)
    places = [place for place in places if not os.path.exists(f"{place}/uv")]
    path = os.pathsep.join([str(python / "bin"), *places])
    nowhere = f"http://{nobody_listens()}"
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    alone |= {"http_proxy": nowhere, "https_proxy": nowhere}

    def run(command: str, cut: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*(LOOPBACK_ONLY if cut and may_mount() else []), "sh", "-c", command],
            cwd=folder,
            env=os.environ | {"PATH": path} | (alone if cut else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )

    collected = run(collect, cut=False)
    assert collected.returncode == 0, collected.stdout
    assert "are in build/wheelhouse" in collected.stdout
    shutil.rmtree(folder / "build" / "pip")  # what collected them is not needed
    (wheel,) = folder.glob("build/wheelhouse/tqdm-*.whl")
    wheel.rename(folder / wheel.name)
    failed = run(install)
    assert failed.returncode != 0 and "tqdm" in failed.stdout
    assert "The packages could not be installed" in failed.stdout

    (folder / wheel.name).rename(wheel)
    installed = run(install)
    assert installed.returncode == 0, installed.stdout
    found = run(".venv/bin/python -m utils.doctor").stdout
    assert re.search(r"all \d+ as pinned in requirements.txt", found), found
    assert (
        run(".venv/bin/python -c 'import deepspeed, ray, torch, utils'").returncode == 0
    )
