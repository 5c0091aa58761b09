"""Every notebook on a machine without a network: no download, and no account.

Linux and root are needed, as in `machines`: a network namespace has its own loopback alone.
"""

import subprocess
import sys

import pytest

from tests.network import LOOPBACK_ONLY
from tests.skips import may_mount
from tests.tools import notebooks
from utils.electives import missing

LIMIT = 1700  # seconds, for the longest notebook on a slow host; below what ends a test
EXECUTE = """
import sys
from pathlib import Path
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, execute
execute(Path(sys.argv[1]), RECORDING_ENVIRONMENT)
"""
CONNECT = """
import socket
socket.create_connection(("192.0.2.1", 80), timeout=60)  # an address for documentation
"""


def offline(program: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a program of Python where no packet leaves the machine."""
    if not may_mount():
        pytest.skip("this user may not make network namespaces")
    command = [*LOOPBACK_ONLY, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=notebooks.ROOT, timeout=LIMIT
    )


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "path",
    [*notebooks.all_notebooks(), *notebooks.electives()],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_a_notebook_needs_no_network(path):
    if missing(*notebooks.needed(path)):
        pytest.skip("not installed: `make electives`")
    run = offline(EXECUTE, path)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.weekly
def test_there_is_no_network():
    """The control: an attempt to leave the machine fails at once."""
    assert "Network is unreachable" in offline(CONNECT).stderr
