"""Every notebook on a machine without a network: no download, and no account.

Linux and root are needed: a network namespace has its own loopback alone.
"""

import subprocess
import sys

import pytest

from tests.network import LOOPBACK_ONLY
from tests.tools import notebooks
from utils.electives import missing

LIMIT = 1700  # seconds, for the longest notebook on a slow host; below what ends a test
RANKS = """
import socket
import torch.distributed as dist
from utils.launch import run_ranks
try:
    named = socket.getnameinfo(("::ffff:127.0.0.1", 80, 0, 0), 0)[0]
except OSError:
    named = ""
print(named)  # the name of the other rank, as torch asks for it
run_ranks(dist.init_process_group, 2, "gloo")
"""
CONNECT = """
import socket
socket.create_connection(("192.0.2.1", 80), timeout=60)  # an address for documentation
"""


def offline(*arguments: object) -> subprocess.CompletedProcess:
    """Run Python where no packet leaves the machine."""
    if subprocess.run([*LOOPBACK_ONLY, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    command = [*LOOPBACK_ONLY, sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=notebooks.ROOT, timeout=LIMIT
    )


@pytest.mark.slow
def test_ranks_do_not_warn_of_a_network_without_names(monkeypatch):
    """Else each cell that starts ranks has lines more than were recorded."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)  # `utils` set it here
    run = offline("-c", RANKS)
    assert run.returncode == 0 and run.stderr == ""


@pytest.mark.weekly
def test_torch_warns_where_a_name_is_missing(monkeypatch):
    """The control, which also shows that a level that was set stays."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    run = offline("-c", RANKS)
    warns = "hostname of the client socket cannot be retrieved" in run.stderr
    assert run.returncode == 0 and warns == (run.stdout == "\n")


# Each may run beside another one, also if both start Ray: they share no network.
NOTEBOOKS = [
    pytest.param(path, id=name, marks=pytest.mark.xdist_group(name))
    for path in (*notebooks.all_notebooks(), *notebooks.electives())
    if (name := f"{path.parent.name}/{path.stem}")
]


@pytest.mark.weekly
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_needs_no_network(path):
    if missing(*notebooks.needed(path)):
        pytest.skip("not installed: `make electives`")
    run = offline("-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", path)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-4000:]


@pytest.mark.weekly
def test_there_is_no_network():
    """The control: an attempt to leave the machine fails at once."""
    assert "Network is unreachable" in offline("-c", CONNECT).stderr
