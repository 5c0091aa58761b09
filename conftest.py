"""What every test and compared notebook runs in: CPU, one thread, own Ray and folder.

Besides, the fixture that several files of tests use.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import uuid
from pathlib import Path

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager
from nbval.plugin import IPyNbCell, IPyNbFile

from tests import scripts
from tests.patience import PATIENCE
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, end_left_over

pytest_plugins = ["tests.tiers", "tests.lanes", "tests.skips", "tests.tools.seconds"]

os.environ.update(RECORDING_ENVIRONMENT)
importlib.import_module("utils")  # before Ray: it sets what that reads
# This environment's programs (torchrun, ninja) first, also where it is not activated.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
# A `make` that a test types says what it says to a person, also under `make test`.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A warning of our own code is an error here (pyproject.toml), and in processes started
# by tests. PYTHONWARNINGS takes names of modules, not patterns.
ROOT = Path(__file__).parent
OURS = (*ROOT.glob("utils/**/*.py"), *ROOT.glob("tests/**/*.py"))
names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in OURS]
names += [path.stem for path in ROOT.glob("0*/*.py")]
os.environ["PYTHONWARNINGS"] = ",".join(
    f"error:::{name.removesuffix('.__init__')}" for name in names
)
# What a learner made beside the lessons is not compared with anything.
collect_ignore_glob = ["*-solved.ipynb", "*-solved-?.ipynb", "*-mine.*", "*-mine-?.*"]
_setup, _teardown = IPyNbFile.setup, IPyNbFile.teardown


def pytest_configure(config):
    os.environ["WORKSHOP_STORAGE"] = tempfile.mkdtemp(prefix="workshop-tests-")
    # nbval's own is a minute, in which a busy host may not start one
    config.option.nbval_kernel_startup_timeout = PATIENCE


def pytest_report_header(config):
    """Say where tests write: a disk that is nearly full fails those that spill objects."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    free, total = disk.free / 2**30, disk.total / 2**30
    return f"free on {tempfile.gettempdir()}: {free:.1f} of {total:.1f} GiB"


def pytest_unconfigure(config):
    """End what tests left behind, as one that was stopped by its time limit; clean up."""
    end_left_over({"WORKSHOP_STORAGE": os.environ["WORKSHOP_STORAGE"]})
    shutil.rmtree(os.environ["WORKSHOP_STORAGE"], ignore_errors=True)


class KernelWithoutPorts(KernelManager):
    """A kernel's sockets are files: a free port may be taken before the kernel has it."""

    def __init__(self, **options):
        # the path of a socket has to be short, as those of Ray, see tests/lanes.py
        file = Path(os.environ["RAY_TMPDIR"], f"kernel-{uuid.uuid4().hex}.json")
        super().__init__(transport="ipc", connection_file=str(file), **options)


nbval.kernel.KernelManager = KernelWithoutPorts


def setup(self):
    """Start a notebook's kernel, marked, so that all it starts can be found again."""
    self.marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
    before = dict(os.environ)
    kernels = scripts.environment() | RECORDING_ENVIRONMENT | self.marker
    # Where ipykernel sees this variable it does not capture the output of `!commands`.
    del kernels["PYTEST_CURRENT_TEST"]
    os.environ.clear()
    os.environ.update(kernels)
    try:
        _setup(self)
    finally:
        os.environ.clear()
        os.environ.update(before)


def teardown(self):
    """Stop a notebook's kernel, and end whatever it left behind."""
    _teardown(self)
    end_left_over(self.marker)


IPyNbFile.setup, IPyNbFile.teardown = setup, teardown


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Run no cell below one that failed: it would only fail for that, and take its time."""
    failed = isinstance(item, IPyNbCell) and getattr(item.parent, "failed", None)
    if failed:
        pytest.xfail(f"not run, as {failed} failed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    """Note a cell that failed; one that is to raise and does has passed."""
    report = yield
    if isinstance(item, IPyNbCell) and report.failed:
        item.parent.failed = item.name
    return report


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of 4 MB, mounted at a folder; only root may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, timeout=PATIENCE).returncode:
        pytest.skip("this user may not mount a disk to fill up")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=PATIENCE)
