"""The generator of image shards: deterministic, streams, survives an interruption."""

import errno
import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from utils.datasets import shards
from utils.datasets.shards import augment, encode_png, write_shards
from utils.errors import BadInput
from utils.launch import run_ranks

SMALL = {"image_size": 28, "rows_per_shard": 48}
SIZE_GB = 2e-4  # five shards of SMALL


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write five shards; not to be changed."""
    folder = tmp_path_factory.mktemp("shards") / "made" / "too"
    list(write_shards(folder, SIZE_GB, **SMALL))
    return folder


def test_rows_count_through_and_decode_to_digits(whole):
    paths = sorted(whole.iterdir())
    sizes = [path.stat().st_size for path in paths]
    assert sum(sizes[:-1]) < SIZE_GB * 1e9 <= sum(sizes)
    table = pa.concat_tables(pq.read_table(path) for path in paths)
    assert table["id"].to_pylist() == list(range(48 * len(paths)))
    assert set(table["label"].to_pylist()) == set(range(10))
    encodings = table["image"].to_pylist()
    assert len(set(encodings)) == len(encodings)  # no two images are equal
    for encoded in encodings:
        image = Image.open(io.BytesIO(encoded))
        assert (image.format, image.mode, image.size) == ("PNG", "L", (28, 28))
        assert np.asarray(image).std() > 20  # a digit on a dark ground, not only noise


def test_a_linear_model_learns_the_labels(tmp_path):
    """Labels belong to their images: a shuffled pairing would stay at 10%."""
    paths = list(write_shards(tmp_path, 1e-3, **SMALL))
    table = pa.concat_tables(pq.read_table(path) for path in paths)
    images = [np.asarray(Image.open(io.BytesIO(b))) for b in table["image"].to_pylist()]
    x = torch.tensor(np.stack(images)).flatten(1) / 255
    y = torch.tensor(table["label"].to_pylist())
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[:800]), y[:800]).backward()
        optimizer.step()
    assert (model(x[800:]).argmax(1) == y[800:]).float().mean() > 0.6


def test_a_larger_dataset_begins_with_the_smaller_one_and_splits_differ(
    whole, tmp_path
):
    small = list(write_shards(tmp_path / "train", SIZE_GB / 2, **SMALL))
    large = list(write_shards(tmp_path / "train", SIZE_GB, **SMALL))
    assert large[: len(small)] == small != large
    assert contents(tmp_path / "train") == contents(whole)
    list(write_shards(tmp_path / "test", SIZE_GB, **SMALL, split="test"))
    test = set(contents(tmp_path / "test").values())
    assert not test & set(contents(whole).values())


def test_one_file_at_a_time_is_written(tmp_path):
    first = next(write_shards(tmp_path, SIZE_GB, **SMALL))
    assert list(tmp_path.iterdir()) == [first]
    assert pq.read_metadata(first).num_row_groups == 2  # in batches of 32


def write_until_killed(folder) -> None:
    """End in the middle of the fourth file."""
    images = iter(range(3 * 48 + 40))

    def encode_or_die(image):
        if next(images, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_png(image)

    shards.encode_png = encode_or_die
    list(write_shards(folder, SIZE_GB, **SMALL))


def test_a_killed_writer_is_continued(whole, tmp_path):
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_ranks(write_until_killed, 1, tmp_path)
    assert len(contents(tmp_path)) == 3
    assert len(list(tmp_path.glob("shard-00003.*.tmp"))) == 1  # half a file
    list(write_shards(tmp_path, SIZE_GB, **SMALL))
    assert contents(tmp_path) == contents(whole)


def test_two_runs_may_write_the_same_folder_at_once(whole, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(list, write_shards(tmp_path, SIZE_GB, **SMALL)) for _ in "ab"
        ]
    assert runs[0].result() == runs[1].result()
    assert contents(tmp_path) == contents(whole)


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


@pytest.mark.parametrize("size", [7, 64, 100])
def test_augmented_images_have_the_size_that_was_asked_and_differ(size):
    same = torch.rand(1, 1, 28, 28).expand(3, -1, -1, -1)
    images = augment(same, size, torch.Generator().manual_seed(0))
    assert images.shape == (3, size, size)
    assert images.dtype == torch.uint8
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("wrong", [{"size_gb": 0}, {"size_gb": 1, "image_size": -1}])
def test_numbers_must_be_positive(tmp_path, wrong):
    with pytest.raises(BadInput, match=r"is (0|-1), but must be positive"):
        write_shards(tmp_path, **wrong)


def test_files_of_other_arguments_are_refused_and_stay(whole):
    before = contents(whole)
    with pytest.raises(BadInput, match="not written with these arguments: name ano"):
        write_shards(whole, SIZE_GB, image_size=29, rows_per_shard=48)
    assert contents(whole) == before


def test_a_file_that_was_cut_off_is_named(tmp_path):
    (tmp_path / "shard-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match=r"shard-00001\.parquet is not a whole Parquet"):
        write_shards(tmp_path, SIZE_GB, **SMALL)


def test_a_disk_too_small_is_noticed_before_writing(tmp_path):
    with pytest.raises(BadInput, match=r"1e\+09 GB more do not fit.* ask for less"):
        write_shards(tmp_path, 1e9, **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file/shards \(Not a directory\): name a fol"):
        write_shards(tmp_path / "file" / "shards", SIZE_GB, **SMALL)
