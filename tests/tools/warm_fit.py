"""Seconds of a fit with two workers that trains nothing: `python -m tests.tools.warm_fit`.

What a run of tests costs is said in these too, as they differ between machines by as
much as the run does. The median of three, once the files that Ray and torch are made of
have been read.
"""

import statistics
import tempfile
import time

from utils.cluster import start_ray

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def seconds() -> float:
    """Return the seconds of one fit in the Ray that runs."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="warm_fit", storage_path=folder),
        ).fit()
    return time.perf_counter() - start


if __name__ == "__main__":
    start_ray(num_workers=2)
    print(statistics.median(seconds() for _ in range(3)))
    ray.shutdown()
