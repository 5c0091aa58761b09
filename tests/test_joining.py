"""A cluster that somebody else has started: joined with its token, and not without."""

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from typing import NamedTuple

from utils.cluster import twice

import psutil
import pytest

from tests import scripts
from tests.network import nobody_listens
from tests.waiting import TIMEOUT_S, wait_until
from utils import nodes
from utils.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TOKEN = "1" * 64
RAY = [nodes.python(), "-m", "ray.scripts.scripts"]  # what `ray` is
JOIN = f"""
import os, subprocess
from utils.cluster import start_ray
start_ray(2)
import ray
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes
actor = ray.remote(type("Actor", (), {{"answer": lambda self: 42}})).remote()
print("answers:", ray.get(actor.answer.remote()))
(node,) = list_nodes()
print("state:", node.node_id == ray.get_runtime_context().get_node_id())
print("jobs:", JobSubmissionClient().get_address())
listed = subprocess.check_output([*{RAY}, "list", "nodes"], text=True, timeout={TIMEOUT_S})
print("command:", node.node_id in listed)
"""


class Head(NamedTuple):
    """A Ray of its own on this machine, with what a user of it has in the environment."""

    address: str
    dashboard: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a head that asks for a token with `ray start`; yield it."""
    home = tmp_path_factory.mktemp("protected")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)  # as after any local Ray
    user = scripts.environment() | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    ours = {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(home / "storage")}
    ours["RAY_AUTH_MODE"] = "token"

    def start(dashboard: int) -> tuple[subprocess.Popen, Head]:
        port, dashboard = free_port(), free_port(dashboard)
        command = [*RAY, "start", "--head", "--block", "--num-cpus=4", f"--port={port}"]
        command += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
        # else the head that starts second has no agent's server, and takes no jobs
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        command += ["--node-ip-address=127.0.0.1", f"--temp-dir=/tmp/ray-{port}"]
        with (home / "log").open("w") as log:
            started = subprocess.Popen(
                command, env=user | ours, stdout=log, stderr=subprocess.STDOUT
            )
        said = (home / "log").read_text
        wait_until(lambda: "Ray runtime started" in said(), started, said)
        there = Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", user)
        return started, there

    started, there = twice(start)
    try:
        yield there
    finally:
        family = [started, *psutil.Process(started.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait(TIMEOUT_S)


TOKEN_MODE = {"RAY_AUTH_MODE": "token"}
# For those that are refused; else Ray tries for longer.
SHORT = {"RAY_gcs_rpc_server_connect_timeout_s": "2", "RAY_NUM_REDIS_GET_RETRIES": "3"}


def run(command: list, there: Head, **environment) -> subprocess.CompletedProcess:
    """Run as that user, with the cluster's address."""
    known = {"RAY_ADDRESS": there.address}
    return subprocess.run(
        command,
        cwd=scripts.ROOT,
        env=there.environment | known | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_who_has_the_token_joins_and_finds_the_state_and_jobs_of_that_ray(cluster):
    """And so do the commands that they start. Not those of a Ray that is gone."""
    stale = f"http://{nobody_listens()}"
    known = TOKEN_MODE | {"RAY_API_SERVER_ADDRESS": stale}
    done = run([sys.executable, "-c", JOIN], cluster, **known)
    assert done.returncode == 0, done.stderr
    answers, state, jobs, command = done.stdout.splitlines()[-4:]
    assert answers == "answers: 42" and state == "state: True"
    assert jobs == f"jobs: {cluster.dashboard}" and command == "command: True"


@pytest.mark.parametrize(
    "environment",
    [{}, TOKEN_MODE, TOKEN_MODE | {"RAY_AUTH_TOKEN": "2" * 64}],
)
def test_no_token_or_a_wrong_one_is_one_sentence_with_the_fix(
    environment, cluster, tmp_path
):
    nobody = {"HOME": str(tmp_path)} | SHORT | environment
    done = run([sys.executable, "-c", JOIN], cluster, **nobody)
    last = done.stderr.splitlines()[-1]
    asks = f"The Ray cluster at RAY_ADDRESS={cluster.address} asks for a token"
    assert f"{asks}, and got none, or another: set RAY_AUTH_MODE=token here" in last


def test_a_request_without_a_token_is_refused(cluster):
    request = f"{cluster.dashboard}/api/jobs/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=TIMEOUT_S)
    token = {"Authorization": f"Bearer {TOKEN}"}
    known = urllib.request.Request(request, headers=token)
    assert urllib.request.urlopen(known, timeout=TIMEOUT_S).status == 200
