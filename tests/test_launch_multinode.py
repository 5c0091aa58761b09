"""launch_multinode_ddp.sh: nodes over ssh or on this machine, and what ends them."""

import os
import socket
import subprocess

import psutil
import pytest

from tests import scripts
from tests.patience import PATIENCE
from utils.processes import free_port

pytestmark = pytest.mark.part01


def test_port_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [scripts.LAUNCH_MULTINODE],
            env=os.environ | {"MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 1
    assert done.stderr == f"Port {port} is in use: set MASTER_PORT to a free one.\n"


@pytest.mark.weekly
@pytest.mark.covers(
    'HOSTS="gpu1 gpu2" NPROC_PER_NODE=8 ./launch_multinode_ddp.sh --epochs 3'
)
def test_nodes_are_launched_over_ssh(tmp_path):
    """With an `ssh` that runs the command here, as sshd would, in another folder."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n"
        f'echo "$1" >>{tmp_path}/hosts\necho "$2" >>{tmp_path}/commands\n'
        'cd / && exec env -i PATH=/usr/bin:/bin HOME="$HOME" bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    environment = {
        "HOSTS": "somebody@127.0.0.1 localhost",  # torchrun gets the host alone
        "OMP_NUM_THREADS": "3",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE, "--epochs", "1", "--batch-size", "700"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "2 workers on cpu, batch 700 each and 1400 global" in done.stdout
    assert sorted((tmp_path / "hosts").read_text().split()) == [
        "localhost",
        "somebody@127.0.0.1",
    ]
    commands = (tmp_path / "commands").read_text().splitlines()
    for said in ("GLOO_SOCKET_IFNAME=lo ", "OMP_NUM_THREADS=3 ", "=127.0.0.1 "):
        assert [said in command for command in commands] == [True] * 2


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
    for name, program in {
        "nvidia-smi": f"printf '%s\\n' {gpus}" if gpus else "exit 9",
        "torchrun": "echo ${2#--node_rank=}: $CUDA_VISIBLE_DEVICES $WORKSHOP_MODE",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC_PER_NODE": "2"}
    environment |= {"MASTER_PORT": str(free_port()), "WORKSHOP_MODE": "full"}
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == expected


def test_a_host_that_fails_ends_the_other_one(tmp_path):
    """Else its torchrun would wait there, and hold the GPUs, after all is over here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/bash\nif [[ $* == *node_rank=1* ]]; then\n"
        f"  until [ -s {tmp_path}/pid ]; do sleep 0.1; done; exit 3\nfi\n"
        f"echo $$ >{tmp_path}/pid && exec sleep 10000\n"
    )
    ssh.chmod(0o755)
    environment = {"HOSTS": "one two", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE], env=os.environ | environment, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
