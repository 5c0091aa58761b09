"""Labelled image shards of any size, to stream: augmented digits, PNG in Parquet files.

A row has three columns: `id` (int64, counts the rows of the whole dataset), `image`
(the bytes of a grayscale PNG) and `label` (int64, 0 to 9).
"""

import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional as F

from utils.checkpoint_files import explain_writing
from utils.datasets.shipped import digits
from utils.errors import BadInput
from utils.settings import storage_path

SCHEMA = pa.schema([("id", pa.int64()), ("image", pa.binary()), ("label", pa.int64())])
BATCH = 32  # images drawn at once, and rows of a Parquet row group: what is in memory


def path_or_digits(path: str | None, size_gb: float) -> tuple[str, str | None]:
    """Return where images to train on are, and, without a `path`, some to test with.

    Then they are digits, written to folders in `storage_path()`: `size_gb` GB to train on,
    and 2 MB of the test split.

    Raises:
        BadInput: as `write_shards` does.
    """
    if path:
        return path, None
    folder = storage_path() / "digits-224"
    shards = write_shards(folder / f"train-{size_gb:g}GB", size_gb, 224, 128)
    tests = write_shards(folder / "test", 0.002, 64, split="test")
    return str(max(shards).parent), str(max(tests).parent)


def write_shards(
    folder: str | Path,
    size_gb: float,
    image_size: int = 224,
    rows_per_shard: int = 256,
    split: str = "train",
) -> Iterator[Path]:
    """Write Parquet files until they hold `size_gb` GB (1e9 bytes); yield their paths.

    Every image is a digit of `split` turned by up to 15 degrees, scaled, shifted and
    noisy, of `image_size` x `image_size` pixels. A file depends on its number and the
    arguments alone, and appears under its name once it is whole: a second call continues
    where the first was interrupted, and a larger dataset begins with the files of a
    smaller one. No more than `BATCH` images are in memory.

    Raises (but for the last, before anything is written):
        BadInput: a number is not positive, or `folder` holds files that were not
            written with these arguments, or not whole; or the disk has no room for
            `size_gb`, or `folder` cannot be written to; or the disk fills up meanwhile.
    """
    arguments = {"size_gb": size_gb, "image_size": image_size, "rows": rows_per_shard}
    wrong = [f"{name} is {value}" for name, value in arguments.items() if value <= 0]
    if wrong:
        raise BadInput(f"{', '.join(wrong)}, but must be positive.")
    folder = Path(folder)
    kind = f"{split}, {image_size} pixels, {rows_per_shard} rows".encode()
    there = sorted(folder.glob("shard-*.parquet"))
    for path in there:
        _check_kind(path, kind)
    _check_disk(folder, size_gb - sum(path.stat().st_size for path in there) / 1e9)
    return _write(
        folder, size_gb, image_size, rows_per_shard, kind, *digits(split).tensors
    )


def _write(folder, size_gb, image_size, rows_per_shard, kind, images, labels):
    written, number = 0, 0
    while written < size_gb * 1e9:
        path = folder / f"shard-{number:05d}.parquet"
        if not path.exists():
            # a name of its own: another run may be writing the same file
            temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
            rows = _rows(number, image_size, rows_per_shard, images, labels)
            try:
                with explain_writing(path):  # the disk may fill up meanwhile
                    schema = SCHEMA.with_metadata({b"shards": kind})
                    with pq.ParquetWriter(
                        temporary, schema, compression="none"
                    ) as file:
                        for columns in rows:
                            file.write_table(pa.table(columns, schema=schema))
                    temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        written += path.stat().st_size
        number += 1
        yield path


def _rows(number, image_size, rows_per_shard, images, labels):
    """Draw the columns of a shard, `BATCH` rows at a time."""
    generator = torch.Generator().manual_seed(number)
    end = (number + 1) * rows_per_shard
    for first in range(number * rows_per_shard, end, BATCH):
        count = min(BATCH, end - first)
        chosen = torch.randint(len(labels), (count,), generator=generator)
        pictures = augment(images[chosen], image_size, generator)
        encoded = [encode_png(picture) for picture in pictures.numpy()]
        yield [list(range(first, first + count)), encoded, labels[chosen].tolist()]


def augment(
    images: torch.Tensor, size: int, generator: torch.Generator
) -> torch.Tensor:
    """Turn, scale, shift and add noise: float [n, 1, h, w] to uint8 [n, size, size]."""
    n, drawn = len(images), min(size, 64)  # larger ones are enlarged: drawing is slow
    angle, scale, x, y = torch.rand(4, n, generator=generator) * 2 - 1  # each [n]
    angle, scale = angle * torch.pi / 12, 1.1 + 0.2 * scale
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = [torch.stack([cos, -sin, x / 8], 1), torch.stack([sin, cos, y / 8], 1)]
    shape = [n, 1, drawn, drawn]
    grid = F.affine_grid(torch.stack(rows, 1), shape, align_corners=False)
    turned = (F.grid_sample(images, grid, align_corners=False) * 215).to(torch.uint8)
    turned = F.interpolate(turned, size=[size, size])[:, 0]
    # One random integer is the noise of eight pixels.
    noise = torch.empty(-(-turned.numel() // 8), dtype=torch.int64)
    noise = noise.random_(generator=generator).view(torch.uint8)[: turned.numel()]
    return turned + noise.reshape(turned.shape) % 32


def encode_png(image: np.ndarray) -> bytes:
    """Return a grayscale PNG, not compressed, of a uint8 image [height, width].

    Noise hardly compresses, and storing it is 20 times faster than Pillow's encoder.

    Source: W3C 2003, Portable Network Graphics specification, https://www.w3.org/TR/png/
    """
    height, width = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grayscale
    pixels = zlib.compress(np.pad(image, ((0, 0), (1, 0))).tobytes(), level=0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _check_kind(path: Path, kind: bytes) -> None:
    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise BadInput(
            f"{path} is not a whole Parquet file: delete it, or name another folder."
        ) from error
    if metadata.get(b"shards") != kind:
        raise BadInput(
            f"{path.parent} holds {path.name}, which was not written with these arguments: "
            "name another folder, or delete this one."
        )


def _check_disk(folder: Path, size_gb: float) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        raise BadInput(
            f"Shards cannot be written to {folder} ({error.strerror}): name a folder "
            "that you can write to."
        ) from error
    if size_gb > 0.95 * free:
        raise BadInput(
            f"{size_gb:.3g} GB more do not fit the disk of {folder}, which has "
            f"{free:.1f} GB free: ask for less, or name a folder on another disk."
        )
