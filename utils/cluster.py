"""Start or join Ray quietly, check that a run fits, and find what a failed one says."""

import contextlib
import logging
import os
import shlex
import socket
import sys
import warnings
from pathlib import Path

# Read by Ray when it is imported, hence above the import.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # Ray would restart its workers through `uv run`, in an environment without packages.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # How often the controller polls its workers; at the default of 2 s every report and
    # the end of a fit wait for the next poll. Measured: 4 s less per fit on 2 cores.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # The new Parquet reader starts actors that read footers, again in every epoch, and puts
    # all files into one task. First batch of five files here: 16 s, and 3 s without it.
    "RAY_DATA_USE_DATASOURCE_V2": "0",
    # Ray Train would log every print of a worker a second time.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Raylets' notes, full of pids and addresses, reach a driver also where
    # log_to_driver=False. About what died, whoever waits for it gets an exception; that
    # many processes "have been started" on a slow machine is nothing to mend. Two notes of
    # Ray Train's workers repeat every report, and hide what a script prints between them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "worker died or was killed|retries remaining|Raylet is terminated"
        "|has been marked dead|cannot be scheduled right now"
        "|worker processes have been started"
        "|Reporting training result|Checkpoint successfully created"
    ),
}
if "ray" in sys.modules and not _ENVIRONMENT.keys() <= os.environ.keys():
    warnings.warn(
        "Ray was imported before utils.cluster, so it runs without the workshop's "
        "settings: start again, and import utils.cluster first.",
        stacklevel=2,
    )
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Where ipywidgets is not installed, Ray would print a hint, and tqdm a warning.
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="IProgress not found")

import ray  # noqa: E402

from utils import settings  # noqa: E402

# Logical CPUs kept free of training workers, so that Ray Data's tasks have where to run.
SPARE_CPUS = 2

_own_ray = False  # whether Ray was started here: it gets no more nodes by itself


def start_ray(
    num_workers: int | None = None,
    resources_per_worker: dict[str, float] | None = None,
    address: str | None = None,
    **ray_init_options,
) -> None:
    """Start Ray on this machine, or join the cluster that RAY_ADDRESS names.

    A Ray started here gets logical CPUs for `num_workers` workers and two more, which
    may exceed the real ones: a CPU is a ticket in Ray's scheduling, not a core. Its
    dashboard listens on 127.0.0.1 alone. A cluster that was there before gets `utils`
    sent to all its nodes, so that workers can import it. Workers' prints do not reach
    the notebook: functions return values instead. Prints one line about what there is.

    Args:
        num_workers: training workers to make room for (default: `settings.num_workers`).
        resources_per_worker: what each asks for (default: `default_resources()`).
        address: "local" starts a Ray of its own on this machine, also where there is a
            cluster to join (default: RAY_ADDRESS).
        ray_init_options: further arguments of `ray.init`. Some of them, as `resources`
            and `object_store_memory`, are for a Ray that is started here.

    Raises:
        ConnectionError: RAY_ADDRESS names a cluster that does not answer.
        ValueError: Ray refuses one of `ray_init_options`.
        RuntimeError: the workers do not fit (see `check_fits`).
    """
    num_workers = num_workers or settings.num_workers()
    if not ray.is_initialized():
        cpus = num_workers * (resources_per_worker or {"CPU": 1}).get("CPU", 0)
        dashboard = _connect(int(cpus) + SPARE_CPUS, address, ray_init_options)
        total = ray.cluster_resources()
        print(
            f"Ray {ray.__version__} with {len(_alive_nodes())} node(s), "
            f"{total.get('CPU', 0):g} logical CPUs, {total.get('GPU', 0):g} GPUs. "
            f"Dashboard: {dashboard}"
        )
    check_fits(num_workers, resources_per_worker or default_resources())


def check_fits(num_workers: int, resources_per_worker: dict[str, float]) -> None:
    """Check that the nodes of the cluster have room for the workers of a run.

    Ray waits for ever for resources that no node has, because a node may join later.
    This looks at every node, as one worker has to fit one node. On a cluster that adds
    nodes when they are asked for (WORKSHOP_AUTOSCALING=1, and Anyscale) it checks nothing.

    Raises:
        RuntimeError: they do not fit; says what was asked, what there is, what to change.
    """
    if grows():
        return
    needed = {name: n for name, n in resources_per_worker.items() if n > 0}
    nodes = [node["Resources"] for node in _alive_nodes()]
    room = sum(
        min(
            (int(node.get(name, 0) / n) for name, n in needed.items()),
            default=num_workers,
        )
        for node in nodes
    )
    if room < num_workers:
        there = "; ".join(
            ", ".join(f"{node.get(name, 0):g} {name}" for name in needed)
            for node in nodes
        )
        asked = ", ".join(f"{n:g} {name}" for name, n in needed.items())
        raise RuntimeError(
            f"This run asks for {num_workers} workers with {asked} each, and the cluster "
            f"has room for {room} (its {len(nodes)} node(s) have {there}): lower the "
            "number of workers or what each asks for, or add nodes."
        )


