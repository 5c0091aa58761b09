"""What ships with the workshop: handwritten digits, and text to predict byte by byte."""

import hashlib
import io
import lzma
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from utils.errors import BadInput

DATA = Path(__file__).parents[1] / "data"

DIGITS_FILE = DATA / "digits.npz"
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"

TEXT_FILE = DATA / "python_topics.txt.xz"
TEXT_SHA256 = "ea19723be49a25e432d8272fa5e3b3dbb3e66912c4344e5bc7c6b69eabfbbe29"


def digits(split: str = "train") -> TensorDataset:
    """Load the handwritten digits shipped here: 1,437 to train on, 360 to test on.

    Images are float32 of shape [1, 28, 28]: the 8 x 8 originals, enlarged. Every fifth
    image belongs to the test split.

    Source: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits,
    https://doi.org/10.24432/C50P49 (CC BY 4.0).

    Raises:
        BadInput: `split` is neither "train" nor "test"; or the file is missing, or its
            SHA-256 checksum is not the expected one.
    """
    check_split(split)
    with np.load(io.BytesIO(_read_verified(DIGITS_FILE, DIGITS_SHA256))) as file:
        images = torch.from_numpy(file["images"]).float()[:, None] / 16  # [n, 1, 8, 8]
        labels = torch.from_numpy(file["labels"]).long()
    is_test = torch.arange(len(labels)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    enlarged = F.interpolate(images[chosen], size=(28, 28), mode="bilinear")
    return TensorDataset(enlarged, labels[chosen])


def text(
    split: str = "train", block_size: int = 64, path: str | Path | None = None
) -> TensorDataset:
    """Load text to predict by bytes: Python's own `help()` topics, or the file `path`.

    Pairs (inputs, targets), both int64 of shape [block_size] with
    values from 0 to 255: targets are the inputs moved on by one byte. The last tenth of
    the text is the test split.

    Source: `pydoc_data.topics` of CPython 3.11.7, 466,273 bytes (PSF licence).

    Raises:
        BadInput: `split` is neither "train" nor "test"; or the text is too short or cannot
            be read, or the shipped one is not the expected one.
    """
    check_split(split)
    if path is None:
        raw = lzma.decompress(_read_verified(TEXT_FILE, TEXT_SHA256))
    else:
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise BadInput(
                f"The text {path} cannot be read ({error.strerror}): name a text file."
            ) from error
    boundary = len(raw) - len(raw) // 10
    raw = raw[:boundary] if split == "train" else raw[boundary:]
    blocks = (len(raw) - 1) // block_size
    if blocks < 1:
        raise BadInput(
            f"The {split} split has {len(raw)} bytes, too few for one block of "
            f"{block_size}: name a longer text, or lower block_size."
        )
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    inputs, targets = tokens[: blocks * block_size], tokens[1 : blocks * block_size + 1]
    return TensorDataset(inputs.view(blocks, -1), targets.view(blocks, -1))


def check_split(split: str) -> None:
    """Raise BadInput unless `split` is one of the two that every dataset has."""
    if split not in ("train", "test"):
        raise BadInput(f"split is {split!r}, but must be 'train' or 'test'.")


def _read_verified(path: Path, sha256: str) -> bytes:
    """Return the bytes of a shipped file, if they are the bytes that were shipped."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"The dataset file {path} cannot be read ({error.strerror}): restore it with "
            f"`git checkout -- utils/data`."
        ) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BadInput(
            f"The dataset file {path} is damaged (its checksum is wrong): restore it "
            f"with `git checkout -- utils/data`."
        )
    return data
