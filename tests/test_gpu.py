"""What can be known of `make gpu` without a GPU: sizes that fit, workers, its table."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests import scripts
from tests.patience import PATIENCE
from tests.tools import gpu, notebooks
from utils import command_line, memory, models, settings

GPU_BYTES = 24 * 2**30 * 0.9  # the rest is for CUDA, NCCL and the allocator's gaps
OPEN = ("folder", "Subset", "nodes.")  # what a knobs cell also makes
IMAGES = {"01": 28, "02": 224}  # pixels of a side, at most, by part
SCRIPTS = sorted(scripts.ROOT.glob("0[123]-*/train_*.py"))


@pytest.fixture(params=[1, 2, 4, 8])
def gpus(request, monkeypatch) -> int:
    """Set full mode, on a machine that says that it has so many GPUs."""
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


def knobs(path: Path) -> dict:
    """Return what a notebook sets by run mode, in the mode and with the GPUs of now."""
    found = {name: getattr(models, name) for name in ("SMOKE", "GPT2_124M")}
    found |= {"settings": settings, "pick": settings.pick, "torch": torch}
    found["default_workers"] = settings.num_workers
    given = {*found, "__builtins__"}
    for source in notebooks.code(path):
        for line in ast.parse(source).body if "pick(" in source else []:
            if not isinstance(line, ast.Assign) or not isinstance(
                line.targets[0], (ast.Name, ast.Tuple)
            ):
                continue
            text = ast.unparse(line)
            of_mode = "# left:" in source or re.search(r"= (settings\.)?pick\(", text)
            if of_mode and not any(word in text for word in OPEN):
                exec(text, found)
    return {name: value for name, value in found.items() if name not in given}


@functools.cache
def step_bytes(shape: models.GPTConfig | int, batch: int) -> int:
    """Return the peak of a step with parameters and gradients, without any memory."""
    with FakeTensorMode(), memory.count_memory() as counter:
        if isinstance(shape, int):
            model, inputs = models.resnet18(), torch.zeros(batch, 1, shape, shape)
            F.cross_entropy(
                model(inputs), torch.zeros(batch, dtype=torch.long)
            ).backward()
        else:
            model = models.GPT(shape)
            inputs = torch.zeros(batch, shape.block_size, dtype=torch.long)
            F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
    return counter.peak


def parameters(shape: models.GPTConfig | int) -> int:
    with torch.device("meta"):
        model = models.resnet18() if isinstance(shape, int) else models.GPT(shape)
    return sum(p.numel() for p in model.parameters())


def needed(shape: models.GPTConfig | int, batch: int, stage: int = 0, gpus=1) -> float:
    """Return the bytes of one GPU: the state of DeepSpeed's optimizer, and a step."""
    state = memory.predict(parameters(shape), gpus, stage, memory.DEEPSPEED_FP32)
    return state.optimizer + step_bytes(shape, batch)


def sizes(path: Path) -> tuple:
    """Return shape and batch on one GPU that a notebook trains with in full mode."""
    found = knobs(path)
    config = [v for v in found.values() if isinstance(v, models.GPTConfig)]
    batch = found.get("batch_size", found.get("global_batch"))
    return (config or [IMAGES.get(path.parent.name[:2], models.SMOKE)])[0], batch


BOOKS = [p for p in notebooks.all_notebooks() if "pick(" in "".join(notebooks.code(p))]
TRAIN = [
    p for p in BOOKS if not p.stem.startswith("07_")
]  # its job is told to use CPUs


