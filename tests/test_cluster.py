"""utils.cluster: Ray starts quietly, carries utils along, and joins what is there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.network import nobody_listens
from tests.patience import PATIENCE

pytestmark = [pytest.mark.part02, pytest.mark.xdist_group("ray")]

PROGRAM = """
import json, os
from utils.cluster import start_ray
from utils.errors import BadInput
from utils.preflight import check_fits
import ray
from ray.cluster_utils import Cluster
if os.environ["RAY_ADDRESS"] != "local":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 5})
    os.environ["RAY_ADDRESS"] = cluster.address
start_ray(num_workers=3)

@ray.remote
def elsewhere(installed):
    import sys
    os.chdir("/")
    if not installed:
        forget()
    import utils.models
    return utils.models.__file__

def forget():
    import sys
    sys.path = [p for p in sys.path if p not in ("", os.environ["REPOSITORY"])]
    sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
    for name in [n for n in sys.modules if n.split(".")[0] == "utils"]:
        del sys.modules[name]

names = "WORKSHOP_MODE", "WORKSHOP_STORAGE"
sent = ray.get(ray.remote(lambda: [os.environ.get(n) for n in names]).remote())
found = ray.get(elsewhere.remote(os.environ["RAY_ADDRESS"] == "local"))
asks = ray.get(ray.remote(lambda: os.environ.get("RAY_API_SERVER_ADDRESS")).remote())
try:
    check_fits(2, {"CPU": 1, "GPU": 1})
    problem = ""
except BadInput as error:
    problem = str(error)
print(json.dumps({
    "cpus": ray.cluster_resources()["CPU"], "found": found, "problem": problem,
    "asks": asks, "sent": sent,
    "watcher": os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"),
}))
ray.shutdown()
if os.environ["RAY_ADDRESS"] != "local":
    cluster.shutdown()  # which also removes Ray's note of it on this machine
"""


def run(program: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env=os.environ | {"REPOSITORY": str(scripts.ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def started() -> tuple[str, dict]:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    return first, json.loads(last)


def test_one_line_says_where_the_dashboard_is(started):
    """tests/test_security.py looks at where it listens, which Ray does not say."""
    assert "Dashboard: http://127.0.0.1:" in started[0]


def test_workers_ask_their_own_ray_for_its_state(started):
    """And not the one that was last noted on this machine, for which they would wait."""
    assert started[0].endswith(f"Dashboard: {started[1]['asks']}")


def test_nothing_watches_for_a_cloud_that_takes_this_machine_away(started):
    """One process less per fit. An upgrade that renames the variable would start it."""
    from ray.train.v2._internal import constants

    assert started[1]["watcher"] == "0"
    name = constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR  # as Ray Train reads it
    assert name == "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


def test_cpus_for_all_workers_and_two_more(started):
    assert started[1]["cpus"] == max(os.cpu_count(), 3 + 2)


def test_utils_reach_a_worker_in_another_folder(started):
    assert started[1]["found"] == str(scripts.ROOT / "utils" / "models.py")


@pytest.mark.weekly  # tests/test_nodes.py does it with real nodes
def test_utils_reach_a_node_that_does_not_have_them():
    ours = {"WORKSHOP_MODE": "smoke", "WORKSHOP_STORAGE": "/shared"}
    done = run(PROGRAM, RAY_ADDRESS="of a cluster", **ours)
    assert done.returncode == 0, done.stderr
    joined = json.loads(done.stdout.splitlines()[-1])
    assert joined["found"].endswith("utils/models.py")
    assert not joined["found"].startswith(str(scripts.ROOT))
    assert joined["watcher"] == "1"  # a cloud may take a node away
    assert joined["sent"] == ["smoke", "/shared"]  # to nodes of another environment


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("raylet/raylet", b"worker died or was killed"),
        ("raylet/raylet", b"cannot be scheduled right now"),
        ("raylet/raylet", b"worker processes have been started"),
        ("gcs/gcs_server", b"has been marked dead"),
    ],
)
def test_notes_of_ray_that_no_notebook_may_show(program, note):
    """Guards against an upgrade: with new words they would be shown again.

    They come late, or only on a slow machine, so no other test is sure to see that.
    """
    from utils.processes import RAY_AT_IMPORT

    assert note.decode() in RAY_AT_IMPORT["RAY_DEDUP_LOGS_SKIP_REGEX"]
    core = Path(importlib.util.find_spec("ray").origin).parent / "core/src/ray"
    assert note in (core / program).read_bytes()


@pytest.mark.parametrize(
    ("file", "note"),
    [
        (
            "v2/_internal/execution/scaling_policy/scaling_policy.py",
            "Requesting resources: ",
        ),
        ("v2/_internal/execution/worker_group/worker_group.py", "Attempting to start"),
        (
            "v2/_internal/execution/worker_group/worker_group.py",
            "training worker group",
        ),
        ("torch/config.py", "Setting up process group for: "),
        ("v2/torch/train_loop_utils.py", "Moving model to device: "),
        ("v2/torch/train_loop_utils.py", "Wrapping provided model in "),
    ],
)
def test_notes_of_ray_train_between_the_lines_of_a_script(file, note):
    """Guards against an upgrade: on a cluster, every worker would print them again."""
    from utils.processes import RAY_AT_IMPORT

    assert note in RAY_AT_IMPORT["RAY_DEDUP_LOGS_SKIP_REGEX"]
    train = Path(importlib.util.find_spec("ray").origin).parent / "train"
    assert note in (train / file).read_text()


@pytest.mark.slow
def test_ray_imported_too_early_is_said():
    names = "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_DATA_USE_DATASOURCE_V2"
    without = f"import os; [os.environ.pop(name, None) for name in {names}]\n"
    early = run(without + "import ray\nimport utils.cluster")
    assert "import utils.cluster first" in early.stderr
    in_time = run(without + "import utils.cluster\nimport ray")
    assert (in_time.returncode, in_time.stderr) == (0, "")


def test_a_request_that_fits_no_node_is_said(started):
    problem = started[1]["problem"]
    assert "asks for 2 workers with 1 CPU, 1 GPU each" in problem  # asked
    assert "has room for 0" in problem  # there is
    assert "lower the number of workers" in problem  # to change


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
    assert there == f"1.0 {float(max(os.cpu_count(), 4))}"
    assert "has room for 0" in checked


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
    environment = os.environ | {"RAY_ADDRESS": asked} | variables
    joined = subprocess.check_output([sys.executable, "-c", program], env=environment)
    print(joined.split()[-1].decode() == address)
print(address)
"""


