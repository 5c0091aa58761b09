"""utils.cluster: Ray starts quietly, carries utils along, and joins what is there."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from utils.cluster import API_SERVER

import pytest
import ray
from ray import cluster_utils

from tests import scripts
from tests.network import nobody_listens
from tests.waiting import TIMEOUT_S
from utils import cluster, nodes, preflight
from utils.errors import BadInput
from utils.processes import RAY_AT_IMPORT, cpus

pytestmark = pytest.mark.ray

PROGRAM = """
import json, os
from utils.cluster import start_ray
import ray
start_ray(num_workers=3)

@ray.remote
def elsewhere():
    os.chdir("/")
    import utils.models
    return utils.models.__file__, os.environ.get("RAY_API_SERVER_ADDRESS")

found, asks = ray.get(elsewhere.remote())
print(json.dumps({
    "cpus": ray.cluster_resources()["CPU"], "found": found, "asks": asks,
    "watcher": os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"),
}))
"""


def run(program: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def started() -> tuple[str, dict]:
    done = run(PROGRAM, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    return first, json.loads(last)


def test_workers_ask_their_own_ray_for_its_state(started):
    """And not the one that was last noted on this machine, for which they would wait.

    tests/test_security.py looks at where the dashboard listens, which Ray does not say.
    """
    assert "Dashboard: http://127.0.0.1:" in started[0]
    assert started[0].endswith(f"Dashboard: {started[1]['asks']}")


def test_nothing_watches_for_a_cloud_that_takes_this_machine_away(started):
    """One process less per fit. An upgrade that renames the variable would start it."""
    from ray.train.v2._internal import constants

    assert started[1]["watcher"] == "0"
    name = constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR  # as Ray Train reads it
    assert name == "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


def test_cpus_for_all_workers_and_two_more(started):
    assert started[1]["cpus"] == max(cpus(), 3 + 2)


def test_utils_reach_a_worker_in_another_folder(started):
    """tests/test_nodes.py sends them to other machines."""
    assert started[1]["found"] == str(scripts.ROOT / "utils" / "models.py")


TRAIN_V2 = "train/v2/_internal/execution"


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ("core/src/ray/raylet/raylet", "worker died or was killed"),
        ("core/src/ray/raylet/raylet", "cannot be scheduled right now"),
        ("core/src/ray/raylet/raylet", "worker processes have been started"),
        ("core/src/ray/gcs/gcs_server", "has been marked dead"),
        # of Ray Train: on a cluster every worker would print them between a script's lines
        (f"{TRAIN_V2}/scaling_policy/scaling_policy.py", "Requesting resources: "),
        (f"{TRAIN_V2}/worker_group/worker_group.py", "Attempting to start"),
        (f"{TRAIN_V2}/worker_group/worker_group.py", "training worker group"),
        ("train/torch/config.py", "Setting up process group for: "),
        ("train/v2/torch/train_loop_utils.py", "Moving model to device: "),
        ("train/v2/torch/train_loop_utils.py", "Wrapping provided model in "),
    ],
)
def test_ray_still_words_the_notes_that_no_notebook_may_show(file, note):
    """After an upgrade with new words they would be shown, late or on slow machines."""
    assert note in RAY_AT_IMPORT["RAY_DEDUP_LOGS_SKIP_REGEX"]
    package = Path(importlib.util.find_spec("ray").origin).parent
    assert note.encode() in (package / file).read_bytes()


@pytest.mark.slow
def test_ray_imported_too_early_is_said():
    names = "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_DATA_USE_DATASOURCE_V2"
    without = f"import os; [os.environ.pop(name, None) for name in {names}]\n"
    early = run(without + "import ray\nimport utils.cluster")
    assert "import utils.cluster first" in early.stderr
    in_time = run(without + "import utils.cluster\nimport ray")
    assert (in_time.returncode, in_time.stderr) == (0, "")


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_said():
    program = "from utils.cluster import start_ray\nstart_ray()"
    address = nobody_listens()
    done = run(program, RAY_ADDRESS=address, RAY_gcs_rpc_server_connect_timeout_s="1")
    assert done.returncode == 1
    assert f"No Ray cluster answers at RAY_ADDRESS={address}:" in done.stderr


REFUSED = """
import os
from utils.cluster import start_ray
from utils.errors import BadInput
from ray.cluster_utils import Cluster
import ray
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
os.environ |= {"RAY_ADDRESS": cluster.address, "WORKSHOP_AUTOSCALING": "1"}
try:
    start_ray(2, resources={"scanner": 1})
