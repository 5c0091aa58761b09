"""train_ray_ddp_with_ray_data.py: whole runs with damaged data, and bad input."""

import io
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from unittest.mock import Mock

from utils.cluster import start_ray

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until
from utils.datasets import write_shards
from utils.datasets.shards import encode_png
from utils.errors import BadInput
from utils.launch import run_ranks
from utils.parquet import CORRUPT

pytestmark = pytest.mark.ray

script = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA)


def write_with_a_damaged_page(path, table):
    """Write a file with a whole footer, and a compressed page that cannot be read."""
    pq.write_table(table, path, compression="zstd")
    image = pq.read_metadata(path).row_group(0).column(1)
    assert image.path_in_schema == "image"
    start = image.dictionary_page_offset or image.data_page_offset
    content = bytearray(path.read_bytes())
    header = slice(start, start + 40)  # the pixels after it are stored as they are
    content[header] = bytes(byte ^ 255 for byte in content[header])
    path.write_bytes(content)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Write 48 rows a file: an image of 0 is corrupt, 3 is cut, a page of 4 is damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = list(write_shards(folder, 1.6e-4, image_size=28, rows_per_shard=48))
    assert len(paths) == 4
    table = pq.read_table(paths[0])
    images = table["image"].to_pylist()
    images[7] = images[7][:100]
    pq.write_table(table.set_column(1, "image", pa.array(images)), paths[0])
    write_with_a_damaged_page(folder / "shard-00004.parquet", pq.read_table(paths[3]))
    paths[3].write_bytes(paths[3].read_bytes()[:2000])
    return folder


@pytest.fixture(scope="module")
def whole_files(damaged, tmp_path_factory):
    """Return the first three of them: one image is still corrupt."""
    folder = tmp_path_factory.mktemp("whole") / "files"
    shutil.copytree(damaged, folder)
    for number in (3, 4):
        (folder / f"shard-{number:05}.parquet").unlink()
    return folder


@pytest.fixture
def own_ray(monkeypatch):
    """Start one Ray for all runs here, which a run that fails would end."""
    start_ray(2, log_to_driver=True)  # as the script does
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.fixture(scope="module", autouse=True)
def end_ray():
    yield
    ray.shutdown()


@pytest.fixture
def call(monkeypatch):
    """Return a function that runs the script here, with arguments."""

    def main(*arguments) -> None:
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        script.main()

    return main


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_a_run_leaves_out_and_counts_what_is_corrupt(damaged, tmp_path, call, capfd):
    """3 files of 48 rows are whole: 144 rows, 72 for each worker, 4 batches of 18. The
    second start goes on after the first epoch."""
    arguments = ["--data-path", damaged, "--on-corrupt", "skip", "--num-workers", 2]
    arguments += ["--batch-size", 18, "--checkpoint-dir", tmp_path, "--num-epochs"]
    call(*arguments, 1)
    call(*arguments, 2)
    printed = []  # what workers print comes late

    def said() -> str:
        printed.append(capfd.readouterr().out)
        return "".join(printed)

    wait_until(lambda: "epoch 2/" in said(), said=said)
    said = said()
    assert "starts anew: " in said and "goes on after epoch 1 of" in said
    assert re.search(r"Left out 2 corrupt file.*-00003\.par.*-00004\.par", said)
    assert "144 rows to train on, 72 for each worker" in said
    epochs = re.findall(r"epoch \d/\d: loss \S+ rows (\d+), corrupt (\d+)", said)
    assert len(epochs) == 2
    assert set(epochs) == {("144", "1")}
    assert len(list(tmp_path.glob("checkpoint_2*"))) == 2  # of the last epochs
    with pytest.raises(BadInput, match=r"--batch-size 18, and this one has .* 24"):
        call(*arguments, 2, "--batch-size", 24)  # not the same run


def launch(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, scripts.TRAIN_RAY_DDP_WITH_RAY_DATA, *map(str, arguments)],
        env=scripts.environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.weekly
def test_a_run_ends_with_the_sentence_of_a_task(whole_files):
    """The last thing that one reads, below what Ray's workers say."""
    done = launch("--data-path", whole_files, "--num-workers", 1)
    assert done.returncode == 1
    expected = (
        rf"{scripts.TRAIN_RAY_DDP_WITH_RAY_DATA.name}: An image in \S+-00000\.parquet is "
        r"corrupt .+ --on-corrupt skip\."
    )
    assert re.fullmatch(expected, done.stderr.splitlines()[-1]), done.stderr
    assert "imported before utils.cluster" not in done.stderr


