"""Ray Data beside a DataLoader, and the memory of streaming more than the store holds."""

import io
import os
import subprocess
import sys
import tempfile
import time

from utils.cluster import start_ray

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests import scripts
from tests.tools.benchmarks import partners
from tests.tools.benchmarks.partners import AS_IT_COMES
from tests.tools.benchmarks.ratios import MISSED, interleave, ratio
from tests.tools.benchmarks.report import Row
from utils.datasets import write_shards
from utils.ray_memory import sample_memory

MIB = 2**20
CPUS, BATCH = 2, 32  # cores for each side; rows per batch
FILE = 256  # rows, 67 MB. Both sides read and decode a file at a time.
STORE = 80 * MIB  # Ray allows no less than 75


def decode(batch: pa.Table) -> dict[str, np.ndarray]:
    """Decode a table as Parquet gives it: both sides do, without converting it first."""
    images = [
        np.asarray(
            Image.open(io.BytesIO(encoded)).resize((28, 28), Image.Resampling.BOX)
        )
        for encoded in batch["image"].to_pylist()
    ]
    return {
        "image": np.stack(images)[:, None] / 255,
        "label": batch["label"].to_numpy(),
    }


class Shards(IterableDataset):
    """Rows of Parquet files, decoded; each DataLoader worker reads every n-th file."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        worker = get_worker_info()
        assert worker is not None, "only workers read"
        for file in self.files[worker.id :: worker.num_workers]:
            batch = decode(pq.read_table(file))
            yield from zip(batch["image"], batch["label"])


def one_pass(batches, count) -> tuple[float, float, int]:
    """Return seconds to the first batch and to the last, and the number of rows."""
    start, rows, first = time.perf_counter(), 0, 0.0
    for batch in batches:
        first = first or time.perf_counter() - start
        rows += count(batch)
    return first, time.perf_counter() - start, rows


def serve_loader(port: int) -> None:
    """Serve a DataLoader in a process without Ray, whose threads survive no fork."""
    for files, answer in partners.orders(port):
        decode(pq.read_table(files[0]))  # its processes inherit what this imports
        loader = DataLoader(Shards(files), batch_size=BATCH, num_workers=CPUS)
        answer(one_pass(loader, lambda batch: len(batch[1])))


def whole_pictures(batch: pa.Table) -> dict[str, np.ndarray]:
    """Decode like `decode`, but make nothing smaller: all that is read goes on."""
    images = [np.asarray(Image.open(io.BytesIO(e))) for e in batch["image"].to_pylist()]
    return {"image": np.stack(images), "label": batch["label"].to_numpy()}


def ray_pass(files, decode=decode) -> tuple[float, float, int]:
    # Left alone, Ray Data makes small blocks, and reads and decodes in two tasks.
    dataset = ray.data.read_parquet(files, override_num_blocks=len(files))
    dataset = dataset.map_batches(decode, batch_format="pyarrow")
    batches = dataset.iter_torch_batches(batch_size=BATCH)
    return one_pass(batches, lambda batch: len(batch["label"]))


def rows() -> list[Row]:
    """Return rows 4 and 5 of the table."""
    with tempfile.TemporaryDirectory() as folder:
        large, small = shards(folder, FILE), shards(folder, BATCH)
        # Eight times, so that the start of a pass counts little.
        return [*race({FILE: 8 * large, BATCH: small}), memory(small)]


def shards(folder: str, rows: int) -> list[str]:
    """Write 1280 images of 512 x 512 pixels, 336 MB, in files of so many rows."""
    path = os.path.join(folder, str(rows))
    return [str(p) for p in write_shards(path, 0.336, 512, rows_per_shard=rows)]


def race(files_by_rows: dict[int, list[str]]) -> list[Row]:
    """Let both sides read the same files on the same cores."""
    if pin := hasattr(os, "sched_setaffinity"):  # not on macOS
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(cores)[:CPUS])  # for all that starts here
    command = [sys.executable, "-m", __name__]
    as_rays_tasks = os.environ | AS_IT_COMES  # they do not import utils
    loader = partners.Partner(
        lambda port: subprocess.Popen(
            [*command, str(port)], cwd=scripts.ROOT, env=as_rays_tasks
        )
    )
    start_ray(CPUS, object_store_memory=1000 * MIB)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    measured = []
    for rows, files in files_by_rows.items():
        measured += race_through(files, rows, loader)
    loader.end()
    loader.started.wait(timeout=60)
    ray.shutdown()
    if pin:
        os.sched_setaffinity(0, cores)
    return measured


def race_through(files: list[str], rows: int, loader: partners.Partner) -> list[Row]:
    """Return the time to the first batch, and the rate where a file has many rows."""
    to_first = {"loader": [], "ray": []}

    def timed(name, read) -> float:
        time.sleep(1)  # until what the other left behind has ended
        first, seconds, count = read()
        assert count == rows * len(files)
        to_first[name].append(first)
        return seconds

    by_ray, by_loader = interleave(
        lambda: timed("ray", lambda: ray_pass(files)),
        lambda: timed("loader", lambda: loader.ask(files)),
    )
    first_batch = Row.of_ratio(
        4,
        f"time to the first batch: Ray Data over DataLoader, files of {rows} rows",
        ratio(to_first["ray"][1:], to_first["loader"][1:]).inverse(),  # no warm-up
        at_most=3,
        note=f"the DataLoader: {np.median(to_first['loader']):.2f} s",
    )
    if rows < FILE:
        return [first_batch]
    rate = Row.of_ratio(
        4,
        "rows per second: Ray Data over DataLoader, same decode, same two cores",
        ratio(by_ray, by_loader),
        at_least=0.85,
        note=f"the DataLoader: {rows * len(files) / np.median(by_loader):.0f} rows/s; "
        f"files of {rows} rows",
    )
    return [rate, first_batch]


def memory(files: list[str]) -> Row:
    """Stream all files, 4D bytes, beside a quarter of them, D, with a store below D."""
    start_ray(CPUS, object_store_memory=STORE)
    ray.data.DataContext.get_current().target_max_block_size = 16 * MIB
    quarter, spilled = files[: len(files) // 4], []

    def peak(files) -> float:
        with sample_memory(0.1) as samples:
            *_, rows = ray_pass(files, whole_pictures)
        assert rows == BATCH * len(files)
        spilled.append(samples[-1].spilled - samples[0].spilled)
        # Less what Ray's processes have while idle, which has nothing to do with the data.
        return max(s.object_store + s.processes for s in samples) - samples[0].processes

    small, large = interleave(lambda: peak(quarter), lambda: peak(files))
    ray.shutdown()
    extra = sum(os.path.getsize(file) for file in files[len(quarter) :])
    return memory_row(small, large, extra, sum(spilled))


def memory_row(small, large, extra: int, spilled: int) -> Row:
    """Return row 5, of the peaks in bytes over D and 4D; `extra` is 4D - D."""
    # A difference is the logarithm of a ratio: the same statistics, control and verdict.
    found = ratio(np.exp(small / extra), np.exp(large / extra))
    value, low, high, spread = np.log(
        [found.value, found.low, found.high, found.spread]
    )
    peaks = [f"{np.median(each) / 1e6:.0f} MB" for each in (small, large)]
    return Row(
        5,
        "streaming 4D beside D, object store capped below D: the peak of memory that 4D "
        "has more, over the bytes that it has more",
        "at most 0.1, nothing spilled",
        f"{value:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{-spread:.3f} to {spread:.3f}",
        MISSED if spilled else found.verdict(np.exp(0.1)),
        f"{spilled} bytes spilled; peaks of {peaks[0]} with D = {extra / 3e6:.0f} MB, and "
        f"of {peaks[1]} with 4D, beside Ray's idle processes",
        {"small": [*map(int, small)], "large": [*map(int, large)], "extra": extra},
    )


if __name__ == "__main__":
    serve_loader(int(sys.argv[1]))
