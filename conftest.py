"""What every test and compared notebook runs in, and which of them run when.

Tests run on the CPU, with one thread, in a Ray and folders of their own. Marks say when a
test runs (pyproject.toml), and notebooks get theirs here, by where they stand.
"""

import functools
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import IPyNbCell

from tests import kernels  # noqa: F401  it changes how nbval starts them
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, end_left_over
from tests.tools.notebooks.outline import going_deeper
from tests.waiting import TIMEOUT_S

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
if importlib.util.find_spec("lightning") is None:  # no `make electives` yet
    collect_ignore_glob = ["*/electives/*.ipynb"]

# In CI a skipped test is a failure, since .ci/run installs what tests need, except here.
MAY_BE_SKIPPED_IN_CI = {
    "kubectl is not installed here",
    "a chart's schema is not here and cannot be downloaded",
    "this user may not mount a disk to fill up",
    "this user may not make network namespaces",
}
RAYS = pytest.StashKey[set[Path]]()  # those that were there before a test


def pytest_configure(config):
    os.environ["WORKSHOP_STORAGE"] = tempfile.mkdtemp(prefix="workshop-tests-")
    # Ray's path of a socket has to be short, so it is not pytest's folder.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # nbval's own is a minute, in which a busy host may not start one
    config.option.nbval_kernel_startup_timeout = TIMEOUT_S


def pytest_report_header():
    """Say where tests write: a disk that is nearly full fails those that spill objects."""
    disk = shutil.disk_usage(tempfile.gettempdir())
    free, total = disk.free / 2**30, disk.total / 2**30
    return [
        f"free on {tempfile.gettempdir()}: {free:.1f} of {total:.1f} GiB",
        "where a test fails, the logs of its Ray stay in /tmp/ray-*",
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus):
    """End what tests left behind, as one that was stopped by its time limit; clean up."""
    end_left_over({"WORKSHOP_STORAGE": os.environ["WORKSHOP_STORAGE"]})
    shutil.rmtree(os.environ["WORKSHOP_STORAGE"], ignore_errors=True)
    if not exitstatus:  # else Ray's logs may say why a test failed
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


@functools.cache
def side_trips(notebook: Path) -> set[int]:
    """Return the numbers of the code cells that a lesson's main line does not need."""
    cells = nbformat.read(notebook, as_version=4).cells
    aside = {id(cell) for cell in going_deeper(cells)}
    code = (cell for cell in cells if cell.cell_type == "code")
    return {number for number, cell in enumerate(code) if id(cell) in aside}


@functools.cache
def starts_ray(notebook: Path) -> bool:
    text = notebook.read_text()
    return "start_ray" in text or "--num-workers" in text


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks, and xdist by groups
def pytest_collection_modifyitems(items):
    """Mark cells of notebooks by where they stand, and say which tests share a process."""
    for item in items:
        if isinstance(item, IPyNbCell):
            first = item.path.name.startswith("01_") or item.path.stem == "solutions"
            if item.path.parent.name == "electives" or item.cell_num in side_trips(
                item.path
            ):
                item.add_marker("weekly")
            elif not first:
                item.add_marker("slow")
            if starts_ray(item.path):
                item.add_marker("ray")
        # Two Rays on one machine take each other's ports, so all that starts one is in
        # one process of xdist; and a file is, as its tests share fixtures or a kernel.
        group = "ray" if item.get_closest_marker("ray") else item.path.stem
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def started_rays() -> set[Path]:
    """Return the folders of the Rays that this process and those below it have started."""
    return set(Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Run no cell below one that failed: it would only fail for that, and take its time."""
    item.stash[RAYS] = started_rays()
    failed = isinstance(item, IPyNbCell) and getattr(item.parent, "failed", None)
    if failed:
        pytest.xfail(f"not run, as {failed} failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Fail a test that starts a Ray without saying so."""
    result = yield
    if started_rays() - item.stash[RAYS] and not item.get_closest_marker("ray"):
        pytest.fail("It starts a Ray: mark it with `pytest.mark.ray`.", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    """Note a cell that failed; in CI, a test that was skipped proves nothing: it fails."""
    report = yield
    if isinstance(item, IPyNbCell) and report.failed:
        item.parent.failed = item.name
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in MAY_BE_SKIPPED_IN_CI:
            report.outcome, report.longrepr = "failed", f"skipped in CI: {reason}"
    return report


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of 4 MB, mounted at a folder; only root may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, timeout=TIMEOUT_S).returncode:
        pytest.skip("this user may not mount a disk to fill up")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=TIMEOUT_S)