@pytest.mark.parametrize(
    "path", TRAIN, ids=lambda path: path.parent.name[:3] + path.stem
)
def test_a_notebook_in_full_mode_fits_24_gb(path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shape, batch = sizes(path)
    assert batch, "its batch size was not found: say in `sizes` where it stands"
    extra = 0
    if path.stem.startswith("05_choosing"):  # a model beside it, to compare gradients
        extra = 8 * parameters(shape)
    assert needed(shape, batch) + extra < GPU_BYTES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_in_full_mode_fits_24_gb(path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", [str(path)])
    script = scripts.load(path)
    if path.parent.name.startswith("03"):
        args = script.parse_args()
        shape = models.SIZES[args.model]
        batch = args.batch_size or args.engine_config["train_micro_batch_size_per_gpu"]
    else:
        shape, batch = 224, command_line.Parser("A script.").parse_args().batch_size
    assert needed(shape, batch) < GPU_BYTES, f"a batch of {batch} is too large"


def test_what_does_not_fit_is_seen():
    assert needed(models.GPT2_124M, 64) > GPU_BYTES
    assert needed(224, 2048) > GPU_BYTES


def test_full_mode_takes_every_gpu(gpus):
    found = {path.stem[:2] + path.parent.name[:2]: knobs(path) for path in BOOKS}
    for name in ("0201", "0202", "0302", "0203", "0303"):  # notebook, part
        assert found[name]["num_workers"] == gpus
    assert (
        found["0503"]["num_workers"] == gpus
    )  # 8 texts: all of 1, 2, 4 or 8 share them
    assert found["0403"]["device_type"] == ("cuda" if gpus >= 4 else "cpu")


def test_every_script_and_notebook_is_a_step(gpus, monkeypatch):
    called = []
    monkeypatch.setattr(gpu, "command", lambda *args: called.append(args) or "")
    for step in gpu.script_steps(gpus):
        step.run()
    assert {p for args in called for p in args if p in SCRIPTS} == set(SCRIPTS)
    on_torchrun = [args for args in called if args[:4] == gpu.TORCHRUN]
    assert len(on_torchrun) == 3 and all(args[4] == gpus for args in on_torchrun)
    names = [step.name for step in gpu.steps(gpus)]
    for path in notebooks.all_notebooks():
        assert str(path.relative_to(scripts.ROOT)) in names


def test_a_batch_that_cannot_be_shared_equally_takes_fewer(monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    choosing = next(path for path in BOOKS if path.stem.startswith("05_choosing"))
    assert knobs(choosing)["num_workers"] == 2  # of 3: they share 8 texts


@pytest.mark.covers("make gpu")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.gpu"],
        cwd=scripts.ROOT,
        env=scripts.environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    sentence = (
        "There is no GPU that torch can use here: `make doctor` says what it sees.\n"
    )
    assert (done.returncode, done.stdout) == (1, sentence)


def test_a_failing_step_does_not_end_the_run(tmp_path, capsys):
    def fail():
        raise RuntimeError("two\nlines | and a bar")

    def skip():
        raise gpu.Skip("needs four GPUs")

    chosen = [gpu.Step("a", lambda: "1 GB"), gpu.Step("b", fail), gpu.Step("c", skip)]
    chosen.append(gpu.Step("d", lambda: "2 GB"))
    file = tmp_path / "build" / "gpu.md"
    assert gpu.run(chosen, {"GPUs": "H100 | 80 GB"}, file) == 1
    assert file.read_text() in capsys.readouterr().out
    assert file.read_text().splitlines() == [
        "| on | |",
        "|---|---|",
        "| GPUs | H100 / 80 GB |",
        "",
        "| step | | seconds | what it measured |",
        "|---|---|--:|---|",
        "| a | pass | 0 | 1 GB |",
        "| b | FAIL | 0 | RuntimeError: two lines / and a bar |",
        "| c | skip | 0 | needs four GPUs |",
        "| d | pass | 0 | 2 GB |",
    ]
    assert gpu.run([chosen[0], chosen[2]], {}, file) == 0


def test_memory_beside_the_formula_also_on_a_cpu():
    """The same function, on the device that is here; another formula is refused."""
    shape = models.GPTConfig(layers=2, width=64)
    assert "by the formula" in gpu.memory("cpu", shape)


def test_memory_that_is_not_the_formulas_fails(monkeypatch):
    monkeypatch.setattr(memory, "FP32", memory.State(4, 4, 4))  # one average forgotten
    predict = memory.predict
    monkeypatch.setattr(memory, "predict", lambda *a: predict(*a, memory.FP32))
    with pytest.raises(AssertionError, match="by the formula"):
        gpu.memory("cpu", models.GPTConfig(layers=2, width=64))


def test_a_command_that_fails_is_said():
    with pytest.raises(RuntimeError, match=r"status 3: no output"):
        gpu.command("-c", "raise SystemExit(3)")
    assert gpu.command("-c", "import os; print(os.environ['WORKSHOP_MODE'])") == "full"
