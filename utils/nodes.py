"""Run several nodes of Ray inside this machine, and add, drain and kill them.

Each has a raylet and an object store of its own. `add` and `kill` return once Ray Train
knows that the node has come or gone, so a caller need not wait for that.
"""

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from utils.cluster import ON_NETWORK, api_server, on_loopback, twice

import ray
from ray import cluster_utils

from utils.processes import free_port

# What a training worker asks for; a head has no `trainer`.
WORKER = {"CPU": 1, "trainer": 1}


class Cluster(cluster_utils.Cluster):
    """Start nodes of Ray that listen on 127.0.0.1 alone."""

    def add_node(self, *args, **kwargs):
        """Start a node; where one that joins was not up in time, try once more."""

        def add(_):
            here = mock.patch.object(sys, "executable", python())
            with on_loopback(), here, mock.patch.dict(os.environ):
                if kwargs.get("num_gpus"):  # pretended; no list of real ones has them
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                return cluster_utils.Cluster.add_node(self, *args, **kwargs)

        # a head is started again with all its nodes: `start`
        return twice(add) if self.head_node else add(None)


@functools.cache
def python() -> str:
    """Return a path of this Python without a space, which holds until this process ends.

    Ray starts some of its processes by a line for a shell, in which it does not quote the
    path (ray/_private/runtime_env/context.py of Ray 2.60): with a space in it, there is
    no node on which a job runs, and no `ray start --head`.
    """
    here = Path(sys.executable)
    if shlex.quote(sys.executable) == sys.executable:
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="workshop-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "env").symlink_to(here.parent.parent)
    return str(folder / "env" / here.parent.name / here.name)


def start(count: int, workers: int = 1, head_cpus: int = 2) -> Cluster:
    """Start a head for a driver, and `count` nodes with room for `workers` workers each.

    The head's CPUs are for whatever asks for no `trainer`. A node counts as lost after
    five missed health checks. They come every half second here, not every three.
    """
    return twice(lambda port: _start(count, workers, head_cpus, free_port(port)))


def _start(count: int, workers: int, head_cpus: int, port: int) -> Cluster:
    head: dict[str, Any] = {"num_cpus": head_cpus, "dashboard_port": port}
    head["_system_config"] = {"health_check_period_ms": 500}
    # Else a head whose dashboard did not start would go on without it: no state, no jobs.
    head["include_dashboard"] = True
    with api_server(f"127.0.0.1:{port}"):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(count):
            cluster.add_node(num_cpus=workers, resources={"trainer": workers})
    return cluster


def dashboard(cluster: Cluster) -> str:
    """Return the address of the dashboard, and of the jobs API: http://127.0.0.1:..."""
    return f"http://{cluster.head_node.webui_url}"


def add(cluster: Cluster):
    """Start one more node for a worker; returns it. Call it on the main thread."""
    node = cluster.add_node(num_cpus=1, resources={"trainer": 1})
    _tell_ray_train(len(cluster.list_all_nodes()))
    return node


def kill(cluster: Cluster, node) -> None:
    """Kill all processes of a node (SIGKILL), as when its machine loses power."""
    cluster.remove_node(node, allow_graceful=False)
    _tell_ray_train(len(cluster.list_all_nodes()))


def drain(cluster: Cluster, node, seconds: int) -> None:
    """Tell Ray that a node will be taken away in `seconds`; returns at once.

    Raises:
        subprocess.CalledProcessError: Ray refuses.
    """
    notice = ["ray", "drain-node", "--address", cluster.address]
    notice += ["--node-id", node.node_id, "--deadline-remaining-seconds", str(seconds)]
    notice += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run(
        notice,
        env=os.environ | {ON_NETWORK: "0"},
        check=True,
        capture_output=True,
        timeout=60,
    )


def wait_until_gone(cluster: Cluster, node) -> None:
    """Wait until a node that was drained is gone, and end what it leaves behind."""
    _wait(lambda: node.node_id not in _alive(), "the node is still there")
    kill(cluster, node)


def machine(
    address: str = "", cpus: int = 1, env: dict[str, str] | None = None
) -> tuple[subprocess.Popen, str]:
    """Start a node in a process of its own, which knows only what is in `env`.

    Without an address it is a head. Returns the process and the cluster's address. The
    node ends when the process's stdin is closed (`communicate` does that), and so if this
    process dies.

    Raises:
        RuntimeError: the node could not start; the last line of its error.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python(), "-m", "utils.nodes", str(cpus), address],
            # a node that is refused tries once more, not for twenty seconds
            env=(env or {}) | ({"RAY_NUM_REDIS_GET_RETRIES": "2"} if address else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        too_late = threading.Timer(600, process.kill)  # Ray itself gives up before
        too_late.start()
        assert process.stdout
        found = process.stdout.readline().strip()  # empty if it has ended
        too_late.cancel()
        if not found:
            process.communicate(timeout=30)
            errors.seek(0)
            raise RuntimeError((errors.read().strip() or "killed").splitlines()[-1])
    return process, found


def _join(address: str, cpus: int) -> Cluster:
    """Add a node to a cluster that another process has started; returns that cluster."""
    cluster = Cluster()
    cluster.head_node, cluster.redis_address = (
        SimpleNamespace(gcs_address=address),
        address,
    )
    cluster.add_node(wait=False, num_cpus=cpus)
    cluster.head_node = None  # not ours to end
    return cluster


def stop(cluster: Cluster) -> None:
    """Leave the cluster and end all its nodes."""
    ray.shutdown()
    cluster.shutdown()


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _tell_ray_train(expected: int) -> None:
    """Wait until Ray has `expected` nodes, and renew Ray Train's own list of them.

    Ray Train renews it every 20 seconds, which no setting changes (TICK_INTERVAL_S in
    ray/data/_internal/cluster_autoscaler/default_autoscaling_coordinator.py of Ray 2.60).
    """
    _wait(lambda: len(_alive()) == expected, f"not {expected} nodes")
    its_list = ray.get_actor("AutoscalingCoordinator", "AutoscalingCoordinator")
    ray.get(its_list.get_reserved_resources.remote("", recompute=True))


def _wait(until, problem: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(f"After {seconds} s {problem}: {ray.nodes()}")
        time.sleep(0.1)


if __name__ == "__main__":  # of `machine`
    own_cpus, joins = int(sys.argv[1]), sys.argv[2]
    own = _join(joins, own_cpus) if joins else start(0, head_cpus=own_cpus)
    print(joins or own.address, flush=True)
    sys.stdin.read()
    own.shutdown()
