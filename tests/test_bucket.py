"""Checkpoints of Ray Train in a bucket: a server of S3's protocol, on this machine."""

import json
import subprocess
import time

import pytest
import torch
from pyarrow import fs

from tests import scripts
from tests.test_stopping import RAY, Job, assert_equal, kill_family
from tests.waiting import wait_until
from utils.processes import free_port
from utils.ray_runs import LIST

SERVER = scripts.ROOT / ".venv-weekly" / "bin" / "moto_server"
pytestmark = [pytest.mark.weekly, pytest.mark.ray]


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """Start a server; yield its file system, for runs in `s3://bucket`."""
    if not SERVER.exists():
        pytest.skip("no packages of the weekly tests here: `make .venv-weekly`")
    port = free_port()
    command = [SERVER, "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    ours = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
    ours |= {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    wait_until(lambda: "Running on" in (tmp_path / "server.log").read_text(), server)
    # unlike `from_uri`, this does not read the address of the server
    here = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http"}
    system = fs.S3FileSystem(allow_bucket_creation=True, **here)
    system.create_dir("bucket")
    yield system
    server.kill()
    server.wait()


def in_bucket(system: fs.FileSystem, run: str) -> set[str]:
    """Return the names of what is in the folder of a run."""
    found = system.get_file_info(fs.FileSelector(f"bucket/{run}", allow_not_found=True))
    return {each.base_name for each in found}


def listed(system: fs.FileSystem, run: str) -> list[str]:
    """Return the names of the checkpoints that Ray lists."""
    if LIST not in in_bucket(system, run):
        return []
    with system.open_input_stream(f"bucket/{run}/{LIST}") as file:
        noted = json.loads(file.read())
    return [each["checkpoint_dir_name"] for each in noted["checkpoint_results"]]


def final(system: fs.FileSystem, run: str) -> dict[str, torch.Tensor]:
    newest = listed(system, run)[-1]
    with system.open_input_file(f"bucket/{run}/{newest}/checkpoint.pt") as file:
        return torch.load(file, weights_only=True)["model"]


def test_a_run_in_a_bucket_is_stopped_and_killed_while_it_uploads(bucket):
    """It ends with the weights of an undisturbed one, and nothing cut off stays there."""
    undisturbed = Job(RAY, "s3://bucket/undisturbed")
    assert undisturbed.end() == 0, "".join(undisturbed.lines)

    stopped = Job(RAY, "s3://bucket/run")
    stopped.wait_for("epoch 1/")
    stopped.stop()
    assert stopped.end() != 0
    assert stopped.printed("stopped (in|after) epoch"), "".join(stopped.lines)

    killed = Job(RAY, "s3://bucket/run")
    killed.wait_for("goes on after")

    def uploads() -> set[str]:
        there = {n for n in in_bucket(bucket, "run") if n.startswith("checkpoint_2")}
        return there - set(listed(bucket, "run"))

    wait_until(uploads, killed.process, lambda: "".join(killed.lines))
    kill_family(killed.process.pid)
    killed.end()
    cut_off = uploads()
    time.sleep(1)

    again = Job(RAY, "s3://bucket/run")
    assert again.end() == 0, "".join(again.lines)
    assert again.printed("goes on after"), "".join(again.lines)
    assert_equal(final(bucket, "run"), final(bucket, "undisturbed"))
    left = {n for n in in_bucket(bucket, "run") if n.startswith("checkpoint_2")}
    assert left == set(listed(bucket, "run")) and len(left) == 2
    assert not left & cut_off


def test_a_bucket_that_is_not_there_is_a_sentence(bucket):
    job = Job(RAY, "s3://nowhere/run")
    assert job.end() == 1
    assert job.printed(r"--checkpoint-dir s3://nowhere/run"), "".join(job.lines)
