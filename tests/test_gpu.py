"""Full mode and `make gpu`, as far as they can be known without a GPU."""

import ast
import contextlib
import json
import subprocess
import sys
from argparse import Namespace
from functools import cache, partial
from types import SimpleNamespace

from utils import cluster  # isort: split

import pytest
import ray.train.torch
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests import scripts
from tests.tools import gpu, notebooks
from tests.waiting import TIMEOUT_S
from utils import memory, models, preflight, ray_runs, settings, torchrun_or_ray

GPU_BYTES = 24 * 2**30 * 0.9  # the rest is for CUDA, NCCL and the allocator's gaps
IMAGE_SIDES = {"01": 28, "02": 224}  # pixels, at most, by part
SCRIPTS = set(scripts.ROOT.glob("0[123]-*/train_*.py"))


def settings_cell(path) -> str:
    """Return the cell that sets sizes by run mode, or nothing."""
    return next((source for source in notebooks.code(path) if "pick(" in source), "")


def knobs(path) -> dict:
    """Return what this cell sets, in the mode and with the GPUs of now."""
    given = {"settings": settings, "pick": settings.pick, "torch": torch}
    given |= {"partial": partial, "SMOKE": models.SMOKE, "GPT2_124M": models.GPT2_124M}
    found = given | {"default_workers": settings.num_workers}
    for statement in ast.parse(settings_cell(path)).body:
        with contextlib.suppress(NameError):  # of what another cell made
            exec(ast.unparse(statement), found)
    return found


@cache
def bytes_of_training(shape: models.GPTConfig | int, batch: int) -> int:
    """Return the bytes of one GPU: states of the optimizer, and the peak of a step."""
    with FakeTensorMode(), memory.count_memory() as counter:
        if isinstance(shape, int):
            model, inputs = models.resnet18(), torch.zeros(batch, 1, shape, shape)
            logits, targets = model(inputs), torch.zeros(batch, dtype=torch.long)
        else:
            model = models.GPT(shape)
            targets = torch.zeros(batch * shape.block_size, dtype=torch.long)
            logits = model(targets.view(batch, -1)).flatten(0, 1)
        F.cross_entropy(logits, targets).backward()
    parameters = sum(p.numel() for p in model.parameters())
    state = memory.predict(parameters, 1, 0, memory.DEEPSPEED_FP32)
    return int(state.optimizer) + counter.peak


LESSONS = [p for p in notebooks.all_notebooks() if "batch" in settings_cell(p)]


@pytest.fixture(params=[1, 2, 4, 8])
def gpus(request, monkeypatch) -> int:
    """Set full mode, on a machine that says that it has so many GPUs."""
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize(
    "path", LESSONS, ids=lambda path: path.parent.name[:3] + path.stem
)
def test_a_lesson_in_full_mode_fits_a_gpu_of_24_gb(path, gpus):
    found = knobs(path)
    shape = [
        v for k, v in found.items() if isinstance(v, models.GPTConfig) and k[0] > "Z"
    ]
    batch = found.get("batch_size", found.get("global_batch"))
    side = IMAGE_SIDES.get(path.parent.name[:2], models.SMOKE)
    assert bytes_of_training((shape or [side])[0], batch) < GPU_BYTES


train_fsdp2 = scripts.load(scripts.ROOT / "03-fsdp-deepspeed" / "train_fsdp2.py")


def peak_of_script(batch: int) -> int:
    """Return the bytes of two steps of train_fsdp2.py in float32, on one GPU."""
    with FakeTensorMode(), memory.count_memory() as counter:
        model = models.GPT(models.GPT2_124M)
        optimizer = torch.optim.AdamW(model.parameters())
        texts = torch.zeros(batch, models.GPT2_124M.block_size, dtype=torch.long)
        for _ in range(2):
            train_fsdp2.train_step(model, optimizer, texts, texts, clip=1.0)
    return counter.peak


