"""train_ray_ddp_with_ray_data.py: a whole run with damaged data, and every bad input."""

import argparse
import inspect
import io
import re
import shutil
import struct
import subprocess
import sys
import zlib

from utils.cluster import start_ray

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import scripts
from utils.datasets import write_shards
from utils.datasets.shards import encode_png

pytestmark = pytest.mark.part02

script = scripts.load(scripts.TRAIN_RAY_DDP_WITH_RAY_DATA)


def write_with_a_damaged_page(path, table):
    """A file with a whole footer, of which a compressed page cannot be read."""
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
    """48 rows per file: an image of 0 is corrupt, 3 is cut, a page of 4 is damaged."""
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
    """The first three of them: one image is still corrupt."""
    folder = tmp_path_factory.mktemp("whole") / "files"
    shutil.copytree(damaged, folder)
    for number in (3, 4):
        (folder / f"shard-{number:05}.parquet").unlink()
    return folder


def options(**changes):
    """The command line's defaults, with changes."""
    defaults = {"num_workers": 1, "num_epochs": 1, "batch_size": 32}
    defaults |= {"data_size_gb": 0.01, "on_corrupt": "fail"}
    defaults |= {"checkpoint_dir": None, "resume": False, "data_path": None}
    return argparse.Namespace(**defaults | changes)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, scripts.TRAIN_RAY_DDP_WITH_RAY_DATA, *map(str, arguments)],
        env=scripts.environment() | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_what_both_scripts_have_is_the_same():
    other = scripts.load(scripts.TRAIN_RAY_DDP)
    for name in ("train_step", "load_latest", "report"):
        ours, theirs = getattr(script, name), getattr(other, name)
        assert inspect.getsource(ours) == inspect.getsource(theirs)


