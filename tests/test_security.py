"""What listens where while something trains, and which checkpoints run code."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until

# Each rank says where torch's store listens, and waits until that is deleted.
HOLD = """
import os, time
from pathlib import Path
import torch.distributed as dist

def hold(file):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        Path(file + ".tmp").write_text(os.environ["MASTER_PORT"])
        os.rename(file + ".tmp", file)
    while os.path.exists(file):
        time.sleep(0.1)
    dist.barrier()
    dist.destroy_process_group()
"""
IN_RAY = """
from utils.cluster import start_ray
import ray, ray.train
from ray.train.torch import TorchTrainer
from utils import nodes

{start}
scaling = ray.train.ScalingConfig(num_workers=2)
TorchTrainer(hold, train_loop_config=sys.argv[1], scaling_config=scaling).fit()
{stop}
"""
PROGRAMS = {
    "fit": IN_RAY.format(start="start_ray(2, address='local')", stop="ray.shutdown()"),
    "fit on nodes": IN_RAY.format(
        start="cluster = nodes.start(2)\n"
        "start_ray(2, nodes.WORKER, address=cluster.address, runtime_env={})",
        stop="nodes.stop(cluster)",
    ),
    "run_ranks": "from utils.launch import run_ranks\nrun_ranks(hold, 2, sys.argv[1])",
    "torchrun": "hold(sys.argv[1])",
}


def listening(process: psutil.Process) -> set[tuple[str, str, int]]:
    """Return where a process and its children listen: kind of process, address and port."""
    found = set()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for socket in each.net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((each.name(), socket.laddr.ip, socket.laddr.port))
    return found


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


WEEKLY = [pytest.mark.weekly, pytest.mark.ray]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("fit", marks=WEEKLY),
        pytest.param("fit on nodes", marks=WEEKLY),
        "run_ranks",
        "torchrun",
    ],
)
def test_nothing_but_torchs_store_listens_beyond_this_machine(how, tmp_path):
    """All sockets, while two workers train; torch binds its store to all addresses."""
    program, flag = tmp_path / "program.py", tmp_path / "trains"
    main = f"if __name__ == '__main__':\n{PROGRAMS[how]}".replace("\n", "\n    ")
    program.write_text(f"import sys\n{HOLD}\n{main}")
    python = [sys.executable]
    if how == "torchrun":
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(
            [*python, program, flag],
            cwd=scripts.ROOT,
            env=scripts.environment() | {"PYTHONPATH": str(scripts.ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(flag.exists, started, (tmp_path / "log").read_text)
        store, found = int(flag.read_text()), listening(psutil.Process(started.pid))
        flag.unlink()
        assert started.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    finally:
        started.kill()
    beyond = {each for each in found if not is_loopback(each[1])}
    if how == "torchrun":  # its agent has a store for the rendezvous, too
        assert {name for name, *_ in beyond} == {"pt_elastic"} and len(beyond) == 2
    else:
        assert {port for *_, port in beyond} == {store}, beyond
    if how.startswith("fit"):
        kinds = {name for name, *_ in found}
        assert {"gcs_server", "raylet", "ray::DashboardAgent"} <= kinds


def test_every_torch_load_takes_weights_alone():
    """A pickle runs code when it is read: weights_only refuses all but tensors."""
    calls = [
        call
        for folder in ("0*", "utils", "tests")
        for path in scripts.ROOT.glob(f"{folder}/**/*")
        if path.suffix in (".py", ".ipynb")
        for call in re.findall(
            r"torch\.load\(((?:[^()]|\([^()]*\))+)\)", path.read_text()
        )
    ]
    assert len(calls) > 10
    prose = {"..."}
    assert {call for call in calls if "weights_only=True" not in call} <= prose


class RunsCode:
    """What a pickle can do to whoever loads it."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_which_checkpoints_run_code_when_they_are_loaded(tmp_path):
    """cluster/SECURITY.md says so: not torch.load as here, but DCP's, and DeepSpeed's."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (
        TorchCheckpointEngine,
    )

    file, ran = tmp_path / "checkpoint.pt", tmp_path / "ran"
    torch.save({"model": RunsCode(ran)}, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    assert not ran.exists()

    TorchCheckpointEngine().load(str(file))
    assert ran.exists()

    ran.rmdir()
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(RunsCode(ran)))
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    assert ran.exists()
