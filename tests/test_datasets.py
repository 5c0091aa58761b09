"""The shipped digits, and what is downloaded: once, by one rank, or one sentence."""

import contextlib
import errno
import http.client
import os
import pickle
import subprocess
import time
import urllib.error
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision import datasets as tv

from tests.network import nobody_listens
from tests.waiting import TIMEOUT_S
from utils import datasets
from utils.datasets import downloaded, shipped
from utils.errors import BadInput
from utils.launch import run_ranks

# Nothing listens there, so that a download fails at once wherever the tests run.
NOWHERE = f"http://{nobody_listens()}/"


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path / "storage"))
    return tmp_path / "storage"


def test_digits():
    train, test = datasets.digits("train"), datasets.digits("test")
    assert (len(train), len(test)) == (1437, 360)
    for split in (train, test):
        images, labels = split.tensors
        assert images.shape[1:] == (1, 28, 28)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert (images.min(), images.max()) == (0, 1)
        # Each digit is a tenth, more or less: nothing was sorted before it was split.
        assert (labels.bincount() / len(labels)).sub(0.1).abs().max() < 0.05
    both = torch.cat([train.tensors[0], test.tensors[0]])
    assert len({image.numpy().tobytes() for image in both}) == 1797  # none in both


def test_pictures_show_their_labels():
    """For 95% of the test images the nearest training image has the same label."""
    (x, y), (x_test, y_test) = (datasets.digits(s).tensors for s in ("train", "test"))
    nearest = torch.cdist(x_test.flatten(1), x.flatten(1)).argmin(dim=1)
    assert (y[nearest] == y_test).float().mean() > 0.95


def test_damaged_file_is_named(monkeypatch, tmp_path):
    content = bytearray(shipped.DIGITS_FILE.read_bytes())
    content[len(content) // 2] ^= 1
    copy = tmp_path / "digits.npz"
    copy.write_bytes(content)
    monkeypatch.setattr(shipped, "DIGITS_FILE", copy)
    with pytest.raises(BadInput, match="is damaged") as e:
        datasets.digits()
    assert str(copy) in str(e.value)
    assert "git checkout -- utils/data" in str(e.value)
    assert "\n" not in str(e.value)
    copy.unlink()
    with pytest.raises(BadInput, match=r"cannot be read \(No such file") as e:
        datasets.digits()
    assert str(copy) in str(e.value)


def test_unknown_names():
    with pytest.raises(BadInput, match=f"one of {', '.join(datasets.DATASETS)}"):
        datasets.load("imagenet")
    for name in datasets.DATASETS:
        with pytest.raises(BadInput, match="'validation', but must be 'train' or 'te"):
            datasets.load(name, "validation")
    assert len(datasets.load("digits", "test")) == 360


def test_no_network_is_one_sentence_on_every_rank():
    nowhere = NOWHERE  # each rank would hold another port

    def train():
        tv.MNIST.mirrors = [nowhere]
        dist.init_process_group("gloo")
        with pytest.raises(BadInput) as error:
            datasets.mnist()
        dist.destroy_process_group()
        return str(error.value)

    for message in run_ranks(train, 2, timeout=TIMEOUT_S):
        assert message.startswith("MNIST could not be downloaded (")
        assert "Connection refused" in message
        assert "use the dataset 'digits', which is here and needs no network" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left"), r"cannot be written to .* \(No space"),
        (
            OSError(errno.EROFS, "Read-only"),
            "set WORKSHOP_STORAGE to a folder with room",
        ),
        (OSError(errno.ENOLCK, "No locks"), r"cannot be written to .* \(No locks"),
        (urllib.error.URLError("timed out"), "could not be downloaded .*connect to a"),
        (http.client.IncompleteRead(b""), "could not be downloaded .*connect to a"),
        (ConnectionResetError("reset"), "could not be downloaded .*connect to a"),
        (RuntimeError("File not found or corrupted."), "could not be downloaded"),
        (RuntimeError("a damaged file may raise anything"), "is damaged .*delete this"),
    ],
    ids=repr,
)
def test_what_went_wrong_with_a_download_is_not_called_something_else(error, says):
    class Failing(Dataset):
        def __init__(self, root, train, transform, download):
            raise error

    with pytest.raises(BadInput, match=says):
        downloaded._from_torchvision(Failing, "train")


CUT = bytes([0, 0, 8, 3, 0, 0, 0xEA, 0x60, 0, 0, 0, 28, 0, 0, 0, 28, 1, 2, 3])


