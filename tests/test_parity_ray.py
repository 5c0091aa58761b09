"""Ray Train trains like one process, and so does what Ray Data streams.

The criteria are those of tests/test_parity.py.
"""

import io
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

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
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from tests import compare, parity, scripts
from tests.test_parity import FLOAT32, FLOAT64, compared, reference
from utils.datasets import write_shards
from utils.launch import run_ranks

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def own_ray():
    start_ray(num_workers=3)
    yield
    ray.shutdown()


def prepared_by_ray(model: nn.Module) -> nn.Module:
    from ray.train.torch import prepare_model  # only workers of Ray Train may call it

    return prepare_model(model)


@pytest.mark.slow
def test_ray_train_ddp_equals_one_process(own_ray):
    """With two workers: `prepare_model` wraps nothing where one is alone, else in DDP."""
    # The workers cannot import this folder: send its functions along.
    for module in (compare, parity, scripts, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    strategy = parity.Strategy(prepared_by_ray, parity.step_of_script)
    chosen = {"Ray Train DDP": strategy}
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            lambda config: parity.train_all(chosen),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="parity", storage_path=folder),
        )
        found = trainer.fit().return_value  # of rank 0, which has what all ranks did
    distance = compared(chosen, found)["Ray Train DDP"]
    assert distance["losses"] < FLOAT64
    assert distance["gradient"] < FLOAT64
    assert distance["parameters"] < FLOAT64
    assert distance["gradient32"] < FLOAT32


def streamed(shards: list[str], decode, ranks: int) -> list[list[dict]]:
    """Return ten shuffled batches for each rank, as Ray Data deals them out."""
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
    """Return by rank what a DataLoader makes of the same files, given each batch's rows."""
    rows = pq.read_table(shards).to_pydict()
    pictures = [np.asarray(Image.open(io.BytesIO(image))) for image in rows["image"]]
    images = torch.tensor(np.stack(pictures))[:, None] / 255
    in_memory = TensorDataset(images, torch.tensor(rows["label"]))
    return [list(DataLoader(in_memory, batch_sampler=order)) for order in orders]


@pytest.mark.parametrize(
    "num_workers",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.weekly),
    ],
    ids="{} workers".format,
)
def test_training_through_ray_data_equals_one_process(tmp_path, own_ray, num_workers):
    """The same batches as a DataLoader's, bit for bit, and trained on as by one process."""
    decode = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA).decode
    shards = [str(p) for p in write_shards(tmp_path, 4e-4, 28, rows_per_shard=48)]
    streams = streamed(shards, decode, num_workers)
    by_ray = [[(b["image"], b["label"]) for b in rank] for rank in streams]
    by_loader = loaded(shards, [[b["id"].tolist() for b in rank] for rank in streams])
    for ours, theirs in zip(by_ray, by_loader, strict=True):
        assert len(ours) == parity.STEPS
        for (images, labels), expected in zip(ours, theirs, strict=True):
            assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])

    whole = [[torch.cat(share) for share in zip(*step)] for step in zip(*by_loader)]
    alone = reference(batches=lambda: whole)
    orders = {"Ray Data": by_ray}
    if num_workers == 2:
        orders["another order"] = [by_ray[0][::-1], by_ray[1]]

    def train_orders() -> dict[str, list[parity.Both]]:
        step = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA).train_step
        mine = {name: ranks[dist.get_rank()] for name, ranks in orders.items()}
        strategies = {
            name: parity.Strategy(DDP, step, batches=lambda b=batches: b)
            for name, batches in mine.items()
        }
        return parity.train_all(strategies)

    trained = run_ranks(parity.in_a_group, num_workers, train_orders)[0]
    found = {name: parity.compare(alone, ranks) for name, ranks in trained.items()}
    for key, distance in found["Ray Data"].items():
        assert distance < (FLOAT32 if key == "gradient32" else FLOAT64)
        if num_workers == 2:  # a negative control
            assert found["another order"][key] > 1e6 * FLOAT64