def check_spare_cpus(num_workers: int) -> None:
    """Check that a CPU is left for Ray Data when every worker has what it asks for.

    On a cluster that adds nodes when they are asked for, nothing is checked.

    Raises:
        RuntimeError: none is left; reading and decoding would wait for ever.
    """
    if grows():
        return
    cpus = ray.cluster_resources().get("CPU", 0)
    taken = num_workers * default_resources().get("CPU", 0)  # none where they take GPUs
    if cpus < taken + 1:
        raise RuntimeError(
            f"The cluster has {cpus:g} CPUs and its {num_workers} workers take {taken}, so "
            "none is left to read and decode the data: lower --num-workers, or start Ray "
            f"with at least {taken + 1} CPUs."
        )


def what_to_mend(failure: Exception) -> Exception | None:
    """The error of a worker that says in a sentence what is wrong, if one failed so.

    Args:
        failure: what `TorchTrainer.fit` raised, a `ray.train.TrainingFailedError`.
    """
    errors = what_failed(failure)
    return next((e for e in errors if isinstance(e, (ValueError, OSError))), None)


def what_failed(failure: Exception) -> list[Exception]:
    """The errors of workers behind a `ray.train.TrainingFailedError`."""
    errors = getattr(failure, "worker_failures", {}).values()
    # what a callback made of them, as `preflight.NoRestartOnBadInput` does
    return [*errors, *filter(None, [getattr(failure, "controller_failure", None)])]


def _connect(num_cpus: int, address: str | None, options: dict) -> str:
    """Start Ray with so many CPUs or more, or join one; the address of its dashboard."""
    global _own_ray
    address = address or os.environ.get("RAY_ADDRESS")
    address = address or ("auto" if _is_autoscaling() else "local")
    runtime_env = {}
    if (quoted := shlex.quote(sys.executable)) != sys.executable:
        # Ray puts this path into a shell command as it is: a space in it needs quotes
        runtime_env["py_executable"] = quoted
    if address != "local":
        # Other nodes do not have this folder. Here `utils` is installed, and sending it
        # would make Ray prepare an environment: measured, 5 s of the first fit.
        runtime_env["py_modules"] = [str(Path(__file__).parent)]
        ours = ("WORKSHOP_MODE", "WORKSHOP_STORAGE")
        runtime_env["env_vars"] = {n: os.environ[n] for n in ours if n in os.environ}
    defaults = {
        "address": address,
        "runtime_env": runtime_env,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if address == "local":
        defaults["num_cpus"] = max(os.cpu_count(), num_cpus)
        defaults["dashboard_host"] = "127.0.0.1"  # it runs code for whoever opens it
        defaults["include_dashboard"] = True
        defaults["dashboard_port"] = _free_port()
    options = defaults | options
    if address == "local":
        # For this process and those of Ray. Else ray.util.state asks whatever Ray was last
        # noted on this machine: if that one is gone, the end of each fit waits 12 s for it.
        os.environ["RAY_API_SERVER_ADDRESS"] = (
            f"http://127.0.0.1:{options['dashboard_port']}"
        )
    else:
        os.environ.pop("RAY_API_SERVER_ADDRESS", None)
    # A process per fit that waits for the notice that a cloud takes a node away. Nobody
    # takes this machine away; measured without it: 2.0 s less per fit on 2 cores.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = str(int(address != "local"))
    try:
        if ":" in address and "//" not in address:  # Ray itself tries for two minutes
            socket.create_connection(address.rsplit(":", 1), timeout=10).close()
        context = ray.init(**options)
    except (OSError, ValueError) as error:  # Ray's ConnectionError is an OSError
        about_address = isinstance(error, OSError) or "address" in str(error)
        if address == "local" or not about_address:
            raise
        raise ConnectionError(
            f"No Ray cluster answers at RAY_ADDRESS={address}: start it, correct the "
            "address, or unset RAY_ADDRESS to start Ray on this machine."
        ) from None
    _own_ray = address == "local"
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # else a plan per execution
    return f"http://{context.dashboard_url}" if context.dashboard_url else "off"


def _free_port(first: int = 8265) -> int:
    """The first port from `first` on that nobody listens on; 8265 is Ray's dashboard."""
    for port in range(first, first + 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"All ports from {first} to {first + 999} are in use: free one.")


def use_gpu() -> bool:
    """Whether workers get GPUs: in full mode, where the cluster has any or adds nodes.

    To be called after `start_ray`: it is not this machine that counts, as the head of a
    cluster may have none. There, set WORKSHOP_MODE=full, as "auto" looks at this machine.
    """
    if settings.mode() != "full" or not ray.is_initialized():
        return settings.device().type == "cuda"
    return grows() or ray.cluster_resources().get("GPU", 0) > 0


def default_resources() -> dict[str, float]:
    """What Ray Train's workers ask for unless told otherwise: a GPU and no CPU, or a CPU.

    To be called after `start_ray`. Source: `ray.train.ScalingConfig`.
    """
    return {"GPU": 1} if use_gpu() else {"CPU": 1}


def grows() -> bool:
    """Whether the cluster adds nodes when they are asked for."""
    return _is_autoscaling() and not _own_ray


def _is_autoscaling() -> bool:
    on_anyscale = (
        "ANYSCALE_CLUSTER_ID" in os.environ
    )  # a laptop may hold other ANYSCALE_*
    return os.environ.get("WORKSHOP_AUTOSCALING", str(int(on_anyscale))) == "1"


def _alive_nodes() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]