@pytest.mark.weekly
@pytest.mark.usefixtures("own_ray")
def test_a_run_on_its_own_data_keeps_what_it_saved_when_that_is_damaged(
    tmp_path, call, monkeypatch
):
    """It generates, trains, is resumed and fails, and goes on with the data mended."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    arguments = ["--data-size-gb", 0.004, "--num-workers", 1, "--batch-size", 64]
    arguments += ["--checkpoint-dir", tmp_path / "runs", "--num-epochs"]
    call(*arguments, 1)
    (saved,) = tmp_path.glob("runs/checkpoint_*/run.json")
    state, before = json.loads(saved.read_text()), saved.read_bytes()
    assert state["epoch"] == 1
    assert (state["metrics"]["rows"], state["metrics"]["corrupt"]) == (128, 0)
    assert 0 < state["metrics"]["test_accuracy"] < 1

    (shard,) = tmp_path.glob("digits-224/train-*/shard-*.parquet")
    whole = shard.read_bytes()
    write_with_a_damaged_page(shard, pq.read_table(shard))
    with pytest.raises(BadInput, match=rf"{shard.name} is not a whole Parquet file"):
        call(*arguments, 2)
    assert saved.read_bytes() == before

    shard.write_bytes(whole)
    call(*arguments, 2)
    saved = tmp_path.glob("runs/checkpoint_*/run.json")
    assert {json.loads(file.read_text())["epoch"] for file in saved} == {1, 2}


def a_bomb():
    """Return a PNG whose header claims 60,000 x 60,000 pixels, which Pillow refuses."""
    image = bytearray(encode_png(np.zeros([2, 2], np.uint8)))
    image[16:24] = struct.pack(">II", 60_000, 60_000)
    image[29:33] = struct.pack(">I", zlib.crc32(image[12:29]))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(image))
    return bytes(image)


@pytest.mark.parametrize("kind", ["no image", "a bomb", "a struct"])
def test_decode_gives_black_and_a_label_that_the_loss_ignores(kind):
    """Or names the file, without --on-corrupt skip."""
    image = {"no image": b"no image", "a struct": {"bytes": b"", "path": "1.png"}}
    image = image[kind] if kind in image else a_bomb()
    batch = {"image": [image], "label": np.array([3]), "path": ["here.parquet"]}
    decoded = script.decode(batch, on_corrupt="skip")
    assert decoded["image"].shape == (1, 1, 28, 28)
    assert decoded["image"].max() == 0
    assert decoded["label"].tolist() == [CORRUPT]
    with pytest.raises(BadInput, match=r"An image in here\.parquet is corrupt"):
        script.decode(batch, on_corrupt="fail")


def test_a_batch_of_corrupt_images_does_not_hide_the_loss():
    """Its own loss is 0/0."""
    images = torch.zeros(2, 1, 28, 28)

    batches = [
        {"image": images, "label": torch.full([2], label)} for label in (3, CORRUPT)
    ]

    def epoch() -> tuple[float, dict, float, bool]:
        torch.distributed.init_process_group("gloo")
        script = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found = script.train_epoch(model, optimizer, batches, torch.device("cpu"))
        first = torch.nn.functional.cross_entropy(model(images), torch.full([2], 3))
        finite = all(p.isfinite().all() for p in model.parameters())
        return *found, first.item(), finite

    ((loss, found, first, finite),) = run_ranks(epoch, 1)
    assert loss == pytest.approx(first)  # the rate is 0
    assert found["corrupt"] == 2 and finite


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("name", ["label=7", "a #1 q?2", "%20 é*[1];b"])
def test_the_name_of_a_folder_changes_no_row(whole_files, tmp_path, name):
    """A table partitioned as Hive does has a label=7, which Ray would read as a label."""
    (tmp_path / name).mkdir()
    first = shutil.copy(whole_files / "shard-00001.parquet", tmp_path / name)
    rows = script.read_images(*script.parquet.find_parquet(str(tmp_path)), "fail")
    labels = pq.ParquetFile(first).read(["label"])["label"].to_pylist()
    assert sorted(row["label"] for row in rows.take_all()) == sorted(labels)


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_a_corrupt_image_fails_with_the_name_of_its_file(whole_files):
    files = script.parquet.find_parquet(str(whole_files))
    with pytest.raises(BadInput, match=r"shard-00000\.parquet is corrupt"):
        script.read_images(*files, "fail").take_all()


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
def test_no_cpu_to_decode_with_is_said(whole_files, call, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    with pytest.raises(BadInput, match="none is left to read and decode"):
        call("--data-path", whole_files)


@pytest.fixture
def other_columns(tmp_path):
    pq.write_table(pa.table({"picture": [b""], "label": [1]}), tmp_path / "a.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "options", "sentence"),
    [
        ("damaged", [], r"shard-00003\.parquet is not a whole"),
        ("tmp_path", [], r"There is no \.parquet file in"),
        ("other_columns", [], "has no column image"),
        ("whole_files", ["--batch-size", 145], "The batch size is 145, but each of 1"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(
    folder, options, sentence, call, monkeypatch, request
):
    """For this no Ray is asked, once it runs: here, none is started."""
    for name in ("start_ray", "preflight"):
        monkeypatch.setattr(script, name, Mock())
    with pytest.raises(BadInput, match=sentence):
        call(
            "--data-path", request.getfixturevalue(folder), "--num-workers", 1, *options
        )
