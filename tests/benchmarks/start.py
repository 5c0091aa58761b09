"""Ray Train beside torchrun: the same steps, the way to the first step, and reports."""

import gc
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

from utils.cluster import start_ray

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import scripts
from tests.benchmarks import partners
from tests.benchmarks.ratios import interleave, interval, ratio
from tests.benchmarks.rows import Row
from utils.datasets import digits
from utils.models import resnet18

WORKERS, BATCH, STEPS = 2, 32, 4  # per worker; steps per measurement
STEPS_PER_EPOCH = 1437 // (WORKERS * BATCH)
VIEW = {"gradient_as_bucket_view": True}


class Loop:
    """The step of train_ddp.py, on a share of the digits that stays the same."""

    def __init__(self, wrap) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.plain = resnet18()
        self.model = wrap(self.plain)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        images, labels = digits().tensors
        mine = slice(dist.get_rank() * BATCH, (dist.get_rank() + 1) * BATCH)
        self.batch = images[mine], labels[mine]
        self.step = scripts.load(scripts.TRAIN_DDP).train_step

    def run(self, steps: int) -> tuple[float, list[float]]:
        """Seconds for the steps, and the losses of this rank."""
        dist.barrier()
        start = time.perf_counter()
        losses = [
            self.step(self.model, self.optimizer, *self.batch) for _ in range(steps)
        ]
        dist.barrier()
        return time.perf_counter() - start, [loss.item() for loss in losses]

    def report(self) -> float:
        """Seconds for one report with a checkpoint: weights and optimizer state."""
        report = scripts.load(scripts.TRAIN_RAY_DDP).report
        dist.barrier()
        start = time.perf_counter()
        report(self.plain, self.optimizer, {"epoch": 0})
        return time.perf_counter() - start


def serve(port: int, wrap) -> None:
    loop = Loop(wrap)
    for order, answer in partners.orders(port):
        answer(loop.report() if order == "report" else loop.run(STEPS))


def with_ddp(model):
    return DDP(model, **VIEW)


def with_ray(model):
    return prepare_model(model, parallel_strategy_kwargs=VIEW)


def ray_worker(config: dict) -> float:
    """Serve, where the driver named a port; else return when the first step was done."""
    if config["port"]:
        return serve(config["port"], with_ray)
    Loop(with_ray).run(1)
    return time.time()


def fit(folder: str, port: int = 0) -> float:
    trainer = TorchTrainer(
        ray_worker,
        train_loop_config={"port": port},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(name=str(time.time()), storage_path=folder),
    )
    return trainer.fit().return_value


def torchrun(*arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={WORKERS}", "-m", __name__, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=scripts.ROOT, stdout=subprocess.PIPE, text=True
    )


def send_along() -> None:
    """Ray's workers cannot import this folder."""
    for module in (sys.modules[__name__], partners, scripts):
        ray.cloudpickle.register_pickle_by_value(module)


def rows() -> list[Row]:
    """Rows 1, 2 and 3 of the table."""
    start_ray(WORKERS)
    send_along()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        steps, reports = _steps_and_reports(folder, pool)
        start = _first_step(folder)
    ray.shutdown()
    return [steps, start, reports]


def _steps_and_reports(folder: str, pool: ThreadPoolExecutor) -> tuple[Row, Row]:
    def start_fit(port: int) -> Future:
        return pool.submit(fit, folder, port)

    by_ray = partners.Partner(start_fit)
    by_torchrun = partners.Partner(lambda port: torchrun("serve", port))
    ray_losses, torchrun_losses = by_ray.ask("steps")[1], by_torchrun.ask("steps")[1]
    assert ray_losses == torchrun_losses, "not the same training"
    a, b = interleave(
        lambda: by_torchrun.ask("steps")[0], lambda: by_ray.ask("steps")[0], pairs=24
    )
    steps = ratio(a, b)
    by_ray.ask("report")
    seconds = [by_ray.ask("report") for _ in range(10)]
    by_torchrun.end()
    by_ray.end()
    by_torchrun.started.wait()
    by_ray.started.result()

    low, high = interval(seconds)
    epoch = float(np.median(b)) / STEPS * STEPS_PER_EPOCH
    share = high / (epoch + high)
    return (
        Row.of_ratio(
            1,
            "step time of the same loop: Ray Train over torchrun, 2 workers",
            steps,
            at_most=1.05,
            note=f"{np.median(a) / STEPS:.2f} s per step; aim 1.025",
        ),
        Row(
            3,
            "one report with a checkpoint, in seconds",
            "at most 0.3, and 2% of an epoch",
            f"{np.median(seconds):.2f}",
            f"{low:.2f} to {high:.2f}",
            "",
            "met" if high <= 0.3 and share <= 0.02 else "missed",
            f"weights and optimizer state, {share:.1%} of an epoch with one report",
            {"seconds": seconds, "epoch": epoch},
        ),
    )


def _first_step(folder: str) -> Row:
    def by_torchrun() -> float:
        start = time.time()
        job = torchrun("first-step")
        output, _ = job.communicate()
        return float(output) - start

    def by_ray() -> float:
        start = time.time()
        return fit(folder) - start

    a, b = interleave(by_torchrun, by_ray, pairs=10, warm_up=0)  # the fit was one
    return Row.of_ratio(
        2,
        "start to first step: a warm fit() over a torchrun launch, 2 workers",
        ratio(a, b),
        at_most=2,
        note=f"medians {np.median(a):.1f} s and {np.median(b):.1f} s",
    )


def main() -> None:
    """One rank of torchrun."""
    dist.init_process_group("gloo")
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), with_ddp)
    else:
        Loop(with_ddp).run(1)
        if dist.get_rank() == 0:
            print(time.time())
    gc.collect()  # DDP's objects, before the group they hold on to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