except ValueError as error:
    print(error)
start_ray(2, address="local", resources={"scanner": 1})
print(ray.cluster_resources()["scanner"], ray.cluster_resources()["CPU"])
try:
    start_ray(2, {"CPU": 1000})
except BadInput as error:
    print(error)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.weekly
def test_a_ray_of_its_own_where_there_is_a_cluster():
    """With options that only a Ray started here takes; it does not grow, and is checked."""
    done = run(REFUSED)
    assert done.returncode == 0, done.stderr
    refused, _, there, checked = done.stdout.splitlines()
    assert "When connecting to an existing cluster, resources must not" in refused
    assert there == f"1.0 {float(max(cpus(), 4))}"
    assert "has room for 0" in checked


def test_a_job_of_a_batch_system_or_a_container_starts_ray(tmp_path):
    """A long temporary folder, no home, and few files until one asks for more."""
    (folder := tmp_path / ("job" * 30)).mkdir()
    (tmp_path / "file").touch()
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))"
    variables = {"TMPDIR": str(folder), "HOME": str(tmp_path / "file" / "home")}
    done = run(
        f"{few}\n{PROGRAM}", RAY_ADDRESS="local", RAY_TMPDIR=str(folder), **variables
    )
    assert done.returncode == 0, done.stderr
    assert any(folder.glob("**/session_*"))  # written where the job has its room


def test_pretended_gpus_are_no_real_ones(monkeypatch):
    """Of a list with one of them, as Slurm sets it, Ray would give a node no two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        cluster_utils.Cluster, "add_node", lambda self, **_: dict(os.environ)
    )
    joining = SimpleNamespace(head_node=None)
    pretended = nodes.Cluster.add_node(joining, num_gpus=2)
    assert "CUDA_VISIBLE_DEVICES" not in pretended
    assert nodes.Cluster.add_node(joining)["CUDA_VISIBLE_DEVICES"] == "0"


def test_too_few_open_files_are_said(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 256))
    with pytest.raises(
        BadInput, match="Ray needs 512 open files, and a process may open 256"
    ):
        preflight.check_open_files()


JOINS = """
import os, subprocess, sys
from utils.cluster import ON_NETWORK, start_ray
import ray
start_ray(1, address="local")
address = ray.get_runtime_context().gcs_address
ours = "from utils.cluster import start_ray; start_ray(1)"
ways = [("auto", ours, {}), (address, ours, {})]
ways += [(address, "import ray; ray.init()", {ON_NETWORK: "0"})]
for asked, joins, variables in ways:
    program = joins + "; import ray; print(ray.get_runtime_context().gcs_address)"
    program += "; import os; mode = lambda: os.environ.get('WORKSHOP_MODE')"
    program += "; print(ray.get(ray.remote(mode).remote()))"
    environment = os.environ | {"RAY_ADDRESS": asked, "WORKSHOP_MODE": "full"} | variables
    joined = subprocess.check_output([sys.executable, "-c", program], env=environment)
    found, sent = joined.split()[-2:]
    print(found.decode() == address, sent.decode())
"""


@pytest.mark.weekly
def test_a_ray_at_127_0_0_1_is_joined_as_the_readme_says():
    """By `start_ray`, which tells its workers the run mode, and by Ray alone."""
    done = run(JOINS, RAY_ADDRESS="local", WORKSHOP_MODE="smoke")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["True full"] * 2 + ["True smoke"]


# Ray's own way to give up, of a Ray whose processes run: no raylet is ever found.
GIVES_UP = """
import os, time
from utils.cluster import start_ray
import psutil, ray
from ray._private import node, services
found, real_init, times, ports = services.get_node, ray.init, int(os.environ["TIMES"]), []
clock = time.monotonic

