"""utils.parquet: files are found, and what is not whole is named."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from utils import parquet
from utils.datasets import write_shards
from utils.errors import BadInput


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Write eight files of 48 rows."""
    folder = tmp_path_factory.mktemp("shards")
    return list(write_shards(folder, 4e-4, image_size=28, rows_per_shard=48))


def test_folders_and_files_of_parquet_are_found(shards):
    system, files = parquet.find_parquet(str(shards[0].parent))
    assert files == [str(path) for path in shards]
    assert parquet.count_rows(system, files) == dict.fromkeys(files, 48)
    assert parquet.find_parquet(str(shards[3]))[1] == [str(shards[3])]


def test_what_is_kept_beside_a_file_is_not_trained_on(shards, tmp_path):
    """An editor's copy would train its rows twice; a Mac's second file is no Parquet."""
    for name in ("a.PARQUET", ".ipynb_checkpoints/a-checkpoint.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(shards[0], tmp_path / name)
    for name in ("_SUCCESS", "._a.parquet", ".a.parquet.crc"):
        (tmp_path / name).write_bytes(b"x")
    rows = parquet.count_rows(*parquet.find_parquet(str(tmp_path)))
    assert rows == {str(tmp_path / "a.PARQUET"): 48}


def test_paths_that_do_not_exist_or_hold_nothing_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere cannot be read .*correct --data-path"):
        parquet.find_parquet(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match=r"There is no \.parquet file in"):
        parquet.find_parquet(str(tmp_path))
    with pytest.raises(BadInput, match=r"cannot be read .*correct --data-path"):
        parquet.find_parquet("nonsense://bucket/folder")


def test_missing_columns_are_named(tmp_path):
    pq.write_table(pa.table({"picture": [b""], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"no column image \(it has picture, label\)"):
        parquet.count_rows(*parquet.find_parquet(str(tmp_path)))


PNG = [b"not opened here"] * 2


def test_a_column_that_is_there_twice_is_named(tmp_path):
    names = ["image", "label", "label"]
    pq.write_table(pa.table([PNG, [0, 1], [0, 1]], names), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="has a column label twice"):
        parquet.count_rows(*parquet.find_parquet(str(tmp_path)))


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        ([[0, 1], [2, 3]], [0, 1], "column image .* of type list"),
        (["a", "b"], [0, 1], "column image .* of type string"),
        (PNG, ["cat", "dog"], "column label .* of type string"),
        (PNG, [0.5, 1.0], "column label .* of type double"),
        (PNG, [None, None], "column label .* of type null"),
        (PNG, [1, None], "A label .* is null"),
        (PNG, [1, 10], "A label .* is 10,"),
        (PNG, [1, -100], "A label .* is -100,"),
    ],
)
def test_columns_that_cannot_be_trained_on_are_named(
    tmp_path, images, labels, sentence
):
    table = pa.table({"image": images, "label": labels})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=sentence):
        parquet.count_rows(*parquet.find_parquet(str(tmp_path)))


def test_images_as_hugging_face_stores_them_are_those_in_the_bytes(shards, tmp_path):
    table = pq.read_table(shards[0])
    stored = [{"bytes": image, "path": None} for image in table["image"].to_pylist()]
    labels = table["label"]
    pq.write_table(pa.table({"image": stored, "label": labels}), tmp_path / "a.parquet")
    files = parquet.find_parquet(str(tmp_path))
    assert [*parquet.count_rows(*files).values()] == [48]
    plain, theirs = (
        parquet.decode(
            {"image": images, "label": labels.to_pylist(), "path": [""] * 48}
        )
        for images in (table["image"].to_pylist(), stored)
    )
    assert (plain["image"] == theirs["image"]).all() and plain["image"].any()


def test_corrupt_files_fail_by_name_or_are_left_out(shards, tmp_path):
    """One was cut off by an upload; of another a page is damaged, not its footer."""
    for path in shards[:3]:
        shutil.copy(path, tmp_path)
    cut, damaged = (tmp_path / path.name for path in shards[1:3])
    pq.write_table(pq.read_table(damaged), damaged, write_page_checksum=True)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 4] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(BadInput, match=rf"{damaged.name} is not a whole Parquet file"):
        parquet.check_pages(str(tmp_path))
    cut.write_bytes(cut.read_bytes()[:1000])
    system, files = parquet.find_parquet(str(tmp_path))
    with pytest.raises(BadInput, match=rf"{cut.name} is not a whole Parquet file"):
        parquet.count_rows(system, files)
    assert parquet.count_rows(system, files, skip_corrupt=True) == {files[0]: 48}
    with pytest.raises(BadInput, match="All Parquet files are corrupt"):
        parquet.count_rows(system, files[1:], skip_corrupt=True)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError("When reading 'a': AWS Error ACCESS_DENIED"),
    ],
)
def test_a_file_without_access_is_not_called_corrupt(shards, monkeypatch, error):
    """Nor left out as if it were: it would be missed."""

    def no_access(*_, **__):
        raise error

    monkeypatch.setattr(parquet.pq, "ParquetFile", no_access)
    system, files = parquet.find_parquet(str(shards[0]))
    with pytest.raises(BadInput, match=r"cannot be read .*correct your access to it"):
        parquet.count_rows(system, files, skip_corrupt=True)
