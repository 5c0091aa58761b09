"""The scripts answer bad input with one sentence, and lose nothing."""

import ast
import io
import json
import os
import pickle
import sys
import urllib.request
from pathlib import Path

import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint

from tests import scripts
from tests.network import nobody_listens
from utils import ray_runs, runs
from utils.errors import BadInput
from utils.processes import free_port

SCRIPTS = {path.stem: path for path in sorted(scripts.ROOT.glob("0*/train_*.py"))}
DDP, RAY, STREAM = "train_ddp", "train_ray_ddp", "train_ray_ddp_with_ray_data"
FSDP2, DEEPSPEED = "train_fsdp2", "train_deepspeed"
EACH = pytest.mark.parametrize("name", SCRIPTS)
BOTH = pytest.mark.parametrize("name", [DDP, RAY])


@pytest.fixture
def complaint(monkeypatch):
    """Return a function that calls a script here, as the only rank, for its sentence."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    def call(name: str, *arguments) -> str:
        path = SCRIPTS[name]
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        with pytest.raises(BadInput) as raised:
            scripts.load(path).main()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    yield call
    if dist.is_initialized():
        dist.destroy_process_group()


# (scripts, options, what is said). Wrong values of each kind: tests/test_command_line.py.
BAD_INPUT = [
    (
        [RAY, STREAM],
        "--checkpoint-dir a_file/folder",
        "cannot be written to (Not a dir",
    ),
    ([RAY], "--checkpoint-dir /sys", "cannot be written to (Permission denied)"),
    (SCRIPTS, f"--seed {'9' * 30}", "has to be a whole number from 0 to 999999999"),
    ([DDP, RAY], "--epochs 0", "--epochs: it is 0, but has to be a whole number"),
    ([DDP, RAY], "--dataset digitz", "choose one of digits, mnist"),
    ([DDP, RAY], "--batch-size 2000", "lower --batch-size"),
    ([STREAM], "--num-epochs 0", "--num-epochs: it is 0, but has to be a whole"),
    ([STREAM], "--data-size-gb 0", "--data-size-gb: it is 0, but has to be a number"),
    ([STREAM], "--data-size-gb 1e9", "1e+09 GB more do not fit the disk"),
    ([FSDP2, DEEPSPEED], "--steps 0", "--steps: it is 0, but has to be a whole"),
    ([FSDP2, DEEPSPEED], "--clip=-1", "--clip: it is -1, but has to be a number above"),
    ([FSDP2, DEEPSPEED], "--num-workers 2", "leave out one of them"),  # and torchrun
    ([FSDP2], "--export a_file/model.pt", "cannot be written to (File exists)"),
    ([FSDP2, DEEPSPEED], "--export .", "is a folder: name a file in it"),
    ([FSDP2], "--offload", "needs a GPU to offload from"),
    ([DEEPSPEED], "--export model.pt", "--export needs --checkpoint-dir"),
]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [(name, *more) for names, *more in BAD_INPUT for name in names],
)
def test_a_wrong_command_line_gets_one_sentence(
    name, options, sentence, complaint, tmp_path, monkeypatch
):
    """Before a process group is joined, or Ray is started."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("not a folder")
    assert sentence in complaint(name, *options.split())
    assert not dist.is_initialized()
    assert not ray.is_initialized()
    assert os.listdir() == ["a_file"]  # nothing written, nothing lost


@EACH
def test_a_wrong_run_mode_is_answered_with_the_right_ones(name, complaint, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "fast")
    assert "auto, smoke and full" in complaint(name)


@pytest.mark.parametrize("name", [DDP, FSDP2, DEEPSPEED])
def test_started_without_torchrun_a_script_says_how(name, complaint, monkeypatch):
    monkeypatch.delenv("RANK")
    said = complaint(name)
    assert "start me with torchrun" in said
    assert "torchrun --nproc_per_node=2" in said


