"""What every test and compared notebook runs in: CPU, one thread, own Ray and folder."""

import importlib
import os
import shutil
import sysconfig
import tempfile
import uuid
from collections import Counter

from nbval.plugin import IPyNbFile

from tests import scripts
from tests.notebooks import RECORDING_ENVIRONMENT, end_left_over, note_seconds

os.environ.update(RECORDING_ENVIRONMENT)
importlib.import_module("utils.cluster")  # before Ray: it sets what that reads
# This environment's programs (torchrun, ninja) first, also where it is not activated.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
_setup, _teardown = IPyNbFile.setup, IPyNbFile.teardown


def pytest_configure(config):
    os.environ["WORKSHOP_STORAGE"] = tempfile.mkdtemp(prefix="workshop-tests-")


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["WORKSHOP_STORAGE"], ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """Say where the time went: seconds per file; per cell, in a file for `make bench`."""
    by_test, by_file = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                by_test[report.nodeid] += report.duration
                by_file[report.nodeid.split("::")[0]] += report.duration
    if any(".ipynb" in name for name in by_file):
        failed = {r.nodeid for r in terminalreporter.stats.get("failed", [])}
        note_seconds({n: s for n, s in by_test.items() if n not in failed})
    if len(by_file) > 1:
        terminalreporter.section("seconds per file")
        for name, total in by_file.most_common():
            terminalreporter.write_line(f"{total:7.1f}  {name}")
        terminalreporter.write_line(f"{by_file.total():7.1f}  together")


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
