"""The generator of image shards: deterministic, streams, survives an interruption."""

import errno
import io
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from utils.datasets import shards
from utils.datasets.shards import augment, encode_png, write_shards
from utils.errors import BadInput
from utils.launch import run_ranks

pytestmark = pytest.mark.part02

SMALL = {"image_size": 28, "rows_per_shard": 48}
SIZE_GB = 2e-4  # five shards of SMALL


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_images_are_those_of_a_path_or_digits_with_some_to_test_with(monkeypatch):
    written = []

    def write(folder, *arguments, **options):
        written.append((folder.name, arguments, options))
        return [folder / "00000.parquet", folder / "00001.parquet"]

    monkeypatch.setattr(shards, "write_shards", write)
    assert shards.path_or_digits("s3://bucket/images", 1) == (
        "s3://bucket/images",
        None,
    )
    assert not written
    to_train, to_test = map(Path, shards.path_or_digits(None, 1.5))
    assert (to_train.name, to_test.name) == ("train-1.5GB", "test")
    assert written == [
        ("train-1.5GB", (1.5, 224, 128), {}),
        ("test", (0.002, 64), {"split": "test"}),
    ]


def test_folders_above_are_made(tmp_path):
    (path,) = write_shards(tmp_path / "a" / "b", 1e-6, **SMALL)
    assert path.parent == tmp_path / "a" / "b"


def test_the_size_is_reached_and_not_much_exceeded(tmp_path):
    sizes = [path.stat().st_size for path in write_shards(tmp_path, SIZE_GB, **SMALL)]
    assert sum(sizes[:-1]) < SIZE_GB * 1e9 <= sum(sizes)


def test_rows_are_numbered_through_and_decode_to_digits(tmp_path):
    paths = list(write_shards(tmp_path, SIZE_GB, **SMALL))
    table = pa.concat_tables(pq.read_table(path) for path in paths)
    assert table["id"].to_pylist() == list(range(48 * len(paths)))
    assert set(table["label"].to_pylist()) == set(range(10))
    for encoded in table["image"].to_pylist():
        image = Image.open(io.BytesIO(encoded))
        assert (image.format, image.mode, image.size) == ("PNG", "L", (28, 28))
        assert np.asarray(image).std() > 20  # a digit on a dark ground, not only noise


def test_a_linear_model_learns_the_labels(tmp_path):
    """Labels belong to their images: a shuffled pairing would stay at 10%."""
    paths = list(write_shards(tmp_path, 1e-3, **SMALL))
    table = pa.concat_tables(pq.read_table(path) for path in paths)
    pictures = [
        np.asarray(Image.open(io.BytesIO(b))) for b in table["image"].to_pylist()
    ]
    x = torch.tensor(np.stack(pictures)).flatten(1) / 255
    y = torch.tensor(table["label"].to_pylist())
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[:800]), y[:800]).backward()
        optimizer.step()
    assert (model(x[800:]).argmax(1) == y[800:]).float().mean() > 0.6


def test_two_calls_write_the_same_bytes_and_splits_differ(tmp_path):
    for name in ("a", "b"):
        list(write_shards(tmp_path / name, SIZE_GB, **SMALL))
    list(write_shards(tmp_path / "test", SIZE_GB, **SMALL, split="test"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not set(contents(tmp_path / "a").values()) & set(
        contents(tmp_path / "test").values()
    )


def test_a_larger_dataset_begins_with_the_smaller_one(tmp_path):
    small = list(write_shards(tmp_path, SIZE_GB / 2, **SMALL))
    before = contents(tmp_path)
    large = list(write_shards(tmp_path, SIZE_GB, **SMALL))
    assert large[: len(small)] == small
    assert len(large) > len(small)
    assert before.items() <= contents(tmp_path).items()


def test_it_streams_one_file_at_a_time(tmp_path):
    shards = write_shards(tmp_path, SIZE_GB, **SMALL)
    first = next(shards)
    assert list(tmp_path.iterdir()) == [first]
    assert pq.read_metadata(first).num_rows == 48
    assert pq.read_metadata(first).num_row_groups == 2  # written in batches of 32


def write_until_killed(folder) -> None:
    """End in the middle of the fourth file."""
    images = iter(range(3 * 48 + 40))

    def encode_or_die(image):
        if next(images, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_png(image)

    shards.encode_png = encode_or_die
    list(write_shards(folder, SIZE_GB, **SMALL))


def test_a_killed_writer_is_continued(tmp_path):
    list(write_shards(tmp_path / "whole", SIZE_GB, **SMALL))
    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_ranks(write_until_killed, 1, folder)
    assert len(contents(folder)) == 3
    assert len(list(folder.glob("shard-00003.*.tmp"))) == 1  # half a file
    old, new = folder / "shard-00004.a.tmp", folder / "shard-00004.b.tmp"
    for path in (old, new):  # not read, not in the way
        path.write_bytes(b"half a file")
    os.utime(old, (0, 0))
    list(write_shards(folder, SIZE_GB, **SMALL))
    assert contents(folder) == contents(tmp_path / "whole")
    assert not old.exists()
    assert new.exists()  # of a run that may be writing it now


def test_two_runs_write_the_same_folder_at_once(tmp_path):
    """Neither writes into the other's half file, nor loses it."""
    list(write_shards(tmp_path / "whole", SIZE_GB, **SMALL))
    both = tmp_path / "both"
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(list, write_shards(both, SIZE_GB, **SMALL)) for _ in "ab"]
    assert runs[0].result() == runs[1].result()
    assert contents(both) == contents(tmp_path / "whole")
    assert list(both.glob("*.tmp")) == []


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("utils.datasets.shards.encode_png", full)
    says = r"shard-00000\.parquet cannot be written \(No space left"
    with pytest.raises(BadInput, match=says):
        list(write_shards(tmp_path, SIZE_GB, **SMALL))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31))
