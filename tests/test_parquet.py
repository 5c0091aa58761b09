"""utils.parquet: files are found, and what is not whole is named."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from utils import parquet
from utils.datasets import write_shards
from utils.errors import BadInput

pytestmark = pytest.mark.part02


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Write eight files of 48 rows."""
    folder = tmp_path_factory.mktemp("shards")
    return list(write_shards(folder, 4e-4, image_size=28, rows_per_shard=48))


def test_folders_and_files_of_parquet_are_found(shards):
    system, files = parquet.find_parquet(str(shards[0].parent))
    assert files == [str(path) for path in shards]
    whole, rows, corrupt = parquet.check_parquet(system, files, ["image", "label"])
    assert (whole, rows, corrupt) == (files, 8 * 48, [])
    assert parquet.find_parquet(str(shards[3]))[1] == [str(shards[3])]


def test_paths_that_do_not_exist_or_hold_nothing_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere cannot be read .*correct --data-path"):
        parquet.find_parquet(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match=r"There is no \.parquet file in"):
        parquet.find_parquet(str(tmp_path))
    with pytest.raises(BadInput, match=r"cannot be read .*correct --data-path"):
        parquet.find_parquet("nonsense://bucket/folder")


def test_a_folder_without_access_is_named(tmp_path, monkeypatch):
    class Locked:
        @classmethod
        def from_uri(cls, uri):
            return cls(), uri

        def get_file_info(self, path):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(parquet.fs, "FileSystem", Locked)
    with pytest.raises(BadInput, match=r"Permission denied.*your access to it"):
        parquet.find_parquet(str(tmp_path))


def test_missing_columns_are_named(tmp_path):
    pq.write_table(pa.table({"picture": [b""], "label": [1]}), tmp_path / "a.parquet")
    system, files = parquet.find_parquet(str(tmp_path))
    with pytest.raises(BadInput, match=r"no column image \(it has picture, label\)"):
        parquet.check_parquet(system, files, ["image", "label"])


def test_corrupt_files_fail_by_name_or_are_left_out(tmp_path):
    paths = list(write_shards(tmp_path, 1e-4, image_size=28, rows_per_shard=48))
    paths[1].write_bytes(paths[1].read_bytes()[:1000])  # an upload that was cut off
    system, files = parquet.find_parquet(str(tmp_path))
    with pytest.raises(BadInput, match=r"shard-00001\.parquet is not a whole Parquet"):
        parquet.check_parquet(system, files, ["image"])
    whole, rows, corrupt = parquet.check_parquet(system, files, ["image"], True)
    assert corrupt == [str(paths[1])]
    assert rows == 48 * (len(paths) - 1) == 48 * len(whole)
    with pytest.raises(BadInput, match="All Parquet files are corrupt"):
        parquet.check_parquet(system, corrupt, ["image"], True)


@pytest.mark.parametrize("skip_corrupt", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError("When reading 'a': AWS Error ACCESS_DENIED"),
    ],
)
def test_a_file_without_access_is_not_called_corrupt(
    shards, monkeypatch, error, skip_corrupt
):
    """And not left out: it would be missed."""

    def no_access(*_, **__):
        raise error

    monkeypatch.setattr(parquet.pq, "ParquetFile", no_access)
    system, files = parquet.find_parquet(str(shards[0]))
    with pytest.raises(BadInput, match=r"cannot be read .*correct your access to it"):
        parquet.check_parquet(system, files, ["image"], skip_corrupt)
