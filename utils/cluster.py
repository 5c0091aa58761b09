"""Start Ray on this machine, or join a cluster, with the workshop's settings."""

import contextlib
import functools
import json
import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import cloudpickle
import psutil
import ray
from ray._private import parameter, ray_constants
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.services import get_ray_address_from_environment
from ray.exceptions import AuthenticationError

import utils
from utils import preflight, settings
from utils.errors import BadInput
from utils.processes import cpus as own_cpus
from utils.processes import free_port, has_home

# Ray Train's own DataConfig asks for it, and Ray would tell whoever calls that.
warnings.filterwarnings("ignore", message="`ExecutionOptions.exclude_resources` is")
Started = TypeVar("Started")
# Logical CPUs kept free of training workers, so that Ray Data's tasks have where to run.
SPARE_CPUS = 2
# Whether Ray uses this machine's address in the network, or 127.0.0.1; by its name, for
# other systems than Linux, where 127.0.0.1 is the default.
ON_NETWORK = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
# Where the state API and the jobs API are, for this process and those that it starts.
API_SERVER = "RAY_API_SERVER_ADDRESS"
# What `ray.init` says of a Ray that did not come up, and what we say if it comes twice.
TOO_SLOW = (
    "its processes were not up in time, so this machine is too slow or too busy just now. "
    "End what else runs on it (`top` shows it), and start this once more."
)
PORT_TAKEN = "another program took the port of its dashboard. Start this once more."
GAVE_UP = {
    "The current node timed out during startup": TOO_SLOW,
    "Timed out waiting for file": TOO_SLOW,  # with the port of its controller
    "Failed to find a valid port for dashboard": PORT_TAKEN,
    "already occupied": PORT_TAKEN,
}
# What Ray reads when it starts; `processes` sets what it reads when it is imported.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # How often the controller polls its workers; at the default of 2 s every report and
    # the end of a fit wait for the next poll. Measured: 4 s less per fit on 2 cores.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Ray Train would log every print of a worker a second time.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}

if utils.RAY_CAME_FIRST:
    warnings.warn(
        "Ray was imported before utils, so it runs without the workshop's settings: "
        "start again, and import utils.cluster first.",
        stacklevel=2,
    )


def start_ray(
    num_workers: int | None = None,
    resources_per_worker: dict[str, float] | None = None,
    address: str | None = None,
    **ray_init_options,
) -> None:
    """Start Ray on this machine, or join the cluster that RAY_ADDRESS names.

    A Ray started here gets logical CPUs for `num_workers` workers and two more, which
    may exceed the real ones: a CPU is a ticket in Ray's scheduling, not a core. It
    listens on 127.0.0.1 alone. A cluster that was there before gets `utils`
    sent to all its nodes, so that workers can import it. Workers' prints do not reach
    the notebook: functions return values instead. Prints one line about what there is.

    Args:
        num_workers: training workers to make room for (default: `settings.num_workers`).
        resources_per_worker: what each asks for (default: `preflight.default_resources()`).
        address: "local" starts a Ray of its own on this machine, also where there is a
            cluster to join (default: RAY_ADDRESS).
        ray_init_options: further arguments of `ray.init`. Some of them, as `resources`
            and `object_store_memory`, are for a Ray that is started here.

    Raises:
        BadInput: RAY_ADDRESS names a cluster that does not answer, or that asks for a
            token which is not here; the workers do not fit (see `preflight.check_fits`);
            or Ray did not come up on this machine, twice.
        ValueError: Ray refuses one of `ray_init_options`.
    """
    num_workers = num_workers or settings.num_workers()
    if not ray.is_initialized():
        cpus = num_workers * (resources_per_worker or {"CPU": 1}).get("CPU", 0)
        dashboard = _connect(int(cpus) + SPARE_CPUS, address, ray_init_options)
        total = ray.cluster_resources()
        print(
            f"Ray {ray.__version__} with {len(preflight.alive_nodes())} node(s), "
            f"{total.get('CPU', 0):g} logical CPUs, {total.get('GPU', 0):g} GPUs. "
            f"Dashboard: {dashboard}"
        )
    resources_per_worker = resources_per_worker or preflight.default_resources()
    preflight.check_fits(num_workers, resources_per_worker)