def test_png_is_read_back_exactly(height, width, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(encode_png(image)))) == image).all()


def test_png_begins_as_pillow_writes_it_and_is_not_compressed():
    image, written = np.zeros((50, 70), np.uint8), io.BytesIO()
    Image.fromarray(image).save(written, "png")
    header = 8 + 4 + 4 + 13 + 4  # signature; length, type, data, checksum
    assert encode_png(image)[:header] == written.getvalue()[:header]
    assert len(encode_png(image)) > image.nbytes > len(written.getvalue())


def test_pictures_are_turned_scaled_and_shifted_within_bounds(monkeypatch):
    seen, make = [], F.affine_grid

    def noted(theta, *rest, **named):
        seen.append(theta)
        return make(theta, *rest, **named)

    monkeypatch.setattr(F, "affine_grid", noted)
    augment(torch.rand(3000, 1, 4, 4), 4, torch.Generator().manual_seed(0))
    (a, b, x), (c, d, y) = seen[0].permute(1, 2, 0)
    assert torch.equal(a, d) and torch.equal(b, -c)  # no shear
    degrees, scale = torch.rad2deg(torch.atan2(c, a)), torch.hypot(a, c)
    for values, bound in (
        (degrees, 15),
        ((scale - 1.1) / 0.2, 1),
        (8 * x, 1),
        (8 * y, 1),
    ):
        ends = values.min().item(), values.max().item()
        assert ends == pytest.approx((-bound, bound), rel=0.01)
        assert values.mean().item() == pytest.approx(0, abs=0.05 * bound)


def test_white_stays_below_its_noise_of_32_values():
    white = torch.full((50, 1, 28, 28), 1.001)  # interpolating rounds 1 to less
    pictures = augment(white, 28, torch.Generator().manual_seed(0))
    middle = pictures[:, 10:18, 10:18]  # no border is turned into it
    assert middle.unique().tolist() == list(range(215, 215 + 32))
    assert pictures[:, 0, 0].min() < 215


@pytest.mark.parametrize("size", [7, 28, 64, 100])
def test_augment_gives_the_size_that_was_asked(size):
    pictures = augment(torch.rand(3, 1, 28, 28), size, torch.Generator().manual_seed(0))
    assert pictures.shape == (3, size, size)
    assert pictures.dtype == torch.uint8


@pytest.mark.parametrize("wrong", [{"size_gb": 0}, {"size_gb": 1, "image_size": -1}])
def test_numbers_must_be_positive(tmp_path, wrong):
    with pytest.raises(BadInput, match=r"is (0|-1), but must be positive"):
        write_shards(tmp_path, **wrong)


def test_other_arguments_in_the_same_folder_are_refused(tmp_path):
    list(write_shards(tmp_path, SIZE_GB, **SMALL))
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="not written with these arguments: name ano"):
        write_shards(tmp_path, SIZE_GB, image_size=29, rows_per_shard=48)
    assert contents(tmp_path) == before


def test_a_file_of_somebody_else_is_not_taken_for_a_shard(tmp_path):
    table = pa.table({"id": [1]}).replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "shard-00000.parquet", store_schema=False)
    with pytest.raises(BadInput, match=r"holds shard-00000\.parquet, which was not wr"):
        write_shards(tmp_path, SIZE_GB, **SMALL)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_cut_file_is_named(tmp_path, size):
    path = list(write_shards(tmp_path, SIZE_GB, **SMALL))[1]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        BadInput, match=r"shard-00001\.parquet is not a whole Parquet f"
    ):
        write_shards(tmp_path, SIZE_GB, **SMALL)


def test_a_disk_too_small_is_noticed_before_writing(tmp_path):
    with pytest.raises(BadInput, match=r"1e\+09 GB more do not fit.* ask for less"):
        write_shards(tmp_path, 1e9, **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_twentieth_of_the_disk_is_left_free(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(free=1e6)  # bytes: 0.001 GB
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: disk)
    write_shards(tmp_path, 0.00094, **SMALL)  # nothing is written until it is iterated
    with pytest.raises(BadInput, match="do not fit"):
        write_shards(tmp_path, 0.00096, **SMALL)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BadInput, match=r"file/shards \(Not a directory\): name a folder"
    ):
        write_shards(tmp_path / "file" / "shards", SIZE_GB, **SMALL)