def test_more_workers_than_gpus_are_refused(complaint, monkeypatch):
    monkeypatch.delenv("WORKSHOP_MODE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name in (DDP, FSDP2, DEEPSPEED):
        assert "more workers than GPUs (1)" in complaint(name)


@pytest.fixture
def proxies_anew():
    """Let urllib look for proxies anew: it keeps those of its first request."""
    urllib.request.install_opener(None)
    yield
    urllib.request.install_opener(None)


@pytest.mark.usefixtures("proxies_anew")
def test_a_download_without_a_network_names_what_needs_none(
    complaint, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{nobody_listens()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "'digits'" in complaint(DDP, "--dataset", "mnist")


SETTINGS = {"--lr": 0.1, "--batch-size": 32}


def dumped(what) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.AdamW(model.parameters())


def saved(**changes) -> bytes:
    """Return a checkpoint's file of a small model, with changes."""
    model, optimizer = build()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return dumped(state | changes)


OTHER = torch.nn.Linear(2, 2)
SPOILT = {
    "cut": saved()[:1000],
    "empty": b"",
    "a text": b"hello world\n",
    "a pickle": pickle.dumps({"model": Path("here")}),
    "code": dumped(OTHER),
    "a tensor": dumped(torch.ones(2, 2)),
    "a list": dumped([1, 2]),
    "of another model": saved(model=OTHER.state_dict()),
    "of another optimizer": saved(
        optimizer=torch.optim.SGD([OTHER.weight], lr=1).state_dict()
    ),
    "weights alone": dumped(build()[0].state_dict()),
}


@pytest.fixture
def alone():
    """Join a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def load(name, alone, tmp_path, monkeypatch):
    """Return a function that lets a script's run load a file, after a fourth epoch."""
    script = scripts.load(SCRIPTS[name])
    checkpoint = tmp_path / f"{name}-000007"
    checkpoint.mkdir()
    state = {"epoch": 4, "items": 0, "steps": 7, "metrics": {}}
    state["settings"] = {"script": name} | SETTINGS
    (checkpoint / "run.json").write_text(json.dumps(state))
    torch.save(runs.random_states(), checkpoint / "random.pt")
    there = Checkpoint.from_directory(checkpoint)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: there)
    kind = runs.Run if name == DDP else ray_runs.RayRun

    def call(content: bytes, settings: dict = SETTINGS) -> int:
        file = checkpoint / "checkpoint.pt"
        file.write_bytes(content)
        try:
            how = script.save_checkpoint, script.load_checkpoint
            run = kind(tmp_path, name, *how, settings)
            run.resume(*build())
            next(run.epochs(9))
            return run.epoch
        finally:
            assert file.read_bytes() == content

    return call


@BOTH
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_checkpoint_that_does_not_fit_is_named_and_stays(name, how, load, tmp_path):
    with pytest.raises(BadInput, match="name another folder, or delete it") as raised:
        load(SPOILT[how])
    assert str(tmp_path) in str(raised.value)
    assert "damaged" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None


@BOTH
def test_a_checkpoint_that_fits_is_loaded(name, load, capsys):
    assert load(saved()) == 4
    assert "goes on after epoch 4" in capsys.readouterr().out


@BOTH
def test_the_checkpoint_of_a_run_with_other_settings_is_left_alone(name, load):
    """It is looked at before what is in it: another model would not load."""
    with pytest.raises(BadInput, match=r"with --lr 0.1, and this one has --lr 0.2"):
        load(b"", SETTINGS | {"--lr": 0.2})


def test_checkpoints_are_loaded_as_data_and_to_the_cpu():
    """Else they may run code, and all ranks load to the GPU of the one that saved."""
    for path in scripts.ROOT.glob("0[12]*/train_*.py"):
        calls = [
            {k.arg: ast.literal_eval(k.value) for k in node.keywords}
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        ]
        assert calls
        assert all(call["weights_only"] is True for call in calls)
        assert all(call["map_location"] == "cpu" for call in calls)


@EACH
def test_help_is_the_first_line_and_every_option(name, monkeypatch, capsys):
    path = SCRIPTS[name]
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit):
        scripts.load(path).main()
    out = capsys.readouterr().out
    assert scripts.load(path).__doc__.splitlines()[0][:40] in out
    assert {"--checkpoint-dir", "--keep", "--smoke-test"} <= set(out.split())
