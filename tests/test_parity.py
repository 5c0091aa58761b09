"""N workers train like one process: same losses, gradients and parameters.

Two criteria, as float32 rounding of 1e-7 grows to 1e-3 within ten AdamW steps: float64
decides "same algorithm" over all steps, float32 decides "same code path" on the first
gradient. ResNet-18 is trained where every rank has the whole model, a GPT where it is
sharded.
"""

import io
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from utils.cluster import start_ray

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
import torch.distributed as dist
from PIL import Image
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from tests import parity, scripts, sharding
from utils.datasets import write_shards
from utils.launch import run_ranks

pytestmark = [pytest.mark.part01, pytest.mark.part02, pytest.mark.part03]

FLOAT64, FLOAT32 = 1e-10, 1e-5
# DeepSpeed reduces gradients of float64 models in float32, and keeps float32 copies.
FLOAT64_ZERO = 1e-6
STRATEGIES = [*parity.STRATEGIES, *sharding.STRATEGIES]
WORKERS = (1, 2, 3)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@cache
def one_process(sharded: bool = False, norm: str = "group") -> dict[str, torch.Tensor]:
    """The reference: no wrap, no averaging, one process."""
    if sharded:
        return sharding.train_all({"alone": sharding.one_process})["alone"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = parity.Strategy(
        lambda model: model, parity.step_without_averaging, norm=norm
    )
    result = parity.train_all({"alone": alone})["alone"]
    dist.destroy_process_group()
    return result


@cache
def with_ranks(num_workers: int) -> dict[str, dict[str, torch.Tensor]]:
    """In processes with the environment of torchrun, without its seconds of imports."""
    chosen = {n: s for n, s in parity.STRATEGIES.items() if s.launcher == "torchrun"}
    if num_workers == 2:
        chosen |= parity.CONTROLS
    return run_ranks(parity.in_a_group, num_workers, parity.train_all, chosen)[0]


@cache
def with_shards(num_workers: int) -> dict[str, dict[str, torch.Tensor]]:
    return run_ranks(sharding.train_all, num_workers, sharding.STRATEGIES)[0]


@cache
def with_ray(num_workers: int) -> dict[str, dict[str, torch.Tensor]]:
    # The workers cannot import this folder: send its functions along.
    ray.cloudpickle.register_pickle_by_value(parity)
    ray.cloudpickle.register_pickle_by_value(scripts)
    chosen = {n: s for n, s in parity.STRATEGIES.items() if s.launcher == "ray"}

    def train(config):
        results = parity.train_all(chosen)
        # Ray wants no tensors, and gives back what rank 0 returns
        return as_numpy(results) if dist.get_rank() == 0 else None

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(name="parity", storage_path=folder),
        )
        returned = trainer.fit().return_value
    return {n: {k: torch.tensor(v) for k, v in r.items()} for n, r in returned.items()}


def as_numpy(results: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict]:
    return {n: {k: v.numpy() for k, v in r.items()} for n, r in results.items()}


@pytest.fixture(scope="module", autouse=True)
def _ray():
    start_ray(num_workers=max(WORKERS))
    yield
    ray.shutdown()


QUICK = [n if n == 2 else pytest.param(n, marks=pytest.mark.slow) for n in WORKERS]


@pytest.fixture(params=QUICK, ids=lambda n: f"{n} workers")
def num_workers(request) -> int:
    return request.param


