"""Ray Train beside torchrun: the same steps, the way to the first step, and reports."""

import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

from utils.cluster import start_ray

import numpy as np
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from tests import scripts
from tests.tools.benchmarks import loop, partners
from tests.tools.benchmarks.partners import torchrun
from tests.tools.benchmarks.ratios import interleave, ratio
from tests.tools.benchmarks.report import Row

WORKERS = 2


def with_ray(model):
    return prepare_model(model, parallel_strategy_kwargs=loop.VIEW)


def ray_worker(config: dict) -> float | None:
    """Serve, where the driver named a port; else return when the first step was done."""
    if config["port"]:
        loop.serve(config["port"], with_ray)
        return None
    loop.Loop(with_ray).run(1)
    return time.time()


def fit(folder: str, port: int = 0) -> float:
    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"port": port},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name=str(time.time()), storage_path=folder),
    )
    return trainer.fit().return_value


def rows() -> list[Row]:
    """Return rows 1, 2 and 3 of the table."""
    start_ray(WORKERS)
    for module in (sys.modules[__name__], loop, partners, scripts):
        # Ray's workers cannot import this folder: its code is sent along
        ray.cloudpickle.register_pickle_by_value(module)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        measured = [*steps_and_reports(folder, pool), first_step(folder)]
    ray.shutdown()
    return measured


def steps_and_reports(folder: str, pool: ThreadPoolExecutor) -> list[Row]:
    def start_fit(port: int) -> Future:
        return pool.submit(fit, folder, port)

    by_ray = partners.Partner(start_fit)
    by_torchrun = partners.Partner(lambda port: torchrun("serve", port))
    ray_losses, torchrun_losses = by_ray.ask("steps")[1], by_torchrun.ask("steps")[1]
    assert ray_losses == torchrun_losses, "not the same training"
    a, b = interleave(
        lambda: by_torchrun.ask("steps")[0], lambda: by_ray.ask("steps")[0], pairs=24
    )
    saves, reports = interleave(
        lambda: by_ray.ask("save")[0], lambda: by_ray.ask("report")
    )
    megabytes = by_ray.ask("save")[1] / 1e6
    by_torchrun.end()
    by_ray.end()
    by_torchrun.started.wait(timeout=60)
    by_ray.started.result(timeout=60)
    per_mb = [f"{1e3 * np.median(each) / megabytes:.2f}" for each in (reports, saves)]
    return [
        Row.of_ratio(
            1,
            "step time of the same loop: Ray Train over torchrun, 2 workers",
            ratio(a, b),
            at_most=1.05,
            note=f"{np.median(a) / loop.STEPS:.2f} s per step",
        ),
        Row.of_ratio(
            3,
            "one report with a checkpoint, per MB, over a plain torch.save of the same "
            "state to the same disk",
            ratio(saves, reports),
            at_most=3,
            note=f"{per_mb[0]} ms per MB and {per_mb[1]}, of {megabytes:.0f} MB; a report "
            "writes twice (a folder, and its copy in the storage), and waits for a poll",
        ),
    ]


def first_step(folder: str) -> Row:
    def by_torchrun() -> float:
        start = time.time()
        job = torchrun("first-step")
        output, _ = job.communicate(timeout=120)
        return float(output) - start

    def by_ray() -> float:
        start = time.time()
        return fit(folder) - start

    a, b = interleave(by_torchrun, by_ray, warm_up=False)  # the fit before was one
    return Row.of_ratio(
        2,
        "start to first step: a warm fit() over a torchrun launch, 2 workers",
        ratio(a, b),
        at_most=2,
        note=f"medians {np.median(a):.1f} s and {np.median(b):.1f} s",
    )
