"""What torchvision downloads: by one process, or a sentence says what to do."""

import contextlib
import errno
import http.client
import urllib.error

from filelock import FileLock
from torch.utils.data import Dataset
from torchvision import datasets as tv
from torchvision.transforms import ToTensor

from utils.datasets.shipped import check_split
from utils.errors import BadInput
from utils.settings import storage_path

_NETWORK = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
)
# What torchvision says in a RuntimeError when no mirror gave it the file.
_NOT_DOWNLOADED = ("Error downloading", "File not found or corrupted")
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOLCK, errno.EOPNOTSUPP),  # of NFS without its lock service
)


def mnist(split: str = "train") -> Dataset:
    """Load MNIST by torchvision, 60,000 and 10,000 images of shape [1, 28, 28].

    Downloaded at the first call into `storage_path() / "datasets"`, by one process of all
    that share this folder.

    Raises:
        BadInput: `split` is neither "train" nor "test"; or it has not been downloaded yet
            and there is no network or no room for it, or what was downloaded is damaged.
    """
    return _from_torchvision(tv.MNIST, split)


def fashion_mnist(split: str = "train") -> Dataset:
    """Load FashionMNIST: clothes instead of digits, otherwise like `mnist`."""
    return _from_torchvision(tv.FashionMNIST, split)


def cifar10(split: str = "train") -> Dataset:
    """Load CIFAR-10, 50,000 and 10,000 images of shape [3, 32, 32], else like `mnist`."""
    return _from_torchvision(tv.CIFAR10, split)


def _from_torchvision(dataset_class: type, split: str) -> Dataset:
    check_split(split)
    root = storage_path() / "datasets"
    name = dataset_class.__name__

    def open_dataset(download: bool) -> Dataset:
        return dataset_class(
            root, train=split == "train", transform=ToTensor(), download=download
        )

    # not there, damaged, or still being written: torchvision checks sizes or checksums
    with contextlib.suppress(Exception):
        return open_dataset(download=False)
    try:
        # Whoever comes first downloads, on every node that has a folder of its own. The
        # others wait, and find it there. The kernel's lock (flock) ends with its process,
        # and on NFS holds between machines, too (flock(2)); on a file system without it,
        # filelock takes a file whose existence is the lock.
        with FileLock(root / f".{name}.lock"):  # makes `root`, too
            return open_dataset(download=True)
    except Exception as error:  # a damaged file may raise anything
        fix = "or use the dataset 'digits', which is here and needs no network."
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, _NETWORK) or str(error).startswith(_NOT_DOWNLOADED):
            problem = f"{name} could not be downloaded ({why}): connect to a network "
            problem += "and try again"
        elif isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            problem = f"{name} cannot be written to {root} ({error.strerror}): set "
            problem += "WORKSHOP_STORAGE to a folder with room that you can write to"
        else:
            there = root / name if (root / name).exists() else root
            problem = f"What was downloaded to {there} is damaged ({why}): delete this "
            problem += "folder, so that it is downloaded again"
        raise BadInput(f"{problem}, {fix}") from error
