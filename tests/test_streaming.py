"""Ray Data: every row once per epoch, equal steps, and memory that is counted rightly.

That memory stays flat under a capped store is shown in 02/03.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from utils.cluster import start_ray

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.datasets import write_shards
from utils.ray_memory import private_bytes, sample_memory

pytestmark = [pytest.mark.slow, pytest.mark.ray]

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def capped_ray():
    """Start one Ray for this file, with 80 MiB of object store (no less than 75 goes)."""
    start_ray(2, object_store_memory=80 * MIB)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Write eight files of 48 rows, the ids counting through."""
    folder = tmp_path_factory.mktemp("shards")
    paths = list(write_shards(folder, 4e-4, image_size=28, rows_per_shard=48))
    assert len(paths) == 8
    return paths


def consume(dataset, num_workers, batch_size, buffer_size=None):
    """Return ids by epoch, rank and batch, read side by side as training workers read."""
    splits = dataset.streaming_split(num_workers, equal=True)

    def read(split, epoch):
        batches = split.iter_torch_batches(
            batch_size=batch_size,
            local_shuffle_buffer_size=buffer_size,
            local_shuffle_seed=epoch,
        )
        return [batch["id"].tolist() for batch in batches]

    with ThreadPoolExecutor(num_workers) as pool:
        return [list(pool.map(read, splits, [epoch] * num_workers)) for epoch in (0, 1)]


def check_delivery(epochs, num_rows, num_workers):
    """Check: nothing twice, all but the remainder, equal sizes of batches on all ranks."""
    for ranks in epochs:
        ids = [row for batches in ranks for batch in batches for row in batch]
        assert len(set(ids)) == len(ids)
        assert set(ids) <= set(range(num_rows))
        assert len(ids) == num_rows // num_workers * num_workers
        sizes = [[len(batch) for batch in batches] for batches in ranks]
        assert all(each == sizes[0] for each in sizes)


@pytest.mark.parametrize(
    ("num_workers", "shuffle"),
    [
        (1, "files"),
        (2, None),
        (2, "files"),
        pytest.param(1, "global", marks=pytest.mark.weekly),
        pytest.param(3, "global", marks=pytest.mark.weekly),
    ],
)
def test_every_row_once_per_epoch(shards, num_workers, shuffle):
    paths = [str(path) for path in shards]
    order = "files" if shuffle == "files" else None
    dataset = ray.data.read_parquet(paths, columns=["id"], shuffle=order)
    if shuffle == "global":
        dataset = dataset.random_shuffle()
    buffer_size = 64 if shuffle == "files" else None
    epochs = consume(dataset, num_workers, 16, buffer_size)
    check_delivery(epochs, 8 * 48, num_workers)
    if num_workers == 1:
        assert epochs[0] != epochs[1]  # another order in the second epoch


@pytest.mark.parametrize(
    ("num_workers", "shuffle"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.weekly),
        pytest.param(3, True, marks=pytest.mark.weekly),
        pytest.param(3, False, marks=pytest.mark.weekly),
    ],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(blocks=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_equal_steps_whatever_the_blocks(num_workers, shuffle, blocks):
    starts = np.cumsum([0, *blocks])
    tables = [pa.table({"id": range(a, b)}) for a, b in pairwise(starts)]
    dataset = ray.data.from_arrow(tables)
    epochs = consume(dataset, num_workers, 4, 8 if shuffle else None)
    check_delivery(epochs, sum(blocks), num_workers)


def test_what_does_not_fit_the_store_is_counted_as_spilled():
    """A control: here twice the store is kept."""
    rows = ray.data.range(160, override_num_blocks=40)
    with sample_memory(0.1) as samples:
        kept = rows.map_batches(
            lambda batch: {"x": np.ones((len(batch["id"]), MIB), np.uint8)}
        ).materialize()
    assert kept.count() == 160
    assert samples[-1].spilled - samples[0].spilled > 40 * MIB


def test_shared_memory_is_not_counted_as_private():
    before = private_bytes(psutil.Process())
    # Not np.ones: what the heap has freed stays with this process, see utils.processes.
    zeros = np.frombuffer(mmap.mmap(-1, 32 * MIB), dtype=float)
    kept = ray.get(ray.put(zeros))  # in the store, mapped here
    del zeros
    assert kept.nbytes == 32 * MIB and kept.sum() == 0
    assert private_bytes(psutil.Process()) - before < 16 * MIB
    # Not np.ones, which may take memory that this process has had before.
    mine = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE)
    mine.write(b"1" * len(mine))
    assert private_bytes(psutil.Process()) - before > 24 * MIB
