"""The shipped digits, and what is downloaded: once, by one rank, or one sentence."""

import contextlib
import errno
import http.client
import os
import pickle
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision import datasets as tv

from tests import scripts
from tests.network import nobody_listens
from tests.patience import PATIENCE
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
        image, label = split[0]
        assert image.shape == (1, 28, 28)
        assert label.shape == ()


def test_splits_are_fixed_and_together_the_whole_file():
    splits = [datasets.digits(name).tensors[0] for name in ("train", "test")]
    again = [datasets.digits(name).tensors[0] for name in ("train", "test")]
    assert all(torch.equal(a, b) for a, b in zip(splits, again))
    seen = {image.numpy().tobytes() for split in splits for image in split}
    with np.load(shipped.DIGITS_FILE) as file:
        originals = {image.tobytes() for image in file["images"]}
    assert len(seen) == len(originals) == 1797  # no image twice, and none in both
    with np.load(shipped.DIGITS_FILE) as file:
        every_fifth = file["labels"][::5].tolist()
    assert datasets.digits("test").tensors[1].tolist() == every_fifth


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


def without_network(load, nowhere=NOWHERE):
    """Call a loader where every download fails; return its error and number of waits."""
    tv.MNIST.mirrors = [nowhere]
    tv.FashionMNIST.mirrors = [nowhere]
    tv.CIFAR10.url = nowhere
    slept, sleep = [], time.sleep
    time.sleep = slept.append
    try:
        load()
    except BadInput as error:
        return str(error), len(slept)
    finally:
        time.sleep = sleep


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_no_network_is_one_sentence(monkeypatch, name):
    for cls in (tv.MNIST, tv.FashionMNIST):
        monkeypatch.setattr(cls, "mirrors", cls.mirrors)
    monkeypatch.setattr(tv.CIFAR10, "url", tv.CIFAR10.url)
    message, waits = without_network(lambda: datasets.load(name))
    assert "could not be downloaded (" in message
    assert "Connection refused" in message
    assert "use the dataset 'digits', which needs none" in message
    assert "\n" not in message
    assert waits == 0  # it says so at once, without trying again


def test_no_network_reaches_every_rank():
    nowhere = NOWHERE  # each rank would hold another port

    def train():
        dist.init_process_group("gloo")
        answer = without_network(datasets.mnist, nowhere)
        dist.destroy_process_group()
        return answer

    answers = run_ranks(train, 3, timeout=PATIENCE)
    assert len({message for message, _ in answers}) == 1
    assert "use the dataset 'digits'" in answers[0][0]


def fails_with(error):
    """Return a class like torchvision's that fails where it downloads."""

    class Failing(Dataset):
        def __init__(self, root, train, transform, download):
            raise error

    return Failing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_no_room_is_not_called_no_network(storage, code):
    failing = fails_with(OSError(code, os.strerror(code)))
    with pytest.raises(
        BadInput, match=r"cannot be written to .*set WORKSHOP_STORA"
    ) as e:
        downloaded._from_torchvision(failing, "train")
    assert f"{storage / 'datasets'} ({os.strerror(code)})" in str(e.value)
    assert "network" not in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError("timed out"),
        http.client.IncompleteRead(b""),
        ConnectionResetError("reset by peer"),
        RuntimeError("File not found or corrupted."),  # a wrong file was downloaded
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_download_that_breaks_is_called_no_network(error):
    with pytest.raises(
        BadInput, match=r"could not be downloaded .*connect to a network"
    ):
        downloaded._from_torchvision(fails_with(error), "train")


def damage_mnist(storage, content):
    folder = storage / "datasets" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, _ in tv.MNIST.resources:
        (folder / name.removesuffix(".gz")).write_bytes(content)
    return folder.parent


CUT = bytes([0, 0, 8, 3, 0, 0, 0xEA, 0x60, 0, 0, 0, 28, 0, 0, 0, 28, 1, 2, 3])


@pytest.mark.parametrize(
    "content", [b"", CUT, b"<html>"], ids=["empty", "cut", "other"]
)
def test_damaged_download_is_named(storage, content):
    folder = damage_mnist(storage, content)
    with pytest.raises(BadInput, match=r"is damaged .*delete this folder") as e:
        datasets.mnist()
    assert f"downloaded to {folder} is" in str(e.value)
    assert "network" not in str(e.value)
    assert "\n" not in str(e.value)


def test_damaged_download_reaches_every_rank(storage):
    """An error of any type: the other ranks would wait for ever."""
    damage_mnist(storage, b"")

    def train():
        dist.init_process_group("gloo")
        answer = without_network(datasets.mnist)
        dist.destroy_process_group()
        return answer

    answers = run_ranks(train, 2, timeout=PATIENCE)
    assert len({message for message, _ in answers}) == 1
    assert "is damaged" in answers[0][0]


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


def test_downloaded_once_by_one_rank(storage):
    """Which one does not matter, nor whether there is a process group."""

    def train():
        return downloaded._from_torchvision(Fake, "train").split

    assert run_ranks(train, 3, timeout=PATIENCE) == ["train"] * 3
    assert len((storage / "datasets" / "downloads").read_text().splitlines()) == 1


def test_downloaded_once_on_every_node(tmp_path):
    """Two "nodes" of two ranks each that share no folder."""

    def train():
        rank = int(os.environ["RANK"])
        os.environ["WORKSHOP_STORAGE"] = str(tmp_path / f"node {rank // 2}")
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return downloaded._from_torchvision(Fake, "test").split

    assert run_ranks(train, 4, timeout=PATIENCE) == ["test"] * 4
    for node in range(2):
        log = tmp_path / f"node {node}" / "datasets" / "downloads"
        assert len(log.read_text().splitlines()) == 1


class FakeMNIST(Fake):
    """A little of what MNIST has, downloaded as slowly."""

    def __len__(self):
        return 16

    def __getitem__(self, number):
        return torch.full([1, 28, 28], number / 16), number % 10


@pytest.mark.slow
def test_ranks_of_a_script_do_not_download_at_the_same_time(storage):
    """The script needs the number of images before it has a process group."""

    def call() -> None:
        tv.MNIST = FakeMNIST
        arguments = ["--dataset", "mnist", "--batch-size", "4", "--epochs", "1"]
        sys.argv = ["train_ddp.py", *arguments, "--smoke-test"]
        scripts.load(scripts.TRAIN_DDP).main()

    run_ranks(call, 2, timeout=PATIENCE)
    assert len((storage / "datasets" / "downloads").read_text().splitlines()) == 1


def test_data_in_a_folder_that_is_read_only(small_disk, monkeypatch):
    """Somebody has downloaded it for all."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(small_disk.parent / "own"))
    folder = small_disk.parent / "own" / "datasets"
    folder.parent.mkdir()
    folder.symlink_to(small_disk)
    (small_disk / "fake").write_text("data")
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True, timeout=PATIENCE)
    assert downloaded._from_torchvision(Fake, "train").split == "train"
    assert os.listdir(small_disk) == ["fake"]
    with pytest.raises(BadInput, match="cannot be written to"):
        downloaded._from_torchvision(FakeElsewhere, "train")


def test_a_file_system_that_locks_no_file_is_not_called_damaged(monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(BadInput, match=r"locks no file \(No locks available\): set"):
        downloaded._from_torchvision(Fake, "train")


class FakeElsewhere(Fake):
    """One that is not there yet."""

    name = "another"


def test_downloaded_without_a_process_group(storage):
    for split in ("train", "test"):
        assert downloaded._from_torchvision(Fake, split).split == split
    assert (storage / "datasets" / "downloads").read_text() == "downloads\n"


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
