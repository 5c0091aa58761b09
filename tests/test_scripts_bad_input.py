"""The scripts of parts 01 and 02 answer bad input with one sentence, and lose nothing."""

import ast
import io
import os
import pickle
import subprocess
import sys
import urllib.request
from argparse import Namespace
from pathlib import Path

import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint

from tests import scripts
from tests.network import nobody_listens
from tests.patience import PATIENCE
from utils import checkpoint_files
from utils.errors import BadInput
from utils.processes import free_port

pytestmark = [pytest.mark.part01, pytest.mark.part02]

BOTH = pytest.mark.parametrize(
    "path", [scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP], ids=lambda path: path.name
)


@pytest.fixture
def complaint(monkeypatch):
    """Return a function that calls a script here, as the only rank, for its sentence."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    def call(path: Path, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        with pytest.raises(BadInput) as raised:
            scripts.load(path).main()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    yield call
    if dist.is_initialized():
        dist.destroy_process_group()


BAD_INPUT = {
    "read-only folder": (["--checkpoint-dir", "/sys/checkpoints"], "cannot be writ"),
    "a file as folder": (["--checkpoint-dir", "file/checkpoints"], "cannot be writ"),
    "no such dataset": (["--dataset", "digitz"], "choose one of digits, mnist"),
    "fresh, but where": (["--fresh"], "--fresh needs --checkpoint-dir"),
    "fresh, but full": (
        ["--fresh", "--checkpoint-dir", "."],
        "is not empty, and --fre",
    ),
    "no epoch": (["--epochs", 0], "--epochs: it is 0, but has to be a whole number"),
    "a batch of all": (["--batch-size", 2000], "lower --batch-size"),
    "a bucket": (["--checkpoint-dir", "s3://a"], "s3://a is an address: name a path"),
}


@BOTH
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_sentence(path, what, complaint, tmp_path, monkeypatch):
    """Before a process group is joined, or Ray is started."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    arguments, words = BAD_INPUT[what]
    assert words in complaint(path, *arguments)
    assert not dist.is_initialized()
    assert not ray.is_initialized()
    assert os.listdir() == ["file"]  # nothing written, nothing lost


@pytest.fixture
def proxies_anew():
    """Let urllib look for proxies anew: it keeps those of its first request."""
    urllib.request.install_opener(None)
    yield
    urllib.request.install_opener(None)