def test_the_scripts_of_part_03_fit_a_gpu_of_24_gb(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py", "--num-workers", "1"])
    assert peak_of_script(train_fsdp2.parse_args().batch_size) < GPU_BYTES
    file = scripts.ROOT / "03-fsdp-deepspeed" / "ds_config.json"
    config = json.loads(file.read_text())
    bucket = config["zero_optimization"].get("reduce_bucket_size", 5e8) * 4  # float32
    copies = 12 * sum(p.numel() for p in models.GPT(models.GPT2_124M).parameters())
    peak = peak_of_script(config["train_micro_batch_size_per_gpu"])
    assert peak + copies + bucket < GPU_BYTES


def test_a_batch_that_is_too_large_for_it_is_noticed():
    assert peak_of_script(20) > GPU_BYTES
    assert bytes_of_training(models.GPT2_124M, 64) > GPU_BYTES
    assert bytes_of_training(224, 2048) > GPU_BYTES


def test_full_mode_takes_every_gpu(gpus):
    by_number = {path.parent.name[:2] + path.stem[:2]: path for path in LESSONS}
    for number in ("0102", "0202", "0203", "0302", "0303", "0306"):
        assert knobs(by_number[number])["num_workers"] == gpus
    device = knobs(by_number["0304"])["device_type"]
    assert device == ("cuda" if gpus >= 4 else "cpu")  # a grid of 2 x 2


def test_deepspeed_of_cpus_is_asked_for_by_name():
    """Ranks have it in memory for CPUs already: for the device of a GPU it would fail."""
    for path in notebooks.all_notebooks():
        lesson = "\n".join(notebooks.code(path))
        if "utils.deepspeed_on_cpus" in lesson:
            assert "load_deepspeed" not in lesson, path


@pytest.mark.parametrize("offload", [False, True])
def test_on_a_head_without_a_gpu_ray_train_chooses_the_backend(monkeypatch, offload):
    """The driver sees no GPU: what it would choose, gloo, is not what workers need."""
    asked = {}
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda _, **k: asked.update(k))
    monkeypatch.setattr(cluster, "start_ray", lambda *_, **__: None)
    monkeypatch.setattr(preflight, "check_shared", lambda path: None)
    monkeypatch.setattr(preflight, "use_gpu", lambda smoke_test: True)
    done = SimpleNamespace(return_value={})
    monkeypatch.setattr(ray_runs, "fit", lambda trainer, folder: done)
    given = {"checkpoint_dir": None, "text": None, "export": None}
    args = Namespace(num_workers=2, smoke_test=False, **given)
    torchrun_or_ray.with_ray(None, args, "train_fsdp2", offload)
    assert asked["scaling_config"].use_gpu
    assert asked["torch_config"].backend == ("cpu:gloo,cuda:nccl" if offload else None)


def test_every_script_runs_with_every_gpu():
    commands = gpu.commands(4).values()
    assert {each for args in commands for each in args if each in SCRIPTS} == SCRIPTS
    on_torchrun = [args for args in commands if args[:4] == gpu.TORCHRUN]
    assert len(on_torchrun) == 3 and all(args[4] == 4 for args in on_torchrun)


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.gpu"],
        cwd=scripts.ROOT,
        env=scripts.environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("There is no GPU that torch can use here: `make doc")


def test_what_fails_does_not_end_the_run(tmp_path, capsys):
    steps = {
        "a": lambda: gpu.run_command("-c", "raise SystemExit('no | room')"),
        "b": lambda: gpu.run_command(
            "-c", "import os; print(os.environ['WORKSHOP_MODE'])"
        ),
    }
    file = tmp_path / "build" / "gpu.md"
    assert gpu.run(steps, "an H100", file) == 1
    assert file.read_text() in capsys.readouterr().out
    failed, passed = (line.split(" | ") for line in file.read_text().splitlines()[2:])
    assert (failed[1], failed[3]) == ("FAIL", "RuntimeError: status 1: no / room |")
    assert (passed[1], passed[3]) == ("pass", "full |")
