"""Find out what a cluster has, and whether a run fits it, before the run starts."""

import contextlib
import os
import resource
import sys
import uuid
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from utils import processes, settings
from utils.errors import BadInput

# Whether `utils.cluster` started Ray on this machine: then it gets no more nodes.
own_ray = False


def check_fits(num_workers: int, resources_per_worker: dict[str, float]) -> None:
    """Check that the nodes of the cluster have room for the workers of a run.

    Ray waits for ever for resources that no node has, because a node may join later.
    This looks at every node, as one worker has to fit one node. On a cluster that adds
    nodes when they are asked for (WORKSHOP_AUTOSCALING=1, and Anyscale) it refuses nothing.
    Where the cluster as a whole has less than that free now, it says that the run will
    wait, and for what.

    Raises:
        BadInput: they do not fit; says what was asked, what there is, what to change.
    """
    needed = {name: n for name, n in resources_per_worker.items() if n > 0}
    nodes = [node["Resources"] for node in alive_nodes()]
    room = sum(
        min(
            (int(node.get(name, 0) / n) for name, n in needed.items()),
            default=num_workers,
        )
        for node in nodes
    )
    if room < num_workers and not grows():
        asked = ", ".join(f"{n:g} {name}" for name, n in needed.items())
        there = "; ".join(
            ", ".join(f"{node.get(name, 0):g} {name}" for name in needed)
            for node in nodes
        )
        raise BadInput(
            f"This run asks for {num_workers} workers with {asked} each, and the cluster "
            f"has room for {room} (its {len(nodes)} node(s) have {there}): lower the "
            "number of workers or what each asks for, or add nodes."
        )
    _say_if_waiting({name: n * num_workers for name, n in needed.items()})


def check_spare_cpus(num_workers: int, smoke_test: bool = False) -> None:
    """Check that a CPU is left for Ray Data when every worker has what it asks for.

    On a cluster that adds nodes when they are asked for, nothing is checked.

    Raises:
        BadInput: none is left; reading and decoding would wait for ever.
    """
    if grows():
        return
    cpus = ray.cluster_resources().get("CPU", 0)
    # none where they take GPUs
    taken = num_workers * default_resources(smoke_test).get("CPU", 0)
    if cpus < taken + 1:
        raise BadInput(
            f"The cluster has {cpus:g} CPUs and its {num_workers} workers take {taken}, so "
            "none is left to read and decode the data: lower --num-workers, or start Ray "
            f"with at least {taken + 1} CPUs."
        )
    _say_if_waiting({"CPU": taken + 1})


def _say_if_waiting(needed: dict[str, float]) -> None:
    """Say that a run will wait for what is not free now, if it will, and for what."""
    there, free = ray.cluster_resources(), ray.available_resources()
    for name, n in needed.items():
        if free.get(name, 0) < n:
            grown = " or the cluster has grown" if grows() else ""
            print(
                f"Of the cluster's {there.get(name, 0):g} {name}, {free.get(name, 0):g} "
                f"are free: this run waits until other jobs have ended{grown}, and {n:g} "
                "are. `ray status` shows who has them."
            )
            # else Ray Train writes a traceback for every minute that its workers wait
            os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "3600")


def check_open_files() -> None:
    """Check the hard limit of open files; Ray raises the soft one by itself.

    Raises:
        BadInput: it may not open enough.
    """
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < processes.FEWEST_FILES:
        raise BadInput(
            f"Ray needs {processes.FEWEST_FILES} open files, and a process may open {hard} "
            "here: ask an administrator to raise the hard limit (`ulimit -Hn` shows it)."
        )


def check_shared(*folders: str | Path) -> None:
    """Check that every node of the cluster sees what this process sees in `folders`.

    One may be a file, too. Nothing is checked where there is one node, or of what is not
    there or an address (s3://, gs://).

    Raises:
        BadInput: a node does not see a file that is there, written now if that is possible.
    """
    nodes = alive_nodes()
    for name in map(str, folders if len(nodes) > 1 else ()):
        name = name.removeprefix("file://")
        if (
            "://" not in name
            and (folder := Path(name).expanduser().absolute()).exists()
        ):
            _check_seen(folder, nodes)  # what is not there, its reader says


def _check_seen(folder: Path, nodes: list[dict]) -> None:
    there = marker = folder / f".shared-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError:  # data that may only be read: any file of it
        there = next(folder.iterdir(), folder) if folder.is_dir() else folder
    look = ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
    on_node = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in nodes]
    try:
        seen = ray.get(
            [look.options(scheduling_strategy=n).remote(str(there)) for n in on_node]
        )
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()
    blind = [n["NodeManagerAddress"] for n, sees in zip(nodes, seen) if not sees]
    if blind:
        raise BadInput(
            f"{folder} is not shared: node(s) {', '.join(blind)} do not see "
            f"{there.name} in it. Name a folder that all nodes mount."
        )


def use_gpu(smoke_test: bool = False) -> bool:
    """Return whether workers get GPUs: in full mode, if the cluster has any or adds nodes.

    Call it after `start_ray`: the cluster counts, not this machine, which may be a head
    without GPUs. On such a head set WORKSHOP_MODE=full, as "auto" looks at this machine.
    """
    if settings.mode(smoke_test) != "full" or not ray.is_initialized():
        return settings.device(smoke_test).type == "cuda"
    return grows() or ray.cluster_resources().get("GPU", 0) > 0


def default_resources(smoke_test: bool = False) -> dict[str, float]:
    """Return what a Ray Train worker asks for by default: a GPU and no CPU, or a CPU.

    Call it after `start_ray`. Source: `ray.train.ScalingConfig`.
    """
    return {"GPU": 1} if use_gpu(smoke_test) else {"CPU": 1}


def grows() -> bool:
    """Return whether the cluster adds nodes when they are asked for."""
    return is_autoscaling() and not own_ray


def is_autoscaling() -> bool:
    """Return whether WORKSHOP_AUTOSCALING=1 or, if it is not set, this is Anyscale."""
    # a laptop may hold other ANYSCALE_*
    on_anyscale = "ANYSCALE_CLUSTER_ID" in os.environ
    return os.environ.get("WORKSHOP_AUTOSCALING", str(int(on_anyscale))) == "1"


def alive_nodes() -> list[dict]:
    """Return the nodes of the cluster that are up, as `ray.nodes` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]
