"""Make four kinds of trouble on this machine, and draw what Prometheus saw of each.

    python 02-ddp-pytorch-ray/cluster/monitoring/produce.py

Takes three minutes; needs `prometheus`. Writes trouble.png beside this file.
"""

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LIST = "/tmp/ray/prom_metrics_service_discovery.json"  # Ray's, of a Ray as it comes
NUMBERS = {
    "state": "sum by (ray_train_run_name, ray_train_controller_state) "
    "(last_over_time(ray_train_controller_state[1d])) > 0",
    "cpu": "sum by (instance) "
    '(ray_component_cpu_percentage{Component=~"ray::RayTrainWorker.*"})',
    "full": 'sum by (instance) (ray_object_store_memory{Location="MMAP_SHM"})'
    ' / sum by (instance) (ray_resources{Name="object_store_memory"})',
    "spilled": 'sum by (instance) (ray_object_store_memory{Location="SPILLED"})',
    "nodes": "count(ray_node_cpu_count)",
}


@contextlib.contextmanager
def prometheus(port: int, addresses: str = LIST, every: str = "1s") -> Iterator[str]:
    """Run it on prometheus.yml, asking more often; yield its address on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        config = (HERE / "prometheus.yml").read_text()
        config = config.replace(LIST, addresses).replace(": 5s", f": {every}")
        Path(folder, "prometheus.yml").write_text(config)
        command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def ask(address: str, number: str, **times: float) -> list[dict]:
    """Return Prometheus' answer; with start, end and step (seconds) over time."""
    kind = "query_range" if times else "query"
    query = urllib.parse.urlencode({"query": number} | times)
    try:
        with urllib.request.urlopen(f"{address}/api/v1/{kind}?{query}") as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.URLError as error:
        if isinstance(error, urllib.error.HTTPError):
            raise
        return []  # not listening yet


def train(config):
    """Step on every worker, until the run is ended; rank 1 stalls once."""
    import torch
    import torch.distributed as dist

    start = time.time()
    while time.time() < start + config["seconds"]:
        for _ in range(20):
            torch.randn(500, 500) @ torch.randn(500, 500)
        moment = time.time() - start
        if dist.get_rank() == 1 and config["from"] < moment < config["to"]:
            time.sleep(config["to"] - moment)
        dist.all_reduce(torch.ones(1))  # all ranks


def large_rows(count: int):
    """Return a dataset with a block of 50 MiB per row; it says how much is spilled."""
    import numpy as np
    import ray

    # else Ray Data does not ask where its blocks are, and counts none of them
    ray.data.DataContext.get_current().enable_get_object_locations_for_metrics = True
    rows = ray.data.range(count, override_num_blocks=count)
    return rows.map_batches(lambda _: {"row": np.zeros((1, 50 * 2**20), np.uint8)})


def trouble() -> dict[str, float]:
    """Make all four, one after the other; return when each began, in seconds since 1970."""
    from utils.cluster import start_ray, twice  # isort: split

    import numpy as np
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from utils import nodes

    small = {"num_cpus": 2, "object_store_memory": 400 * 2**20}
    cluster = twice(lambda _: nodes.Cluster(initialize_head=True, head_node_args=small))
    trainers = [cluster.add_node(num_cpus=1, resources={"trainer": 1}) for _ in "12"]
    start_ray(2, nodes.WORKER, address=cluster.address, runtime_env={})
    trainer = TorchTrainer(
        train,
        train_loop_config={"seconds": 300, "from": 20, "to": 40},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=nodes.WORKER),
        run_config=RunConfig(
            storage_path=tempfile.mkdtemp(),
            failure_config=FailureConfig(max_failures=1),
        ),
    )

    def fit() -> None:
        with contextlib.suppress(Exception):  # it is ended in the middle
            trainer.fit()

    began = {"start": time.time()}
    threading.Thread(target=fit, daemon=True).start()
    time.sleep(60)
    began["full"] = time.time()
    kept = [ray.put(np.zeros(50 * 2**20, np.uint8)) for _ in range(6)]
    time.sleep(15)
    began["spilled"] = time.time()
    kept.append(large_rows(8).materialize())  # all of its blocks at once
    time.sleep(15)
    began["nodes"] = time.time()
    cluster.remove_node(trainers[1], allow_graceful=False)
    time.sleep(45)
    began["end"] = time.time()
    nodes.stop(cluster)
    return began


def draw(series: dict[str, list[dict]], began: dict[str, float], file: Path) -> None:
    """Draw four pictures in one, each with the moment at which its trouble began."""
    import matplotlib.pyplot as plt

    from utils.plots import COLORS

    plots = {
        "cpu": ("a worker stalls", "2: CPU of workers, % of a core", 1),
        "full": ("the object store fills up", "3: share of the store in use", 1),
        "spilled": ("what does not fit is spilled", "4: spilled, MB", 1e6),
        "nodes": ("a node is lost", "5: nodes that answer", 1),
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), layout="constrained")
    for ax, (name, (title, label, unit)) in zip(axes.flat, plots.items()):
        for number, one in enumerate(series[name]):
            times, values = zip(*one["values"])
            times = [float(moment) - began["start"] for moment in times]
            values = [float(value) / unit for value in values]
            ax.plot(times, values, color=COLORS[number % 8], linewidth=2)
        if name in began:
            ax.axvline(began[name] - began["start"], color="gray", linestyle=":")
        ax.set(title=title, xlabel="seconds", ylabel=label)
        ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=90)


def main() -> None:
    # Else every ten seconds. Not less than 5: nodes report every five whatever is set here,
    # and a number that is two intervals old is dropped.
    os.environ.update(RAY_metrics_report_interval_ms="5000")
    from utils.processes import free_port

    with prometheus(free_port(9090)) as address:
        began = trouble()
        times = {"start": began["start"], "end": began["end"], "step": 1}
        series = {
            name: ask(address, number, **times) for name, number in NUMBERS.items()
        }
    draw(series, began, HERE / "trouble.png")
    moments = sorted(
        (float(at) - began["start"], one["metric"]["ray_train_controller_state"])
        for one in series["state"]
        for at, _ in one["values"]
    )
    for state, group in itertools.groupby(moments, key=lambda moment: moment[1]):
        print(f"{state} from {next(group)[0]:.0f} s on")


if __name__ == "__main__":
    main()