def result(name: str, num_workers: int) -> dict[str, torch.Tensor]:
    if name in sharding.STRATEGIES:
        return with_shards(num_workers)[name]
    launcher = parity.STRATEGIES[name].launcher
    return (with_ray if launcher == "ray" else with_ranks)(num_workers)[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_float64_equals_one_process_after_ten_steps(name, num_workers):
    ours, theirs = result(name, num_workers), one_process(name in sharding.STRATEGIES)
    assert len(theirs["losses"]) == 10
    tolerance = FLOAT64_ZERO if name.startswith("ZeRO") else FLOAT64
    assert relative(ours["losses"], theirs["losses"]) < tolerance
    assert relative(ours["gradient"], theirs["gradient"]) < tolerance
    assert relative(ours["parameters"], theirs["parameters"]) < tolerance


@pytest.mark.parametrize("name", STRATEGIES)
def test_float32_first_gradient_equals_one_process(name, num_workers):
    ours, theirs = result(name, num_workers), one_process(name in sharding.STRATEGIES)
    assert ours["gradient32"].dtype == torch.float32
    assert relative(ours["gradient32"], theirs["gradient32"]) < FLOAT32


@pytest.mark.parametrize("name", sharding.STRATEGIES)
def test_evaluation_of_shards_equals_one_process(name, num_workers):
    """Over seven texts, which neither 2 nor 3 ranks can share equally."""
    ours = result(name, num_workers)["test loss"]
    assert ours == pytest.approx(one_process(sharded=True)["test loss"], abs=1e-5)


@pytest.mark.parametrize("name", parity.CONTROLS)
def test_a_mistake_is_seen(name):
    """A negative control: each mistake is at least a million times the tolerance off."""
    ours, theirs = with_ranks(2)[name], one_process(norm=parity.CONTROLS[name].norm)
    assert relative(ours["parameters"], theirs["parameters"]) > 1e6 * FLOAT64
    if name != "no set_epoch":  # which is right in the first step
        assert relative(ours["gradient"], theirs["gradient"]) > 1e6 * FLOAT64
        assert relative(ours["gradient32"], theirs["gradient32"]) > 1e3 * FLOAT32


def mistakes_of_sharding() -> dict[str, torch.Tensor]:
    """The first gradient where it is summed; a weight, and what its shards became."""
    summed = sharding.fsdp2(torch.float64, steps=1, sum_gradients=True)["gradients"]
    with torch.device("meta"):
        model = sharding.GPT(sharding.CONFIG)
    sharding.shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return {
        "summed": torch.cat([gradient.flatten() for gradient in summed]),
        "shards": model.head.weight.full_tensor(),
        "weight": sharding.build_model(torch.float32).head.weight.detach(),
    }


def test_mistakes_of_sharding_are_seen():
    """Negative controls: no division by the world size; `init_weights` on a CPU mesh,
    which gives all ranks the shard of rank 0."""
    found = run_ranks(mistakes_of_sharding, 2)[0]
    theirs = one_process(sharded=True)["gradient"]
    assert relative(found["summed"], theirs) > 1e6 * FLOAT64
    assert relative(found["summed"] / 2, theirs) < FLOAT64
    assert torch.equal(*found["shards"].chunk(2))
    assert relative(found["shards"], found["weight"]) > 1e6 * FLOAT64


def streamed(shards: list[str], decode, ranks: int) -> list[list[dict]]:
    """Ten shuffled batches for each rank, as Ray Data deals them out."""
    dataset = ray.data.read_parquet(shards, shuffle="files").map_batches(
        lambda batch: decode(batch) | {"id": batch["id"]}, batch_size=32
    )

    def read(split):
        size = parity.GLOBAL_BATCH // ranks
        options = {"batch_size": size, "local_shuffle_buffer_size": 32}
        return list(split.iter_torch_batches(**options))[:10]

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(read, dataset.streaming_split(ranks, equal=True)))


def loaded(shards: list[str], orders: list[list[list[int]]]) -> list[list[tuple]]:
    """By rank, what a DataLoader makes of the same files, given the rows of each batch."""
    rows = pq.read_table(shards).to_pydict()
    pictures = [np.asarray(Image.open(io.BytesIO(image))) for image in rows["image"]]
    images = torch.tensor(np.stack(pictures))[:, None] / 255
    in_memory = TensorDataset(images, torch.tensor(rows["label"]))
    return [list(DataLoader(in_memory, batch_sampler=order)) for order in orders]


def train_on_each(orders: dict[str, list[list[tuple]]]) -> dict[str, dict]:
    step = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA).train_step
    strategy, rank = parity.Strategy(DDP, step), dist.get_rank()
    return {n: parity.train_twice(strategy, ranks[rank]) for n, ranks in orders.items()}


def test_training_through_ray_data_equals_the_dataloader(tmp_path, num_workers):
    """Same order of rows: the same result, bit for bit, and that of one process."""
    decode = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA).decode
    shards = [str(p) for p in write_shards(tmp_path, 4e-4, 28, rows_per_shard=48)]
    batches = streamed(shards, decode, num_workers)
    by_ray = [[(b["image"], b["label"]) for b in rank] for rank in batches]
    by_loader = loaded(shards, [[b["id"].tolist() for b in rank] for rank in batches])
    orders = {"Ray Data": by_ray, "DataLoader": by_loader}
    if num_workers == 2:
        orders["another order"] = [by_ray[0][::-1], by_ray[1]]
    found = run_ranks(parity.in_a_group, num_workers, train_on_each, orders)[0]
    whole = [[torch.cat(share) for share in zip(*step)] for step in zip(*by_loader)]
    alone = run_ranks(parity.in_a_group, 1, train_on_each, {"alone": [whole]})[0]

    assert len(alone["alone"]["losses"]) == 10
    for key, theirs in alone["alone"].items():
        assert torch.equal(found["Ray Data"][key], found["DataLoader"][key])
        tolerance = FLOAT32 if key == "gradient32" else FLOAT64
        assert relative(found["Ray Data"][key], theirs) < tolerance
        if num_workers == 2:  # a negative control
            assert relative(found["another order"][key], theirs) > 1e6 * FLOAT64
