"""What can be wrong with a run, its folder and its files, found before it starts.

Import `utils.cluster` first: it sets what Ray reads when it is imported.
"""

import contextlib
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from pyarrow import fs
from ray.train import UserCallback
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from utils.settings import check_writable, storage_path

# In what S3 and GCS say of access and networks; errors of files have a number instead.
_OF_A_STORE = ("AWS Error", "google::cloud")


class NoRestartOnBadInput(UserCallback):
    """For `RunConfig(callbacks=[...])`: a restart is for workers that died.

    Bad input, for which a worker raises a ValueError, or which a task of Ray Data cannot
    read or decode, would fail again: the run ends at once, although `FailureConfig` allows
    a restart.
    """

    def after_exception(self, run_context, worker_exceptions) -> None:
        """Raises the first such error. Runs in Ray Train's controller."""
        unreadable = (OSError, pa.ArrowException, ray.exceptions.UserCodeException)
        for error in worker_exceptions.values():
            in_task = isinstance(error, ray.exceptions.RayTaskError)
            if isinstance(error, ValueError) or (
                in_task and isinstance(error.cause, (ValueError, *unreadable))
            ):
                raise error


def check_counts(**counts: int | None) -> None:
    """Check that numbers of the command line, such as `epochs`, are at least 1 if given.

    Raises:
        ValueError: one of them is not.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {count}, but has to be at least 1.")


def find_run(name: str, folder: Path | None, resume: bool) -> tuple[str, Path]:
    """Name and folder of a run: Ray resumes a run that has both in common with it.

    Without a `folder` it is a new run in `storage_path()`.

    Raises:
        ValueError: there is nothing to resume from, or a run that is not to be resumed.
        OSError: the run to resume is not there, or `folder` cannot be written to.
    """
    if not folder:
        if resume:
            raise ValueError(
                "--resume needs --checkpoint-dir: say where to resume from."
            )
        return f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}", storage_path()
    exists = (folder / name).exists()
    if resume and not exists:
        raise OSError(f"There is no run in {folder} to resume: leave out --resume.")
    if exists and not resume:
        raise ValueError(
            f"{folder} holds an earlier run: add --resume to go on from it, or name "
            "another folder."
        )
    check_writable(folder)
    return name, folder


def find_parquet(path: str) -> tuple[fs.FileSystem, list[str]]:
    """The Parquet files at `path`: a file or a folder, local, s3:// or gs://.

    Returns the file system and the files' paths in it, sorted by name.

    Raises:
        OSError: it does not exist, cannot be read, or holds no Parquet file.
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
        raise OSError(
            f"The data at {path} cannot be read ({str(error).splitlines()[0]}): correct "
            "--data-path, or your access to it."
        ) from None
    files = sorted(i.path for i in infos if i.is_file and i.extension == "parquet")
    if not files:
        raise OSError(f"There is no .parquet file in {path}: correct --data-path.")
    return system, files


def check_parquet(
    system: fs.FileSystem,
    files: list[str],
    columns: list[str],
    skip_corrupt: bool = False,
    pages: bool | None = None,
) -> tuple[list[str], int, list[str]]:
    """Find out which files are whole, and how many rows they have.

    Returns the whole files, the number of their rows, and the corrupt files. Reads their
    footers, a few KB per file, and all of the columns if `pages` (default: if
    `skip_corrupt`, as a file can only be left out before a run has begun).

    Raises:
        ValueError: a file lacks one of `columns`; is corrupt, unless `skip_corrupt`; or
            all are.
        OSError: a file may be whole, but cannot be read.
    """

    pages = skip_corrupt if pages is None else pages

    def read(file: str):
        try:
            with pq.ParquetFile(
                file, filesystem=system, page_checksum_verification=True
            ) as parquet:
                for group in range(parquet.num_row_groups if pages else 0):
                    parquet.read_row_group(group, columns)
                return parquet.metadata
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            if getattr(error, "errno", None) or any(s in reason for s in _OF_A_STORE):
                raise OSError(
                    f"{file} cannot be read ({reason}): correct your access to it."
                ) from None
            if skip_corrupt:
                return None
            raise ValueError(
                f"{file} is not a whole Parquet file ({reason}): replace it, or leave "
                "such files out with --on-corrupt skip."
            ) from None

    with ThreadPoolExecutor(16) as pool:
        footers = dict(zip(files, pool.map(read, files)))
    whole = {file: footer for file, footer in footers.items() if footer}
    for file, footer in whole.items():
        names = footer.schema.to_arrow_schema().names
        if missing := [column for column in columns if column not in names]:
            raise ValueError(
                f"{file} has no column {', '.join(missing)} (it has {', '.join(names)}): "
                "rename its columns, or correct --data-path."
            )
    if not whole:
        raise ValueError("All Parquet files are corrupt: there is nothing to train on.")
    num_rows = sum(footer.num_rows for footer in whole.values())
    return list(whole), num_rows, [file for file in files if file not in whole]


def check_batch_size(batch_size: int, num_rows: int, num_workers: int) -> None:
    """Check that every worker gets at least one whole batch.

    Raises:
        ValueError: its shard, a `num_workers`-th of the rows, is smaller.
    """
    shard = num_rows // num_workers
    if batch_size > shard:
        raise ValueError(
            f"The batch size is {batch_size}, but each of {num_workers} workers gets "
            f"{shard} of the {num_rows} rows: lower --batch-size or --num-workers, or "
            "use more data."
        )


def check_shared(folder: str | Path) -> None:
    """Check that every node of the cluster sees what this process sees in `folder`.

    `folder` may be a file, too. Nothing is checked where there is one node, or where
    `folder` is an address (s3://, gs://).

    Raises:
        OSError: a node does not see a file that is there, written now if that is possible.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    folder = str(folder).removeprefix("file://")
    if len(nodes) < 2 or "://" in folder:
        return
    folder = Path(folder).expanduser().absolute()
    there = marker = folder / f".shared-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError:  # data that may only be read: any file of it
        there = next(folder.iterdir(), folder) if folder.is_dir() else folder
    look = ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
    on_node = [NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in nodes]
    try:
        seen = ray.get(
            [look.options(scheduling_strategy=n).remote(str(there)) for n in on_node]
        )
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()
    blind = [n["NodeManagerAddress"] for n, sees in zip(nodes, seen) if not sees]
    if blind:
        raise OSError(
            f"{folder} is not shared: node(s) {', '.join(blind)} do not see "
            f"{there.name} in it. Name a folder that all nodes mount."
        )
