"""The skips that are allowed, each with where (a plugin of pytest): any other one fails.

A test that is skipped proves nothing, and nobody reads the list of what was skipped.
"""

import os
import platform
import sys
from pathlib import Path

import pytest

from utils.electives import missing, pins

ROOT = Path(__file__).parent.parent


def may_mount() -> bool:
    """Return whether this is root, and no container keeps CAP_SYS_ADMIN from it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 21 & 1)


def outside_venv() -> bool:
    """Return whether Python is not that of `make`."""
    return Path(sys.prefix) != ROOT / ".venv"


def installs_nothing() -> bool:
    """Return whether this is not CI as root, where .ci/run installs what its tests need."""
    return not (os.environ.get("CI") and os.geteuid() == 0)


def no_schemas() -> bool:
    """Return whether nobody said where they are: .ci/run does, if they are there."""
    return not {"WORKSHOP_KUBERAY_SCHEMAS", "WORKSHOP_HUB_SCHEMA"} <= os.environ.keys()


def lacks_electives() -> bool:
    """Return whether nobody installed them: .ci/run does, and then runs their tests."""
    return bool(missing(*pins()))


# The reason that a test gives, and where it may.
ALLOWED = {
    "mallopt is glibc's": lambda: platform.libc_ver()[0] != "glibc",
    "ports are reserved on Linux alone": lambda: sys.platform != "linux",
    "make lab needs the .venv of this repository": outside_venv,
    "the tests run outside .venv, where `make setup` has no say": outside_venv,
    "there is no compiler here": installs_nothing,
    "Prometheus is not installed here": installs_nothing,
    "no Chromium here: `apt-get install chromium`": installs_nothing,
    "no Playwright here: `make .venv-browser/.ready`": installs_nothing,
    "no JupyterHub here: `make hub`": installs_nothing,
    "a chart's schema is not here and cannot be downloaded": no_schemas,
    "kubectl is not installed here": lambda: "GITHUB_ACTIONS" not in os.environ,
    "not installed: `make electives`": lacks_electives,
    "this user may not mount a disk to fill up": lambda: not may_mount(),
    "this user may not make network namespaces": lambda: not may_mount(),
}


def as_failure(report):
    """Turn the report of a skip that is not allowed into a failure; others stay."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not ALLOWED.get(reason, lambda: False)():
            report.outcome = "failed"
            report.longrepr = (
                f"Skipped: {reason}\nThis skip is not allowed here: mend what the test "
                "lacks, or list its reason in tests/skips.py, with where it is allowed."
            )
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return as_failure((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return as_failure((yield))