@pytest.mark.parametrize(
    "content", [b"", CUT, b"<html>"], ids=["empty", "cut", "other"]
)
def test_a_damaged_download_is_named(storage, content):
    folder = storage / "datasets" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, _ in tv.MNIST.resources:
        (folder / name.removesuffix(".gz")).write_bytes(content)
    with pytest.raises(BadInput, match=r"is damaged .*delete this folder") as e:
        datasets.mnist()
    assert f"downloaded to {folder.parent} is" in str(e.value)
    assert "\n" not in str(e.value)


class Fake(Dataset):
    """What torchvision's classes do: `download` writes a file unless it is there."""

    name = "fake"

    def __init__(self, root, train, transform, download):
        self.file = Path(root) / self.name
        if not self.file.exists():
            with contextlib.suppress(OSError):  # a folder that is read-only
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.with_name(f"came-{os.getpid()}").touch()
        if download and not self.file.exists():
            with open(self.file.with_name("downloads"), "a") as log:
                log.write("downloads\n")
            too_late = time.monotonic() + 300
            expected = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            while len(list(self.file.parent.glob("came-*"))) < expected:
                assert time.monotonic() < too_late, "a rank never looked for the data"
                time.sleep(0.01)
            time.sleep(0.5)  # who would not wait downloads now
            self.file.write_text("data")
        if not self.file.exists():
            raise RuntimeError("Dataset not found.")
        self.split = "train" if train else "test"


def test_one_rank_of_each_node_downloads_and_the_others_wait(tmp_path):
    """Two "nodes" of two ranks each that share no folder; there is no process group."""

    def train():
        rank = int(os.environ["RANK"])
        os.environ["WORKSHOP_STORAGE"] = str(tmp_path / f"node {rank // 2}")
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return downloaded._from_torchvision(Fake, "test").split

    assert run_ranks(train, 4, timeout=TIMEOUT_S) == ["test"] * 4
    for node in range(2):
        log = tmp_path / f"node {node}" / "datasets" / "downloads"
        assert len(log.read_text().splitlines()) == 1


def test_data_of_a_folder_that_is_read_only_are_read(small_disk, monkeypatch):
    """Somebody has downloaded them for all."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(small_disk.parent / "own"))
    folder = small_disk.parent / "own" / "datasets"
    folder.parent.mkdir()
    folder.symlink_to(small_disk)
    (small_disk / "fake").write_text("data")
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True, timeout=TIMEOUT_S)
    assert downloaded._from_torchvision(Fake, "train").split == "train"
    assert os.listdir(small_disk) == ["fake"]
    monkeypatch.setattr(Fake, "name", "another")  # which is not there
    with pytest.raises(BadInput, match="cannot be written to"):
        downloaded._from_torchvision(Fake, "train")


def test_batches_that_cannot_be_shared_are_refused():
    data = datasets.text("test", 64)
    with pytest.raises(BadInput, match="3 ranks cannot share a batch of 16 equally"):
        datasets.share_of_batch(data, 0, 16, rank=0, world_size=3)
    with pytest.raises(BadInput, match="examples: lower the batch size"):
        datasets.share_of_batch(data, 0, len(data) + 1, rank=0, world_size=1)


def test_the_shares_of_all_ranks_are_the_batch_and_every_epoch_has_its_order():
    data = TensorDataset(torch.arange(50))  # an epoch has four batches of 12

    def numbers(step, rank=0, world_size=1, seed=0):
        share = datasets.share_of_batch(data, step, 12, rank, world_size, seed)
        return share[0].tolist()

    batches = [[n for rank in range(3) for n in numbers(s, rank, 3)] for s in range(8)]
    for epoch in (batches[:4], batches[4:]):
        seen = [number for batch in epoch for number in batch]
        assert len(set(seen)) == len(seen) == 48
    assert [set(batch) for batch in batches] == [set(numbers(s)) for s in range(8)]
    assert batches[:4] != batches[4:]
    assert numbers(0, seed=1) not in [numbers(step) for step in range(8)]


def test_the_processes_of_a_loader_get_a_dataset_that_they_cannot_import():
    class Counts(IterableDataset):  # of this function, as one of a notebook
        def __iter__(self):
            yield from range(3)

    afresh = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    loader = DataLoader(datasets.ByValue(Counts()), batch_size=None, **afresh)
    assert list(loader) == list(loader) == [0, 1, 2]
    failing = pytest.raises((AttributeError, pickle.PicklingError), match="Counts")
    with pytest.warns(UserWarning, match="pickle error"), failing:
        list(DataLoader(Counts(), batch_size=None, **afresh))