@pytest.mark.slow
def test_a_run_leaves_out_and_counts_what_is_corrupt(damaged, tmp_path, monkeypatch):
    """3 files of 48 rows are whole: 144 rows, 72 for each worker, 4 batches of 18."""
    arguments = ["--data-path", damaged, "--on-corrupt", "skip", "--num-workers", 2]
    arguments += ["--num-epochs", 2, "--batch-size", 18, "--smoke-test"]
    done = run(*arguments, "--checkpoint-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "imported before utils.cluster" not in done.stderr
    assert re.search(r"Left out 2 corrupt file.*-00003\.par.*-00004\.par", done.stdout)
    assert "144 rows to train on, 72 for each worker" in done.stdout
    epochs = re.findall(
        r"epoch \d: loss \S+ steps (\d+), rows (\d+), corrupt (\d+)", done.stdout
    )
    assert len(epochs) == 2
    assert set(epochs) == {("4", "144", "1")}
    assert len(list(tmp_path.glob("*/checkpoint_2*"))) == 1  # of the last epoch
    again = [scripts.TRAIN_RAY_DDP_WITH_RAY_DATA.name, "--checkpoint-dir", tmp_path]
    monkeypatch.setattr(sys, "argv", [str(part) for part in again])
    with pytest.raises(SystemExit, match="holds an earlier run: add --resume"):
        script.main()  # it is refused before Ray starts


def fails_with(done, sentence):
    expected = rf"train_ray_ddp_with_ray_data\.py: {sentence} .+ --on-corrupt skip\."
    return done.returncode == 1 and re.fullmatch(expected, done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_a_run_that_meets_a_damaged_page_names_the_file(damaged, tmp_path):
    """Behind a whole footer: it is found once the run has begun."""
    for number in (1, 2, 4):
        shutil.copy(damaged / f"shard-{number:05}.parquet", tmp_path)
    done = run("--data-path", tmp_path, "--smoke-test", "--batch-size", 8)
    sentence = r"\S+shard-00004\.parquet is not a whole Parquet file"
    assert fails_with(done, sentence), done.stderr


@pytest.mark.slow
def test_a_run_on_its_own_data_keeps_what_it_saved_when_that_is_damaged(tmp_path):
    """It generates, trains, is resumed and fails, and goes on with the data mended."""
    arguments = ["--data-size-gb", 0.004, "--num-workers", 1, "--smoke-test"]
    arguments += ["--checkpoint-dir", tmp_path / "runs", "--num-epochs"]
    home = {"WORKSHOP_STORAGE": str(tmp_path)}
    done = run(*arguments, 1, **home)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"epoch 1: .*rows 128, corrupt 0, accuracy 0\.\d+, \d+ rows per", done.stdout
    )
    (saved,) = tmp_path.glob("runs/*/checkpoint_*/checkpoint.pt")
    before = saved.read_bytes()

    (shard,) = tmp_path.glob("digits-224/train-*/shard-*.parquet")
    whole, table = shard.read_bytes(), pq.read_table(shard)
    images = table["image"].to_pylist()
    images[7] = images[7][:100]
    pq.write_table(table.set_column(1, table.schema.field(1), pa.array(images)), shard)
    done = run(*arguments, 2, "--resume", **home)
    assert fails_with(done, rf"An image in \S+{shard.name} is corrupt"), done.stderr
    assert saved.read_bytes() == before

    write_with_a_damaged_page(shard, table)
    done = run(*arguments, 2, "--resume", "--data-path", shard, **home)
    sentence = rf"\S+{shard.name} is not a whole Parquet file"
    assert fails_with(done, sentence), done.stderr
    assert saved.read_bytes() == before

    shard.write_bytes(whole)
    done = run(*arguments, 2, "--resume", **home)
    assert done.returncode == 0, done.stderr
    assert "epoch 2: " in done.stdout
    assert "epoch 1: " not in done.stdout


def test_only_what_a_task_could_not_read_has_the_data_read_again():
    """Else a full disk, or a missing folder to resume, would cost a pass over all data."""
    full = OSError(28, "No space left on device")
    assert script.explain(full, "/nowhere") is full


def test_decode_gives_black_and_a_label_that_the_loss_ignores():
    batch = {"image": [b"no image"], "label": np.array([3]), "path": ["here.parquet"]}
    decoded = script.decode(batch, on_corrupt="skip")
    assert decoded["image"].shape == (1, 1, 28, 28)
    assert decoded["image"].max() == 0
    assert decoded["label"].tolist() == [script.CORRUPT]
    with pytest.raises(ValueError, match=r"An image in here\.parquet is corrupt"):
        script.decode(batch, on_corrupt="fail")


def a_bomb():
    """A PNG whose header claims 60,000 x 60,000 pixels, which Pillow refuses."""
    image = bytearray(encode_png(np.zeros([2, 2], np.uint8)))
    image[16:24] = struct.pack(">II", 60_000, 60_000)
    image[29:33] = struct.pack(">I", zlib.crc32(image[12:29]))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(image))
    return bytes(image)


@pytest.mark.parametrize("kind", ["a bomb", "a struct"])
def test_whatever_cannot_be_decoded_names_its_file(kind):
    image = a_bomb() if kind == "a bomb" else {"bytes": b"", "path": "1.png"}
    batch = {"image": [image], "label": np.array([3]), "path": ["here.parquet"]}
    with pytest.raises(ValueError, match=r"An image in here\.parquet is corrupt"):
        script.decode(batch)
    assert script.decode(batch, "skip")["label"].tolist() == [script.CORRUPT]