@pytest.mark.weekly
def test_a_ray_at_127_0_0_1_is_joined_as_the_readme_says():
    done = run(JOINS, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stderr
    _, *joined, address = done.stdout.splitlines()
    assert address.startswith("127.0.0.1:") and joined == ["True"] * 3


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


@pytest.mark.parametrize(
    ("address", "error", "calls"),
    [
        ("auto", "The current node timed out during startup. This could", 1),
        ("local", "Something else", 1),
    ],
)
def test_only_a_ray_that_is_started_here_is_started_twice(address, error, calls):
    program = f"""
from utils.cluster import start_ray
import ray
calls = []
def init(**options):
    calls.append(options)
    raise Exception({error!r})
ray.init = init
try:
    start_ray(1, address={address!r})
except Exception as error:
    print(len(calls), type(error).__name__, error)
"""
    done = run(program)
    assert done.stdout == f"{calls} Exception {error}\n", done.stderr


@pytest.mark.parametrize(
    "said",
    [
        "Failed to find a valid port for dashboard after 0 retries",
        "Failed to bind to 127.0.0.1:8265 because it's already occupied.",
    ],
)
def test_a_port_of_the_dashboard_that_was_taken_meanwhile_is_another_one_then(said):
    program = (
        f"""
said = {said!r}
"""
        + """
from types import SimpleNamespace
from utils import cluster
import ray
ports, wanted = [], []
cluster.free_port = lambda first: wanted.append(first) or 8300 + len(wanted)
def init(**options):
    ports.append(options["dashboard_port"])
    if len(ports) == 1:
        raise Exception(said)
    return SimpleNamespace(dashboard_url=f"127.0.0.1:{ports[-1]}")
ray.init = init
print(cluster._connect(1, "local", {}), ports, wanted)
"""
    )
    done = run(program)
    # the second time any port: whoever else tries again must not meet it there
    assert done.stdout == "http://127.0.0.1:8302 [8301, 8302] [8265, 0]\n", done.stderr


@pytest.mark.weekly
def test_a_cluster_in_this_machine_takes_another_port_if_one_was_taken_meanwhile():
    """Else its head goes on without dashboard, and the state API and jobs do not answer."""
    program = """
import socket, psutil
from utils import nodes, processes
taken = socket.socket()
taken.bind(("127.0.0.1", processes.free_port(8265)))
taken.listen()
free = iter([taken.getsockname()[1], processes.free_port(8265)])
nodes.free_port = lambda wanted: next(free)
there = nodes.start(1)
from utils.cluster import start_ray
start_ray(1, address=there.address, runtime_env={})
from ray.util.state import list_nodes
names = [child.name() for child in psutil.Process().children(recursive=True)]
print(next(free, "both tried"), names.count("gcs_server"), len(list_nodes()))
"""
    done = run(program, RAY_ADDRESS="local")
    assert done.stdout.splitlines()[-1:] == ["both tried 1 2"], done.stderr


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
