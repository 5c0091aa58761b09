"""Find Parquet files in a folder or a store, and check that they are whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

# In what S3 and GCS say of access and networks; errors of files have a number instead.
_OF_A_STORE = ("AWS Error", "google::cloud")


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


def check_pages(path: str, columns: list[str]) -> None:
    """Read `columns` of the Parquet files at `path`, to find out which one is damaged.

    Raises:
        ValueError, OSError: as `find_parquet` and `check_parquet` do.
    """
    check_parquet(*find_parquet(path), columns, pages=True)
