"""launch_multinode_ddp.sh: nodes over ssh or on this machine, and what ends them."""

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import scripts
from tests.waiting import TIMEOUT_S
from utils.processes import free_port


def launch(folder: Path, *arguments: str, **variables: str):
    """Launch where programs of a folder come first; return what it did and printed."""
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    return subprocess.run(
        [scripts.LAUNCH_MULTINODE, *arguments],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def program(file: Path, lines: str) -> None:
    file.write_text(f"#!/bin/bash\n{lines}\n")
    file.chmod(0o755)


def test_a_port_in_use_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(tmp_path, MASTER_PORT=str(port))
    assert done.returncode == 1
    assert done.stderr == f"Port {port} is in use: set MASTER_PORT to a free one.\n"


@pytest.mark.weekly
def test_nodes_are_launched_over_ssh(tmp_path):
    """With an `ssh` that runs the command here, as sshd would, in another folder."""
    program(
        tmp_path / "ssh",
        "while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n"
        f'echo "$1" >>{tmp_path}/hosts\necho "$2" >>{tmp_path}/commands\n'
        'cd / && exec env -i PATH=/usr/bin:/bin HOME="$HOME" bash -c "$2"',
    )
    done = launch(
        tmp_path,
        *["--epochs", "1", "--batch-size", "700"],
        HOSTS="somebody@127.0.0.1 localhost",  # torchrun gets the host alone
        OMP_NUM_THREADS="3",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stderr
    assert "2 workers on cpu, batch 700 each and 1400 global" in done.stdout
    assert sorted((tmp_path / "hosts").read_text().split()) == [
        "localhost",
        "somebody@127.0.0.1",
    ]
    commands = (tmp_path / "commands").read_text().splitlines()
    for part in ("GLOO_SOCKET_IFNAME=lo ", "OMP_NUM_THREADS=3 ", "=127.0.0.1 "):
        assert [part in command for command in commands] == [True] * 2


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("0 1 2 3", {"0: 0,1 full", "1: 2,3 full"}),
        ("0", {"0: smoke", "1: smoke"}),
        ("", {"0: full", "1: full"}),
    ],
)
def test_nodes_on_one_machine_share_no_gpu(gpus, expected, tmp_path):
    """With a torchrun that only tells what it was given: NCCL refuses shared GPUs."""
    nvidia_smi = f"printf '%s\\n' {gpus}" if gpus else "exit 9"
    torchrun = "echo ${2#--node_rank=}: $CUDA_VISIBLE_DEVICES $WORKSHOP_MODE"
    program(tmp_path / "nvidia-smi", nvidia_smi)
    program(tmp_path / "torchrun", torchrun)
    done = launch(tmp_path, NPROC_PER_NODE="2", WORKSHOP_MODE="full")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == expected


def test_a_host_that_fails_ends_the_other_one(tmp_path):
    """Else its torchrun would wait there, and hold the GPUs, after all is over here."""
    program(
        tmp_path / "ssh",
        f"if [[ $* == *node_rank=1* ]]; then\n"
        f"  until [ -s {tmp_path}/pid ]; do sleep 0.1; done; exit 3\nfi\n"
        f"echo $$ >{tmp_path}/pid && exec sleep 10000",
    )
    done = launch(tmp_path, HOSTS="one two")
    assert done.returncode != 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