@BOTH
def test_no_network_is_said(path, complaint, monkeypatch, tmp_path, proxies_anew):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{nobody_listens()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "'digits'" in complaint(path, "--dataset", "mnist")


@BOTH
def test_wrong_mode_names_the_three(path, complaint, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "fast")
    assert "auto, smoke and full" in complaint(path)


def test_started_without_torchrun_it_says_how(complaint, monkeypatch):
    monkeypatch.delenv("RANK")
    said = complaint(scripts.TRAIN_DDP)
    assert said.endswith("torchrun --nproc_per_node=2 train_ddp.py")


def test_more_workers_than_gpus_is_said(complaint, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("utils.command_line.device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "more workers than GPUs (1)" in complaint(scripts.TRAIN_DDP)


def test_a_folder_is_written_to_before_training(complaint, monkeypatch, tmp_path):
    """Not after an epoch of work."""

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    said = complaint(scripts.TRAIN_DDP, "--checkpoint-dir", tmp_path)
    assert said.endswith("cannot be written to (Read-only file system): name another.")


RUN = {"script": "train.py", "--lr": 0.1, "--batch-size": 32}


def saved(**changes) -> bytes:
    """Return a checkpoint of a small model, with changes."""
    model, optimizer = build()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    at = {"epoch": 0, "images": 0, "steps": 7, "accuracy": 0.5}
    noise = {"generators": dumped([])}  # of no rank: there is nothing to go on with
    torch.save(state | at | noise | {"run": RUN} | changes, file)
    return file.getvalue()


def build():
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def dumped(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


OTHER = torch.nn.Linear(2, 2)
SPOILT = {
    "cut": saved()[:1000],
    "without its last byte": saved()[:-1],
    "empty": b"",
    "a text": b"hello world\n",
    "a table": b"epoch,loss\n1,2\n",
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "zeros": bytes(1000),
    "a pickle": pickle.dumps({"model": Path("here")}),
    "code": dumped(OTHER),
    "a tensor": dumped(torch.ones(2, 2)),
    "a list": dumped([1, 2]),
    "of another model": saved(model=OTHER.state_dict()),
    "of another optimizer": saved(
        optimizer=torch.optim.SGD([OTHER.weight], lr=1).state_dict()
    ),
    "without state of the optimizer": saved(optimizer={}),
    "weights alone": dumped(build()[0].state_dict()),
    "without its run": dumped(
        {"model": build()[0].state_dict(), "optimizer": build()[1].state_dict()}
    ),
}


def file_of(path: Path, folder: Path) -> Path:
    return folder / ("checkpoint.pt" if "ray" in path.name else "step-000007.pt")


@BOTH
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_checkpoint_that_does_not_fit(path, how, tmp_path, monkeypatch):
    file = file_of(path, tmp_path)
    file.write_bytes(SPOILT[how])
    with pytest.raises(BadInput, match="name another folder, or delete it") as raised:
        load(scripts.load(path), tmp_path, monkeypatch)
    assert str(tmp_path) in str(raised.value)
    assert "damaged" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None
    assert file.read_bytes() == SPOILT[how]


def load(script, folder: Path, monkeypatch, run=RUN) -> dict:
    """Return what a script loads a checkpoint with: where it goes on."""
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 1)
    if "ray" not in script.__name__:
        monkeypatch.setattr(script.dist, "broadcast_object_list", lambda found: None)
        args = Namespace(checkpoint_dir=folder, run=run, epochs=9)
        return script.load_checkpoint(args, *build())
    there = Checkpoint.from_directory(folder)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: there)
    config = {"run": run, "checkpoint_dir": folder, "epochs": 9}
    return script.load_latest(*build(), config)


@BOTH
def test_a_checkpoint_that_fits_is_loaded(path, tmp_path, monkeypatch, capsys):
    file_of(path, tmp_path).write_bytes(saved(epoch=4))
    assert load(scripts.load(path), tmp_path, monkeypatch)["epoch"] == 4
    assert "goes on after epoch 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [scripts.TRAIN_RAY_DDP, scripts.TRAIN_RAY_DDP_WITH_RAY_DATA],
    ids=lambda path: path.stem,
)
def test_what_ray_did_not_note_as_whole_is_said_to_be_none(
    path, tmp_path, monkeypatch, capsys
):
    """A kill in the first save leaves a folder, and no checkpoint."""
    (tmp_path / "killed" / path.stem / "checkpoint_1").mkdir(parents=True)
    script = scripts.load(path)
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    config = {"run": RUN, "checkpoint_dir": tmp_path / "killed"}
    assert script.load_latest(*build(), config)["epoch"] == 0
    said = capsys.readouterr().out
    assert said == "starts anew: killed holds no checkpoint yet\n"


@BOTH
def test_the_checkpoint_of_a_run_with_other_settings_is_left_alone(
    path, tmp_path, monkeypatch
):
    before = saved()
    file_of(path, tmp_path).write_bytes(before)
    with pytest.raises(BadInput, match=r"with --lr 0.1, and this one has --lr 0.2"):
        load(scripts.load(path), tmp_path, monkeypatch, RUN | {"--lr": 0.2})
    assert file_of(path, tmp_path).read_bytes() == before


@pytest.mark.parametrize("mistake", [AttributeError, NameError, AssertionError])
def test_a_mistake_of_ours_is_not_called_damage(mistake):
    with pytest.raises(mistake), checkpoint_files.explain_reading("checkpoint.pt"):
        raise mistake("of ours")


def test_checkpoints_are_loaded_as_data_only():
    for path in scripts.ROOT.glob("0[12]*/train_*.py"):
        calls = [
            {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg != "f"}
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        ]
        assert calls
        assert all(call["weights_only"] is True for call in calls)


@pytest.mark.parametrize(
    "path", sorted(scripts.ROOT.glob("0*/train_*.py")), ids=lambda path: path.name
)
def test_help_is_the_first_line_and_every_option(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit):
        scripts.load(path).main()
    out = capsys.readouterr().out
    assert scripts.load(path).__doc__.splitlines()[0][:40] in out
    assert {"--checkpoint-dir", "--fresh", "--smoke-test"} <= set(out.split())


@pytest.mark.weekly  # tests/test_command_line.py, in every change
def test_under_torchrun_the_sentence_is_the_last_thing_one_reads():
    """Said once, in torchrun's summary."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", scripts.TRAIN_DDP.name]
    done = subprocess.run(
        [*command, "--dataset", "digitz"],
        cwd=scripts.TRAIN_DDP.parent,
        env=scripts.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert "train_ddp.py: There is no dataset 'digitz': choose one of" in last
