"""A cluster that somebody else has started: joined with its token, and given jobs."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from utils.cluster import twice

import psutil
import pytest

from tests import scripts
from tests.network import nobody_listens
from tests.patience import PATIENCE, wait_until
from utils import nodes
from utils.processes import free_port

pytestmark = [pytest.mark.part02, pytest.mark.slow, pytest.mark.xdist_group("ray")]

RAY = [nodes.python(), "-m", "ray.scripts.scripts"]  # what `ray` is
# Who has joined also finds the cluster's state and jobs, and so do the commands it starts.
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
listed = subprocess.check_output([*{RAY}, "list", "nodes"], text=True, timeout={PATIENCE})
print("command:", node.node_id in listed)
"""
STALE = f"http://{nobody_listens()}"  # of a Ray that is gone


def assert_finds_all(done: subprocess.CompletedProcess, there: "Head") -> None:
    assert done.returncode == 0, done.stderr
    answers, state, jobs, command = done.stdout.splitlines()[-4:]
    assert answers == "answers: 42" and state == "state: True"
    assert jobs == f"jobs: {there.dashboard}" and command == "command: True"


class Head(NamedTuple):
    """A Ray of its own on this machine, with what a user of it has in the environment."""

    address: str
    dashboard: str
    environment: dict[str, str]


@contextlib.contextmanager
def head(home: Path, mode: str):
    """Start a head with `ray start` for a user who has a token, as after any local Ray."""
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("1" * 64)
    user = scripts.environment() | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    ours = {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(home / "storage")}
    ours["RAY_AUTH_MODE"] = mode

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
        started.wait(PATIENCE)


@pytest.fixture(scope="module")
def protected(tmp_path_factory):
    """Yield a head that asks for a token."""
    with head(tmp_path_factory.mktemp("protected") / "home", "token") as there:
        yield there


@pytest.fixture  # no longer: beside it a thread fails in jobs of the other head (2.60)
def unprotected(tmp_path):
    """Yield a head that does not."""
    with head(tmp_path / "home", "disabled") as there:
        yield there


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
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    "which", ["protected", pytest.param("unprotected", marks=pytest.mark.weekly)]
)
def test_a_token_that_is_here_is_sent(which, request):
    """To an open cluster as well: who ever started a Ray of their own has one."""
    there = request.getfixturevalue(which)
    done = run([sys.executable, "-c", JOIN], there, RAY_API_SERVER_ADDRESS=STALE)
    assert_finds_all(done, there)


NOT_JOINED = """
import os
from utils.cluster import start_ray
from utils.errors import BadInput
try:
    start_ray(2)
except BadInput:
    print(os.environ.get("RAY_API_SERVER_ADDRESS"))
"""


@pytest.mark.weekly
def test_who_has_not_joined_asks_whom_they_asked_before(protected, tmp_path):
    cases = [{}, {"RAY_API_SERVER_ADDRESS": STALE}]
    python, none = [sys.executable, "-c", NOT_JOINED], {"HOME": str(tmp_path)} | SHORT
    with ThreadPoolExecutor() as threads:
        done = [
            *threads.map(lambda case: run(python, protected, **none, **case), cases)
        ]
    assert [d.stdout for d in done] == ["None\n", f"{STALE}\n"], done[1].stderr


def test_no_token_or_a_wrong_one_is_said(protected, tmp_path):
    nobody, mode = {"HOME": str(tmp_path)}, {"RAY_AUTH_MODE": "token"}
    cases = [
        ("there is none here", nobody),
        ("there is none here", nobody | mode),
        ("the one in RAY_AUTH_TOKEN is not its", {"RAY_AUTH_TOKEN": "2" * 64}),
    ]
    python = [sys.executable, "-c", JOIN]
    with ThreadPoolExecutor() as threads:
        ended = threads.map(
            lambda case: run(python, protected, **case[1], **SHORT), cases
        )
        for (what, _), done in zip(cases, ended, strict=True):
            last = done.stderr.splitlines()[-1]
            asks = (
                f"The Ray cluster at RAY_ADDRESS={protected.address} asks for a token"
            )
            assert f"{asks}, and {what}: run `ray get-auth-token` on its head" in last


@pytest.mark.weekly
def test_the_doctor_says_it_too(protected, tmp_path):
    doctor = "from utils import doctor; print(doctor.ray())"
    joined = run([sys.executable, "-c", doctor], protected)
    assert "state='ok', found='Ray 2." in joined.stdout, joined.stderr
    refused = run(
        [sys.executable, "-c", doctor], protected, HOME=str(tmp_path), **SHORT
    )
    assert "state='FAIL'" in refused.stdout, refused.stderr
    assert "asks for a token, and there is none here'" in refused.stdout
    assert "mend='Run `ray get-auth-token` on its head" in refused.stdout


def test_a_request_without_a_token_is_refused(protected):
    request = f"{protected.dashboard}/api/jobs/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=PATIENCE)
    token = {"Authorization": "Bearer " + "1" * 64}
    known = urllib.request.Request(request, headers=token)
    assert urllib.request.urlopen(known, timeout=PATIENCE).status == 200


def submit(there: Head, script: str, *arguments) -> list[str]:
    """Submit a script for one epoch; return the lines that it printed, without colours."""
    command = [*RAY, "job", "submit", f"--address={there.dashboard}", *arguments, "--"]
    command += ["python", script, "--num-workers", "2", "--epochs", "1"]
    done = run([*command, "--batch-size", "256"], there, RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stdout + done.stderr
    plain = re.sub(r"\x1b\[\d+m", "", done.stdout)
    printed = re.search(r"Running entrypoint.*?\n(.*?\n)\d{4}-", plain, re.DOTALL)
    return printed[1].splitlines()


@pytest.mark.covers(
    "ray job submit --address=http://127.0.0.1:8265 --working-dir=. "
    """--runtime-env-json='{"py_modules": ["utils"], "env_vars": """
    """{"WORKSHOP_STORAGE": "/shared"}}' -- """
    "python 02-ddp-pytorch-ray/train_ray_ddp.py --num-workers 4"
)
@pytest.mark.weekly  # tests/test_nodes.py does it on several machines
@pytest.mark.parametrize("variables", [False, True])
def test_a_script_is_submitted_as_a_job(protected, tmp_path, variables):
    """Its lines are those of a laptop, also with what the job brings along."""
    script, arguments = scripts.TRAIN_RAY_DDP, []
    if variables:
        brought = {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": str(tmp_path / "here")}
        runtime = {"env_vars": brought, "py_modules": ["utils"]}
        arguments = ["--working-dir=.", "--runtime-env-json", json.dumps(runtime)]
        script = script.relative_to(scripts.ROOT)
    lines = submit(protected, str(script), *arguments)
    assert len(lines) == 3, lines
    started, epoch, trained = lines
    assert started.startswith("Ray 2.")
    assert re.fullmatch(r"\(RayTrainWorker pid=\d+\) epoch 1: loss .*%", epoch)
    assert trained.startswith("Trained. The last checkpoint is in ")
    assert (str(tmp_path / "here") in trained) == variables