def test_a_batch_of_corrupt_images_does_not_hide_the_loss(monkeypatch):
    """Its own loss is 0/0."""

    class Shard:
        def iter_torch_batches(self, **_):
            for label in (3, script.CORRUPT):
                yield {
                    "image": torch.zeros(2, 1, 28, 28),
                    "label": torch.full([2], label),
                }

    monkeypatch.setattr(script, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(script.dist, "all_reduce", lambda counts: None)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = script.train_epoch(model, optimizer, Shard(), {"batch_size": 2}, epoch=0)
    assert 0 < found["loss"] < 10
    assert found["corrupt"] == 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_epoch_stays_on_its_device(monkeypatch):
    """On a pretended GPU: an operation that mixes devices raises, as on a real one."""
    device, stepped = torch.device("cuda", 0), []

    def train_step(model, optimizer, images, labels):
        stepped.append(images.device)
        return images.mean()

    class AllReduce(Exception):
        """As far as pretended tensors go, which have no values."""

    def all_reduce(counts):
        assert counts.device == device
        raise AllReduce

    class Shard:
        def iter_torch_batches(self, **_):
            for _ in range(2):
                images = torch.zeros(4, 1, 28, 28, device=device)
                labels = torch.zeros(4, dtype=torch.int64, device=device)
                yield {"image": images, "label": labels}

    monkeypatch.setattr(script, "get_device", lambda: device)
    monkeypatch.setattr(script, "train_step", train_step)
    monkeypatch.setattr(script.dist, "all_reduce", all_reduce)
    with FakeTensorMode(), pytest.raises(AllReduce):
        script.train_epoch(None, None, Shard(), {"batch_size": 4}, epoch=0)
    assert stepped == [device] * 2


@pytest.fixture(scope="module")
def own_ray():
    start_ray(1)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("own_ray")
class TestSetUp:
    def test_a_corrupt_image_fails_with_the_name_of_its_file(self, whole_files):
        dataset, rows = script.read_images(str(whole_files), "fail")
        assert rows == 3 * 48
        with pytest.raises(Exception, match=r"shard-00000\.parquet is corrupt"):
            dataset.take_all()

    def test_a_corrupt_image_is_counted(self, whole_files):
        dataset, _ = script.read_images(str(whole_files), "skip")
        labels = [row["label"] for row in dataset.take_all()]
        assert len(labels) == 3 * 48
        assert labels.count(script.CORRUPT) == 1

    def test_files_are_read_and_decoded_in_one_task(self, whole_files):
        dataset, _ = script.read_images(str(whole_files), "skip")
        stats = dataset.materialize().stats()
        (operator,) = re.findall(r"Operator \d+ (.+?):", stats)
        assert operator == "ReadParquet->MapBatches(decode)"

    def test_a_cut_file_fails_with_its_name(self, damaged):
        with pytest.raises(ValueError, match=r"shard-00003\.parquet is not a whole"):
            script.set_up(options(data_path=str(damaged)))

    def test_a_path_that_does_not_exist_is_named(self, tmp_path):
        with pytest.raises(OSError, match=r"nowhere cannot be read"):
            script.set_up(options(data_path=str(tmp_path / "nowhere")))

    def test_batches_larger_than_a_shard_are_refused(self, whole_files):
        with pytest.raises(ValueError, match="The batch size is 145, but each of 1"):
            script.set_up(options(data_path=str(whole_files), batch_size=145))

    def test_columns_that_are_missing_are_named(self, tmp_path):
        pq.write_table(
            pa.table({"picture": [b""], "label": [1]}), tmp_path / "a.parquet"
        )
        with pytest.raises(ValueError, match="has no column image"):
            script.set_up(options(data_path=str(tmp_path)))

    def test_no_cpu_to_decode_with_is_said(self, whole_files, monkeypatch):
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
        with pytest.raises(ValueError, match="none is left to read and decode"):
            script.set_up(options(data_path=str(whole_files)))

    def test_all_nodes_have_to_share_both_folders(
        self, whole_files, tmp_path, monkeypatch
    ):
        asked = []
        monkeypatch.setattr(script.preflight, "check_shared", asked.append)
        script.set_up(options(data_path=str(whole_files), checkpoint_dir=tmp_path))
        assert asked == [tmp_path, str(whole_files)]

    def test_more_workers_than_the_cluster_has_room_for_are_refused(self, whole_files):
        with pytest.raises(ValueError, match="asks for 99 workers"):
            script.set_up(options(data_path=str(whole_files), num_workers=99))


def test_more_data_than_the_disk_holds_is_refused_before_writing():
    with pytest.raises(OSError, match=r"1e\+09 GB more do not fit the disk"):
        script.set_up(options(data_size_gb=1e9))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resume": True}, "--resume needs --checkpoint-dir"),
        ({"resume": True, "checkpoint_dir": "empty"}, "There is no run in .*empty"),
        ({"checkpoint_dir": "a_file/folder"}, "cannot be written to"),
        ({"num_epochs": 0}, "--num-epochs is 0, but has to be at least 1"),
    ],
)
def test_wrong_options_are_named(changes, sentence, tmp_path):
    (tmp_path / "a_file").write_text("")
    if folder := changes.get("checkpoint_dir"):
        changes = changes | {"checkpoint_dir": tmp_path / folder}
    with pytest.raises((ValueError, OSError), match=sentence):
        script.set_up(options(**changes))
