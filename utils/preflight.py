"""What can be wrong with a run that streams from files, found before it starts."""

import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


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
    except (OSError, pa.ArrowException) as error:
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
            if skip_corrupt:
                return None
            reason = str(error).splitlines()[0]
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


def check_spare_cpus(num_workers: int) -> None:
    """Check that a CPU is left for Ray Data when every worker has taken one.

    Raises:
        RuntimeError: none is left; reading and decoding would wait for ever.
    """
    cpus = ray.cluster_resources().get("CPU", 0)
    if cpus < num_workers + 1:
        raise RuntimeError(
            f"The cluster has {cpus:g} CPUs and {num_workers} workers take one each, so "
            "none is left to read and decode the data: lower --num-workers, or start Ray "
            f"with at least {num_workers + 1} CPUs."
        )


def check_shared(folder: str | Path) -> None:
    """Check that every node of the cluster sees the same files in `folder`.

    Raises:
        OSError: a node does not see a file that this process has just written there.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
        text = uuid.uuid4().hex
        Path(file.name).write_text(text)

        @ray.remote(num_cpus=0, max_retries=0)
        def sees_it() -> bool:
            path = Path(file_name)
            return path.exists() and path.read_text() == text

        file_name = file.name
        nodes = [node for node in ray.nodes() if node["Alive"]]
        seen = ray.get(
            [
                sees_it.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        node["NodeID"], soft=False
                    )
                ).remote()
                for node in nodes
            ]
        )
    blind = [n["NodeManagerAddress"] for n, sees in zip(nodes, seen) if not sees]
    if blind:
        raise OSError(
            f"The storage path {folder} is not shared: node(s) {', '.join(blind)} do not "
            "see a file written there. Name a folder that all nodes mount, or s3://."
        )