def cluster_to_join() -> str | None:
    """Return the address of the cluster that `start_ray` joins; None: it starts one."""
    address = os.environ.get("RAY_ADDRESS")
    address = address or ("auto" if preflight.is_autoscaling() else "local")
    return None if address == "local" else address


def _python() -> dict[str, str]:
    """Return a runtime environment for a Python whose path has a space: Ray quotes none."""
    quoted = shlex.quote(sys.executable)
    return {"py_executable": quoted} if quoted != sys.executable else {}


def _for_other_nodes() -> dict:
    """Return what other nodes lack: this folder, and what says how and where to run.

    Here `utils` is installed, and sending it would make Ray prepare an environment:
    measured, 5 s of the first fit.
    """
    ours = ("WORKSHOP_MODE", "WORKSHOP_STORAGE")
    found = {
        "py_modules": [str(Path(utils.__file__).parent)],
        "env_vars": {name: os.environ[name] for name in ours if name in os.environ},
    }
    if job := os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR):  # submitted to the cluster
        sent = json.loads(job).get("runtime_env") or {}
        found["py_modules"] = [*sent.get("py_modules", []), *found["py_modules"]]
        # Ray refuses a driver that names what its job has named, equal or not
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    return found


def another_driver(function: Callable, *args) -> subprocess.Popen:
    """Call `function(*args)` in a process of its own, which joins this process's Ray.

    What it prints and returns is lost. It ends with the function, or when it is killed.
    """
    program = (
        "import pickle, sys, ray; "
        "runtime_env, function, args = pickle.load(sys.stdin.buffer); "
        "ray.init(runtime_env=runtime_env); function(*args)"
    )
    address = ray.get_runtime_context().gcs_address
    alone = {ON_NETWORK: "0"} if address.startswith("127.") else {}
    driver = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | alone | {"RAY_ADDRESS": address},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert driver.stdin
    with driver.stdin as pipe:
        pipe.write(cloudpickle.dumps((_python(), function, args)))
    return driver


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let what Ray starts here listen on 127.0.0.1 alone, and be joined, while inside.

    Ray's default on Windows and macOS; elsewhere it listens on all addresses. Processes
    that Ray starts inherit the variable. This one has read it before, into a constant.
    """
    constant, variable = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ON_NETWORK)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ON_NETWORK] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        _set(ON_NETWORK, variable)  # `ray start` refuses to run with it


@contextlib.contextmanager
def _any_agent_port() -> Iterator[None]:
    """Let a Ray that starts here take any free port for its agent, while inside.

    Else it wants port 52365, and where another Ray has that, goes on without the server:
    then no log can be read. `ray.init` has no argument for it.
    """
    before = parameter.RayParams
    parameter.RayParams = functools.partial(before, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = before


@contextlib.contextmanager
def api_server(address: str | None) -> Iterator[None]:
    """Let what Ray starts ask the API server at host:port (None: as before), while inside.

    Else ray.util.state, also in Ray's own processes, asks whatever Ray was last noted on
    this machine: if that one is gone, the end of each fit waits 12 s for it.
    """
    before = os.environ.get(API_SERVER)
    if address:
        os.environ[API_SERVER] = f"http://{address}"
    try:
        yield
    finally:
        _set(API_SERVER, before)


def _set(variable: str, value: str | None) -> None:
    if value:
        os.environ[variable] = value
    else:
        os.environ.pop(variable, None)


def _connect(num_cpus: int, address: str | None, options: dict) -> str:
    """Start Ray with so many CPUs or more, or join one; return its dashboard's address."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = address or cluster_to_join() or "local"
    starts = address == "local"
    # A process per fit that waits for the notice that a cloud takes a node away. Nobody
    # takes this machine away; measured without it: 2.0 s less per fit on 2 cores.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = str(int(not starts))
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    runtime_env = {} if starts else _for_other_nodes()
    options = {"address": address, "runtime_env": runtime_env} | quiet | options
    options["runtime_env"] = _python() | options["runtime_env"]
    if starts:
        cpus = max(own_cpus(), num_cpus)
        # the dashboard runs code for whoever opens it
        dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1"}
        preflight.check_open_files()
        if not has_home():  # where Ray would write the token of this cluster
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        options = {"num_cpus": cpus} | dashboard | options
        with on_loopback():
            context = twice(lambda port: _start(options, port))
    else:
        context = _join(address, options)
    preflight.own_ray = starts
    _set(API_SERVER, context.dashboard_url and f"http://{context.dashboard_url}")
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # else a plan per execution
    return f"http://{context.dashboard_url}" if context.dashboard_url else "off"


