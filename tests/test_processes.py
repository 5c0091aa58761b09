"""utils.processes: what holds in every process that imports utils."""

import socket
import subprocess
import sys

import pytest

from utils import processes


@pytest.mark.parametrize("first", ["torch", "utils.settings"])
def test_one_thread_whatever_is_imported_first(monkeypatch, first):
    """Also where nothing has set the variable before Python started."""
    code = f"import {first}, torch, utils.settings; print(torch.get_num_threads())"
    for setting, threads in ((None, "1"), ("2", "2")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if setting:
            monkeypatch.setenv("OMP_NUM_THREADS", setting)
        command = [sys.executable, "-c", code]
        answer = subprocess.check_output(command, text=True, timeout=120)
        assert answer.strip() == threads


def test_a_free_port_is_the_next_one_that_nobody_listens_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        assert first < processes.free_port(first) < first + 1000
    assert processes.free_port() > 0
