"""The datasets that the lessons train on: digits and text that ship with it, and more.

Every image dataset is a torch Dataset of pairs (image, label): image a float32 tensor of
shape [channels, height, width] with values from 0 to 1, label an integer from 0 to 9.
Text is a Dataset of pairs (tokens, the tokens that follow them).
"""

import errno
import hashlib
import http.client
import io
import lzma
import os
import urllib.error
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets as tv
from torchvision.transforms import ToTensor

from utils.settings import storage_path

DIGITS_FILE = Path(__file__).parent / "data" / "digits.npz"
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"

TEXT_FILE = Path(__file__).parent / "data" / "python_topics.txt.xz"
TEXT_SHA256 = "ea19723be49a25e432d8272fa5e3b3dbb3e66912c4344e5bc7c6b69eabfbbe29"


def digits(split: str = "train") -> TensorDataset:
    """Handwritten digits, shipped with the workshop: 1,437 to train on, 360 to test on.

    Images are float32 of shape [1, 28, 28]: the 8 x 8 originals, enlarged. Every fifth
    image belongs to the test split.

    Source: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits,
    https://doi.org/10.24432/C50P49 (CC BY 4.0).

    Raises:
        ValueError: `split` is neither "train" nor "test".
        OSError: the file is missing or its SHA-256 checksum is not the expected one.
    """
    _check_split(split)
    with np.load(io.BytesIO(_read_verified(DIGITS_FILE, DIGITS_SHA256))) as file:
        images = (
            torch.from_numpy(file["images"]).float()[:, None] / 16
        )  # [1797, 1, 8, 8]
        labels = torch.from_numpy(file["labels"]).long()
    is_test = torch.arange(len(labels)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    enlarged = F.interpolate(images[chosen], size=(28, 28), mode="bilinear")
    return TensorDataset(enlarged, labels[chosen])


def mnist(split: str = "train") -> Dataset:
    """MNIST through torchvision, 60,000 and 10,000 images of shape [1, 28, 28].

    Downloaded at the first call, by rank 0 alone, into `storage_path() / "datasets"`.

    Raises:
        ValueError: `split` is neither "train" nor "test".
        OSError: it has not been downloaded yet and there is no network, there is no
            room for it, or what was downloaded is damaged.
    """
    return _from_torchvision(tv.MNIST, split)


def fashion_mnist(split: str = "train") -> Dataset:
    """FashionMNIST: clothes instead of digits, otherwise like `mnist`."""
    return _from_torchvision(tv.FashionMNIST, split)


def cifar10(split: str = "train") -> Dataset:
    """CIFAR-10, 50,000 and 10,000 images of shape [3, 32, 32], otherwise like `mnist`."""
    return _from_torchvision(tv.CIFAR10, split)


def text(
    split: str = "train", block_size: int = 64, path: str | Path | None = None
) -> TensorDataset:
    """Text to predict byte by byte: Python's own `help()` topics, or the file `path`.

    Pairs (inputs, targets), both int64 of shape [block_size] with
    values from 0 to 255: targets are the inputs moved on by one byte. The last tenth of
    the text is the test split.

    Source: `pydoc_data.topics` of CPython 3.11.7, 466,273 bytes (PSF licence).

    Raises:
        ValueError: `split` is neither "train" nor "test", or the text is too short.
        OSError: the file cannot be read, or the shipped one is not the expected one.
    """
    _check_split(split)
    if path is None:
        raw = lzma.decompress(_read_verified(TEXT_FILE, TEXT_SHA256))
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise OSError(
                f"The text {path} cannot be read ({error.strerror}): name a text file."
            ) from None
    boundary = len(raw) - len(raw) // 10
    raw = raw[:boundary] if split == "train" else raw[boundary:]
    blocks = (len(raw) - 1) // block_size
    if blocks < 1:
        raise ValueError(
            f"The {split} split has {len(raw)} bytes, too few for one block of "
            f"{block_size}: name a longer text, or lower block_size."
        )
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    inputs, targets = tokens[: blocks * block_size], tokens[1 : blocks * block_size + 1]
    return TensorDataset(inputs.view(blocks, -1), targets.view(blocks, -1))


def share_of_batch(
    dataset: TensorDataset, step: int, global_batch: int, rank: int, world_size: int
) -> tuple[torch.Tensor, ...]:
    """What `rank` gets of the batch of `step`: `global_batch / world_size` examples.

    Depends on nothing else: a run that is resumed, also on another number of ranks, sees
    the same batches. Every epoch has an order of its own; its last, short batch is left
    out. Returns the tensors of the dataset, each [global_batch / world_size, ...].

    Raises:
        ValueError: the ranks cannot share the batch equally, or it exceeds the dataset.
    """
    if global_batch % world_size:
        raise ValueError(
            f"{world_size} ranks cannot share a batch of {global_batch} equally: choose "
            f"a multiple of {world_size}."
        )
    steps_per_epoch = len(dataset) // global_batch
    if steps_per_epoch == 0:
        raise ValueError(
            f"The global batch of {global_batch} exceeds the {len(dataset)} examples: "
            "lower the batch size or the number of workers."
        )
    epoch, step = divmod(step, steps_per_epoch)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
    return dataset[
        order[step * global_batch : (step + 1) * global_batch][rank::world_size]
    ]


DATASETS = {f.__name__: f for f in (digits, mnist, fashion_mnist, cifar10)}


def load(name: str, split: str = "train") -> Dataset:
    """The dataset called `name`, one of the keys of DATASETS.

    Raises:
        ValueError: there is no dataset of that name.
    """
    if name not in DATASETS:
        raise ValueError(
            f"There is no dataset {name!r}: choose one of {', '.join(DATASETS)}."
        )
    return DATASETS[name](split)


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, but must be 'train' or 'test'.")


def _read_verified(path: Path, sha256: str) -> bytes:
    """The bytes of a shipped file, if they are the bytes that were shipped."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"The dataset file {path} cannot be read ({error.strerror}): restore it with "
            f"`git checkout -- utils/data`."
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise OSError(
            f"The dataset file {path} is damaged (its checksum is wrong): restore it "
            f"with `git checkout -- utils/data`."
        )
    return data


def _from_torchvision(dataset_class: type, split: str) -> Dataset:
    _check_split(split)
    root = storage_path() / "datasets"

    def open_dataset(download: bool) -> Dataset:
        return dataset_class(
            root, train=split == "train", transform=ToTensor(), download=download
        )

    folder = root / dataset_class.__name__

    def complaint() -> str | None:
        """Open it, which downloads it where it is not yet; what to mend, in a sentence."""
        try:
            open_dataset(download=True)
        except Exception as error:  # a damaged file may raise anything
            return _what_to_mend(error, folder)
        return None

    if not dist.is_initialized():
        _raise_if_any([complaint()])
    else:
        # Rank 0 first; then the first rank of every other node, for which the file is
        # there already wherever the folder is shared. All ranks learn of a failure.
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        for is_my_turn in (dist.get_rank() == 0, local_rank == 0):
            errors = [None] * dist.get_world_size()
            dist.all_gather_object(errors, complaint() if is_my_turn else None)
            _raise_if_any(errors)
    return open_dataset(download=False)


_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# What torchvision says in a RuntimeError when no mirror gave it the file.
_NOT_DOWNLOADED = ("Error downloading", "File not found or corrupted")


def _what_to_mend(error: Exception, folder: Path) -> str:
    digits = "or use the dataset 'digits', which is here"
    why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return (
            f"{folder.name} cannot be written to {folder.parent} ({error.strerror}): set "
            f"WORKSHOP_STORAGE to a folder with room that you can write to, {digits}."
        )
    from_network = (urllib.error.URLError, http.client.HTTPException)
    from_network += (ConnectionError, TimeoutError)
    if isinstance(error, from_network) or str(error).startswith(_NOT_DOWNLOADED):
        return (
            f"{folder.name} could not be downloaded ({why}): connect to a network and "
            "try again, or use the dataset 'digits', which needs none."
        )
    folder = folder if folder.exists() else folder.parent
    return (
        f"What was downloaded to {folder} is damaged ({why}): delete this folder, so that "
        f"it is downloaded again, {digits}."
    )


def _raise_if_any(errors: list[str | None]) -> None:
    error = next((e for e in errors if e), None)
    if error:
        raise OSError(error)
