"""Parquet files of images: found in a folder or a store, checked, and decoded.

Without torch: what runs in tasks of Ray Data imports this, and a process starts faster.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import fs

from utils.errors import BadInput

COLUMNS = ["image", "label"]  # the bytes of an image, and an integer from 0 to 9
CLASSES = 10
CORRUPT = -100  # label of an image that cannot be decoded: cross_entropy ignores it

# In what S3 and GCS say of access and networks; errors of files have a number instead.
_OF_A_STORE = ("AWS Error", "google::cloud")


def decode(batch: dict, on_corrupt: str = "fail") -> dict[str, np.ndarray]:
    """Decode images of any format and size to float32, [n, 1, 28, 28], from 0 to 1.

    For `map_batches` of a Ray Dataset, in tasks on CPUs.

    Args:
        batch: columns "image" (bytes, or as Hugging Face's datasets store them: a
            dictionary with "bytes"), "label" and "path", each of length n.
        on_corrupt: what to do with an image that cannot be decoded. "fail": raise; "skip":
            it turns black and gets the label CORRUPT, and so can be counted.

    Raises:
        BadInput: an image cannot be decoded; says in which file.
    """
    images = np.zeros([len(batch["image"]), 1, 28, 28], dtype=np.float32)
    labels = np.array(batch["label"], dtype=np.int64)
    for row, encoded in enumerate(batch["image"]):
        try:
            encoded = encoded["bytes"] if isinstance(encoded, dict) else encoded
            image = Image.open(io.BytesIO(encoded)).convert("L")
            images[row] = np.asarray(image.resize([28, 28], Image.Resampling.BOX)) / 255
        except Exception as error:  # a damaged image may raise anything
            if on_corrupt == "fail":
                raise BadInput(
                    f"An image in {batch['path'][row]} is corrupt ({error}): replace the "
                    "file, or leave such images out with --on-corrupt skip."
                ) from error
            labels[row] = CORRUPT
    return {"image": images, "label": labels}


def find_for_workers(path: str, args) -> tuple[fs.FileSystem, list[str]]:
    """Return the whole Parquet files at `path`, as `find_parquet` returns them.

    Prints how many rows they have, and which files are left out.

    Args:
        path: a file or a folder.
        args: the command line: `num_workers`, their `batch_size`, and
            `on_corrupt`, "fail" or "skip".

    Raises:
        BadInput: as `find_parquet` and `count_rows` do; or a worker would not
            get a batch.
    """
    from utils import datasets  # here, in the driver: it imports torch

    system, files = find_parquet(path)
    rows = count_rows(system, files, skip_corrupt=args.on_corrupt == "skip")
    if corrupt := [file for file in files if file not in rows]:
        print(f"Left out {len(corrupt)} corrupt file(s): {', '.join(corrupt)}")
    num_rows = sum(rows.values())
    datasets.check_batch_size(args.batch_size, num_rows, args.num_workers)
    shard = num_rows // args.num_workers
    print(f"{num_rows} rows to train on, {shard} for each worker")
    return system, list(rows)


def find_parquet(path: str) -> tuple[fs.FileSystem, list[str]]:
    """Return the Parquet files at `path`: a file or a folder, local, s3:// or gs://.

    Returns the file system and the files' paths in it, sorted by name. Below a folder, what
    begins with a dot or an underscore is left out.

    Raises:
        BadInput: it does not exist, cannot be read, or holds no Parquet file.
    """
    uri = path if "://" in path else str(Path(path).expanduser().absolute())
    try:
        system, root = fs.FileSystem.from_uri(uri)
        info = system.get_file_info(root)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError("there is nothing of that name")
        infos = [info]
        if info.type == fs.FileType.Directory:
            infos = system.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, ImportError, pa.ArrowException) as error:
        raise BadInput(
            f"The data at {path} cannot be read ({str(error).splitlines()[0]}): correct "
            "--data-path, or your access to it."
        ) from error
    files = sorted(
        info.path
        for info in infos
        if info.is_file
        and info.extension.lower() == "parquet"
        # as Spark and Arrow skip them: what an editor or a Mac keeps beside a file
        and not any(part[0] in "._" for part in _below(info.path, root))
    )
    if not files:
        raise BadInput(f"There is no .parquet file in {path}: correct --data-path.")
    return system, files


def _below(path: str, root: str) -> list[str]:
    """Return the names on the way from a folder to a file in it; none of a file."""
    return [part for part in path[len(root) :].split("/") if part]


def count_rows(
    system: fs.FileSystem,
    files: list[str],
    skip_corrupt: bool = False,
    whole: bool = False,
) -> dict[str, int]:
    """Return the number of rows of each file; `skip_corrupt` leaves out corrupt ones.

    Reads their footers and labels, and with `whole` or `skip_corrupt` all images, too: a
    file can only be left out before a run has begun.

    Raises:
        BadInput: a file cannot be read, or lacks a column, or has another type or another
            label in it; or is corrupt, unless `skip_corrupt`; or all are.
    """

    def count(file: str) -> int | None:
        labels = []
        try:
            with pq.ParquetFile(
                file, filesystem=system, page_checksum_verification=True
            ) as parquet:
                schema = parquet.schema_arrow
                names = schema.names
                columns = COLUMNS if whole or skip_corrupt else ["label"]
                for group in range(parquet.num_row_groups):
                    if all(names.count(column) == 1 for column in COLUMNS):
                        table = parquet.read_row_group(group, columns)
                        labels.append(table["label"])
                num_rows = parquet.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            if getattr(error, "errno", None) or any(s in reason for s in _OF_A_STORE):
                raise BadInput(
                    f"{file} cannot be read ({reason}): correct your access to it."
                ) from error
            if skip_corrupt:
                return None
            raise BadInput(
                f"{file} is not a whole Parquet file ({reason}): replace it, or leave "
                "such files out with --on-corrupt skip."
            ) from error
        if missing := [column for column in COLUMNS if column not in names]:
            raise BadInput(
                f"{file} has no column {', '.join(missing)} (it has {', '.join(names)}): "
                "rename its columns, or correct --data-path."
            )
        if twice := [column for column in COLUMNS if names.count(column) > 1]:
            raise BadInput(
                f"{file} has a column {twice[0]} twice: leave one of them out."
            )
        _check_types(file, schema, labels)
        return num_rows

    with ThreadPoolExecutor(16) as pool:
        counted = dict(zip(files, pool.map(count, files)))
    rows = {file: number for file, number in counted.items() if number is not None}
    if not rows:
        raise BadInput("All Parquet files are corrupt: there is nothing to train on.")
    return rows


def _check_types(file: str, schema: pa.Schema, labels: list[pa.ChunkedArray]) -> None:
    image, label = schema.field("image").type, schema.field("label").type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type  # as Hugging Face's datasets store images
    if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
        raise BadInput(
            f"The column image of {file} is of type {image}, but must hold the bytes of "
            "encoded images (PNG, JPEG, ...): write them again, or correct --data-path."
        )
    if not pa.types.is_integer(label):
        raise BadInput(
            f"The column label of {file} is of type {label}, but must hold integers from "
            "0 to 9, the numbers of the classes: write them again."
        )
    for part in labels:
        least, most = pc.min_max(part).as_py().values()
        if part.null_count or (len(part) and not 0 <= least <= most < CLASSES):
            found = "null" if part.null_count else least if least < 0 else most
            raise BadInput(
                f"A label in {file} is {found}, but all must be from 0 to {CLASSES - 1}: "
                "correct it, or leave that row out."
            )


def check_pages(path: str) -> None:
    """Read all images and labels in the Parquet files at `path`, to find the damaged one.

    Raises:
        BadInput: as `find_parquet` and `count_rows` do.
    """
    count_rows(*find_parquet(path), whole=True)