def init(**options):
    ports.append(options["dashboard_port"])
    if len(ports) > times:
        services.get_node, time.monotonic = found, clock
    return real_init(**options)

def never(*args, **kwargs):
    shift[0] += 40
    raise RuntimeError("not there yet")

shift = [0]
ray.init, services.get_node = init, never
time.monotonic = lambda: clock() + shift[0]
try:
    start_ray(1)
    time.monotonic = clock
    print(ray.get(ray.remote(lambda: "works").remote()))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
left = [c.name() for c in psutil.Process().children(recursive=True)]
print(len(ports), left.count("gcs_server"), left.count("raylet"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "tried", "left"),
    [(1, 2, 1), pytest.param(2, 2, 0, marks=pytest.mark.weekly)],
)
def test_a_ray_that_did_not_come_up_is_started_once_more(times, tried, left):
    done = run(GIVES_UP, TIMES=str(times), RAY_ADDRESS="local")
    assert done.returncode == 0, done.stderr
    *_, said, counted = done.stdout.splitlines()
    if times == 1:
        assert said == "works"
    else:
        assert said.startswith("BadInput: Ray did not start, nor at a second try: ")
        assert "too slow or too busy" in said and "start this once more" in said
    # tries, and processes that are left
    assert counted == f"{tried} {left} {left}"


@pytest.fixture
def init(monkeypatch):
    """Let `ray.init` fail with these messages, one after the other; return its ports."""

    def fails(*messages: str) -> list[int]:
        ports, left = [], list(messages)

        def fake(**options):
            ports.append(options.get("dashboard_port"))
            if left:
                raise Exception(left.pop(0))
            return SimpleNamespace(dashboard_url=f"127.0.0.1:{ports[-1]}")

        monkeypatch.setattr(ray, "init", fake)
        monkeypatch.setattr(cluster, "free_port", lambda first: first or 8300)
        monkeypatch.setenv(API_SERVER, "")
        return ports

    return fails


@pytest.mark.parametrize(
    "said",
    [
        "Failed to find a valid port for dashboard after 0 retries",
        "Failed to bind to 127.0.0.1:8265 because it's already occupied.",
    ],
)
def test_a_port_of_the_dashboard_that_was_taken_meanwhile_is_another_one_then(
    init, said
):
    ports = init(said)
    assert cluster._connect(1, "local", {}) == "http://127.0.0.1:8300"
    # the second time any port: whoever else tries again must not meet it there
    assert ports == [8265, 8300]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("auto", "The current node timed out during startup. This could"),
        ("local", "Something else"),
    ],
)
def test_only_a_ray_that_is_started_here_is_started_twice(init, address, message):
    ports = init(message)
    with pytest.raises(Exception, match=message):
        cluster._connect(1, address, {})
    assert len(ports) == 1


@pytest.mark.weekly
def test_logs_can_be_read_where_another_ray_has_the_port_of_the_agent():
    """Ray goes on without its agent's server then, and says so in a log alone."""
    program = """
import contextlib, socket
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
held = socket.socket()
with contextlib.suppress(OSError):  # another Ray has it
    held.bind(("127.0.0.1", DEFAULT_DASHBOARD_AGENT_LISTEN_PORT))
    held.listen()
from utils.cluster import start_ray
start_ray(1, address="local")
import ray
from ray.util.state import get_log
node = ray.get_runtime_context().get_node_id()
here = ray.get_runtime_context().gcs_address
print(bool(next(get_log(here, node_id=node, filename="raylet.out", tail=1))))
"""
    done = run(program)
    assert done.stdout.endswith("True\n"), done.stderr


def test_ray_data_starts_no_ray_of_its_own():
    program = """
import utils.cluster, ray
try:
    ray.data.range(3).count()
except Exception as error:
    print(type(error).__name__, error)
print(ray.is_initialized())
"""
    done = run(program, RAY_ADDRESS="")
    said, there = done.stdout.splitlines()[-2:]
    assert "Ray has not been started yet" in said, done.stdout + done.stderr
    assert there == "False"