def _join(address: str, options: dict):
    """Join a cluster; return what `ray.init` does.

    Raises:
        BadInput: it does not answer, or it asks for a token.
    """
    try:
        if ":" in address and "//" not in address:  # Ray itself tries for two minutes
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, port), timeout=10).close()
        with on_loopback() if _is_on_loopback(address) else contextlib.nullcontext():
            return ray.init(**options)  # its processes say where its API server is
    except (AuthenticationError, OSError, ValueError) as error:
        refused = isinstance(error, AuthenticationError)
        if refused or "InvalidAuthToken" in str(error.__cause__):
            raise BadInput(
                f"The Ray cluster at RAY_ADDRESS={address} asks for a token, and got none, "
                "or another: set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN to what "
                "`ray get-auth-token` prints on its head."
            ) from error
        if isinstance(error, ValueError) and "address" not in str(error):
            raise  # about another option
        raise BadInput(
            f"No Ray cluster answers at RAY_ADDRESS={address}: start it, correct the "
            "address, or unset RAY_ADDRESS to start Ray on this machine."
        ) from error


def _is_on_loopback(address: str) -> bool:
    """Return whether a Ray listens at 127.0.0.1 and at no other address."""
    if address == "auto":
        address = get_ray_address_from_environment("auto", None) or ""
    host, _, port = address.partition(":")
    if not host.startswith("127.") and host != "localhost":
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), port), 1).close()
    except OSError:
        return True
    return False


def twice(start: Callable[[int], Started]) -> Started:
    """Call `start(port)`, which starts Ray on this machine; once more if Ray gave up.

    Its dashboard should get that port or the next free one; 0: any.

    A raylet waits 15 s for its agent, and no setting makes that more: where the machine is
    slow or busy, Ray gives up. Source: https://github.com/ray-project/ray/issues/65983
    And where several start at once, as on a machine that people share, all but one find
    the port of their dashboard taken, which was free a moment ago. So it is any port then.

    Raises:
        BadInput: Ray gave up twice; says why at last.
    """
    for port in (8265, 0):  # first Ray's own
        before = psutil.Process().children()
        try:
            with _any_agent_port():
                return start(port)
        except Exception as error:  # Ray raises no kind of its own
            why = next((why for said, why in GAVE_UP.items() if said in str(error)), "")
            if not why:
                raise
            _end(set(psutil.Process().children()) - set(before))  # Ray leaves them
            last, cause = why, error
    raise BadInput(f"Ray did not start, nor at a second try: {last}") from cause


def _start(options: dict, port: int):
    """Start Ray on this machine; return what `ray.init` does."""
    port = options.get("dashboard_port") or free_port(port)
    try:
        with api_server(f"127.0.0.1:{port}"):  # what Ray's processes inherit
            return ray.init(**options | {"dashboard_port": port})
    except Exception:
        ray.shutdown()  # else it would be half connected
        raise


def _end(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and all that they have started, and wait until they are gone."""
    found = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(process.children(recursive=True))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=30)
