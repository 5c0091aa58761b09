"""Sharded checkpoints: other numbers of ranks, exports, a killed worker; and bad input."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ray.train import WorkerGroupError

from tests import scripts, sharding
from utils.launch import run_ranks
from utils.models import GPT, SMOKE

pytestmark = pytest.mark.part03

FOLDER = sharding.TRAIN_FSDP2.parent


def worst(ours, theirs) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def export_fsdp2(path: Path) -> torch.Tensor:
    """Train three steps, export with the script, return the sharded model's logits."""
    result = sharding.fsdp2(torch.float32, steps=3)
    model = sharding.shard(GPT(sharding.CONFIG))
    options = sharding.sd.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    sharding.sd.set_model_state_dict(model, result["weights"], options=options)
    scripts.load(sharding.TRAIN_FSDP2).export(model, path)
    return result["logits"]


def test_fsdp2_resumes_on_other_numbers_of_ranks(tmp_path):
    whole = run_ranks(sharding.fsdp2, 2, torch.float64)[0]
    run_ranks(lambda: sharding.fsdp2(torch.float64, 5, save=tmp_path), 2)
    saved = scripts.load(sharding.TRAIN_FSDP2).last_checkpoint(tmp_path)
    for num_workers in (1, 3):
        resumed = run_ranks(
            lambda: sharding.fsdp2(torch.float64, 10, load=saved), num_workers
        )[0]
        assert len(resumed["losses"]) == 5
        assert resumed["losses"] == pytest.approx(whole["losses"][5:], abs=1e-10)
        assert worst(resumed["parameters"], whole["parameters"]) < 1e-10
        assert worst(resumed["moments"], whole["moments"]) < 1e-10


def test_fsdp2_exports_what_it_trained(tmp_path):
    logits = run_ranks(export_fsdp2, 2, tmp_path / "model.pt")[0]
    model = GPT(sharding.CONFIG)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    inputs = sharding.text(block_size=sharding.CONFIG.block_size)[:2][0]
    torch.testing.assert_close(model(inputs), logits, atol=1e-5, rtol=0)


def test_zero3_exports_and_resumes_on_other_numbers_of_ranks(tmp_path):
    def train_and_save():
        whole = sharding.zero(3, torch.float32)
        return whole, sharding.zero(3, torch.float32, 5, save=tmp_path)

    whole, half = run_ranks(train_and_save, 2)[0]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = GPT(sharding.CONFIG)
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "saved"))
    inputs = sharding.text(block_size=sharding.CONFIG.block_size)[:2][0]
    torch.testing.assert_close(model(inputs), half["logits"], atol=1e-5, rtol=0)

    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", tmp_path / "saved", "--inject_missing_state"]
    command += ["--output_folder", tmp_path / "universal"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (tmp_path / "latest").write_text("universal")
    universal = {"load_universal": True}
    for num_workers in (1, 3):
        resumed = run_ranks(
            lambda: sharding.zero(
                3, torch.float32, first=5, load=tmp_path, checkpoint=universal
            ),
            num_workers,
        )[0]
        assert resumed["losses"] == pytest.approx(whole["losses"][5:], abs=1e-5)
        assert worst(resumed["parameters"], whole["parameters"]) < 1e-4


def test_zero_names_a_checkpoint_only_when_all_ranks_have_written_it(tmp_path):
    script = scripts.load(sharding.TRAIN_DEEPSPEED)

    class Engine:
        """DeepSpeed's part of saving, in which rank 1 is slow."""

        def train_batch_size(self):
            return 12

        def save_checkpoint(self, folder, tag, client_state, save_latest=True):
            rank = dist.get_rank()
            time.sleep(rank)
            (folder / f"partition-{rank}").touch()
            if save_latest and rank == 0:
                (folder / "latest").write_text(tag)

    def save():
        dist.init_process_group("gloo")
        script.save_checkpoint(Engine(), 5, tmp_path)
        return script.last_checkpoint(tmp_path), len(list(tmp_path.glob("partition-*")))

    assert run_ranks(save, 2)[0] == (tmp_path / "step-000005", 2)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc_per_node=2", "--max-restarts=1"]


def start(command: list) -> subprocess.Popen:
    # else the new ranks may find the addresses of the dead ones (pytorch issue 135712)
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=scripts.environment() | fresh_store,
    )


def last_line(output: str) -> tuple[int, str]:
    """The first step, and losses, of the script's report."""
    found = re.search(r"steps (\d+) to \d+: (last loss .*)", output)
    assert found, output[-3000:]
    return int(found[1]), found[2]


SCRIPTS = [sharding.TRAIN_FSDP2, sharding.TRAIN_DEEPSPEED]
STEPS = 30


def undisturbed(script: Path) -> str:
    """What a script should report: the losses of two forked ranks that run through."""

    def train() -> dict:
        sys.argv = [script.name, "--smoke-test", "--steps", str(STEPS)]
        module = scripts.load(script)
        args = module.parse_args()
        args.ds_config = module.check(args, restarted=False)
        dist.init_process_group("gloo")
        return module.train(args)

    report = run_ranks(train, 2)[0]
    return f"last loss {report['losses'][-1]:.3f}, test loss {report['test_loss']:.3f}"


def kill_one(job: subprocess.Popen, workers: Callable, saved: Callable) -> str:
    """SIGKILL to the last worker of a job that has saved; returns what the job prints."""
    deadline = time.monotonic() + 240
    while not saved():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.stdout.read()[-3000:]
        time.sleep(0.05)
    workers(psutil.Process(job.pid))[-1].kill()
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output[-3000:]
    return output


def workers_of_ray(driver: psutil.Process) -> list[psutil.Process]:
    started = driver.children(recursive=True)
    return [one for one in started if "RayTrainWorker" in " ".join(one.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=["FSDP2", "ZeRO"])
def test_killed_workers_change_nothing(script, tmp_path):
    """Ray Train replaces one, and torchrun, which goes on from there, another one."""
    module = scripts.load(script)

    def saved(step: int) -> bool:
        checkpoint = module.last_checkpoint(tmp_path)
        return checkpoint is not None and checkpoint.name >= f"step-{step:06d}"

    flags = ["--smoke-test", "--save-every", 5, "--checkpoint-dir", tmp_path]
    python = [sys.executable, script, "--num-workers", 2]
    job = start([*python, "--steps", STEPS // 2, *flags])
    output = kill_one(job, workers_of_ray, lambda: saved(5))
    assert 5 < last_line(output)[0] <= STEPS // 2
    assert "Warning" not in output

    job = start([*TORCHRUN, script, "--steps", STEPS, "--resume", *flags])
    output = kill_one(job, psutil.Process.children, lambda: saved(STEPS // 2 + 5))
    first_step, losses = last_line(output)
    assert STEPS // 2 + 5 < first_step <= STEPS
    assert losses == undisturbed(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_worker_of_ray_finds_is_one_sentence(script, monkeypatch):
    def fit(trainer):
        raise WorkerGroupError("failed", {1: ValueError("a sentence")})

    monkeypatch.setattr("utils.cluster.start_ray", lambda num_workers: None)
    monkeypatch.setattr("ray.train.torch.TorchTrainer.fit", fit)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [script.name, "--num-workers", "2"])
    with pytest.raises(SystemExit) as stopped:
        scripts.load(script).main()
    assert stopped.value.code == f"{script.name}: a sentence"


@pytest.fixture
def sentence(monkeypatch):
    """A function that calls a script here, as the only rank, and returns what it says."""

    def call(script: Path, *flags, mode: str = "smoke") -> str:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        for name, value in (rank | {"WORKSHOP_MODE": mode}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [script.name, *map(str, flags)])
        with pytest.raises(SystemExit) as stopped:
            scripts.load(script).main()
        said = stopped.value.code  # a text: Python prints it and exits with status 1
        assert said.startswith(f"{script.name}: ")
        assert "\n" not in said
        return said

    return call


def test_fsdp2_says_what_is_wrong(tmp_path, sentence):
    script = sharding.TRAIN_FSDP2
    assert "needs a GPU to offload from" in sentence(script, "--offload")
    assert "--resume needs --checkpoint-dir" in sentence(script, "--resume")
    flags = ["--checkpoint-dir", tmp_path]
    assert "no complete checkpoint" in sentence(script, "--resume", *flags)
    (tmp_path / "step-000005").mkdir()
    (tmp_path / "step-000005" / ".metadata").write_text("damaged")
    assert "holds checkpoints of an earlier run" in sentence(script, *flags)
    flags += ["--resume", "--steps", 5]
    assert "step-000005 has all 5 steps" in sentence(script, *flags)


def complaint(load: Callable, *args) -> str:
    with pytest.raises(ValueError, match="start without --resume") as said:
        load(*args)
    return str(said.value)


def test_a_checkpoint_of_another_global_batch_is_refused(tmp_path):
    """Its step would begin at other texts."""

    def said(load: Callable, *args) -> str:
        with pytest.raises(ValueError, match="global batch of 12") as error:
            load(*args)
        return str(error.value)

    def save_and_load():
        dist.init_process_group("gloo")
        script = scripts.load(sharding.TRAIN_FSDP2)
        model = sharding.shard(sharding.build_model(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters())
        script.save_checkpoint(model, optimizer, 5, 12, tmp_path / "fsdp2")
        saved = script.last_checkpoint(tmp_path / "fsdp2")
        yield said(script.load_checkpoint, model, optimizer, 6, saved)

        os.environ["WORKSHOP_MODE"] = "smoke"
        script, engines = scripts.load(sharding.TRAIN_DEEPSPEED), []
        for batch_size in (12, 6):
            model = sharding.build_model(torch.float32)
            optimizer = torch.optim.AdamW(model.parameters())
            config = sharding.zero_config(3, batch_size)
            engine, *_ = sharding.load_deepspeed().initialize(
                model=model, optimizer=optimizer, config=config
            )
            engines.append(engine)
        folder = tmp_path / "zero"
        folder.mkdir()
        script.save_checkpoint(engines[0], 5, folder)
        saved = script.last_checkpoint(folder)
        yield said(script.load_checkpoint, engines[1], saved)

    fsdp2, zero = run_ranks(lambda: list(save_and_load()), 1)[0]
    assert "1 workers with the given --batch-size make 6" in fsdp2
    assert "now it is 6" in zero


def test_a_damaged_checkpoint_is_said(tmp_path):
    def load():
        dist.init_process_group("gloo")
        model = sharding.shard(sharding.build_model(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters())
        script = scripts.load(sharding.TRAIN_FSDP2)
        global_batch = sharding.GLOBAL_BATCH
        load = script.load_checkpoint
        yield complaint(load, model, optimizer, global_batch, tmp_path)
        os.environ["WORKSHOP_MODE"] = "smoke"
        model = sharding.build_model(torch.float32)
        engine, *_ = sharding.load_deepspeed().initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config=sharding.zero_config(3, global_batch),
        )
        script = scripts.load(sharding.TRAIN_DEEPSPEED)
        yield complaint(script.load_checkpoint, engine, tmp_path)

    (tmp_path / ".metadata").write_text("damaged")
    for rank in ("model", "optim"):
        name = f"zero_pp_rank_0_mp_rank_00_{rank}_states.pt"
        (tmp_path / name).write_text("damaged")
    said = run_ranks(lambda: list(load()), 1)[0]
    assert said[0] == said[1]
    assert str(tmp_path) in said[0]


def write_config(folder, zero=(), **changes) -> Path:
    """The file that ships, with changes; those of `zero` in "zero_optimization"."""
    config = json.loads((FOLDER / "ds_config.json").read_text())
    config["zero_optimization"] |= dict(zero)
    path = folder / "changed.json"
    path.write_text(json.dumps(config | changes))
    return path


def read_config(tmp_path, monkeypatch, batch_size=None, stage=None, **changes):
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    path = write_config(tmp_path, **changes)
    arguments = {"ds_config": path, "stage": stage, "batch_size": batch_size}
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    return script.read_config(type("Arguments", (), arguments))


@pytest.mark.parametrize(
    ("flags", "changes", "says"),
    [
        (["--stage", 4], {}, "must be 0, 1, 2 or 3"),
        ([], {"zero": {"stage": -1}}, "must be 0, 1, 2 or 3"),
        ([], {"fp16": {"enabled": True}}, "enable bf16 instead"),
        (["--batch-size", 8], {}, "change one of them"),
        ([], {"zero": {"offload_optimizer": {"device": "cpu"}}}, "needs a GPU"),
        ([], {"zero": {"offload_param": {"device": "nvme"}}}, "libaio"),
    ],
)
def test_deepspeed_says_what_is_wrong(flags, changes, says, tmp_path, sentence):
    path = write_config(tmp_path, **changes)
    assert says in sentence(sharding.TRAIN_DEEPSPEED, "--ds-config", path, *flags)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("has_folder", [True, False])
def test_nvme_needs_a_library_and_a_folder(
    has_library, has_folder, tmp_path, monkeypatch
):
    compatible = sharding.load_deepspeed().ops.__compatible_ops__
    monkeypatch.setitem(compatible, "async_io", has_library)
    folder = tmp_path if has_folder else tmp_path / "missing"
    offload = [{"device": "nvme", "nvme_path": str(folder)}]
    ready = scripts.load(sharding.TRAIN_DEEPSPEED).nvme_is_ready(offload)
    assert ready == (has_library and has_folder)


@pytest.mark.parametrize(
    ("whole", "passes", "fits"),
    [
        (None, 1, True),
        (64, 2, True),
        (64, None, True),
        (64, 1, False),
        (40, None, False),
    ],
)
def test_batch_sizes_of_a_config_have_to_agree(whole, passes, fits):
    """On two workers with 16 texts each."""
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    config = {"train_micro_batch_size_per_gpu": 16, "train_batch_size": whole}
    config["gradient_accumulation_steps"] = passes
    if fits:
        script.check_batch_size(config, 2)
    else:
        with pytest.raises(ValueError, match=r"says train_batch_size .*leave out"):
            script.check_batch_size(config, 2)


def test_offload_leaves_the_optimizer_to_the_script(tmp_path, monkeypatch):
    """DeepSpeed would insist on one of its own; `null` means no offload."""
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    config = read_config(tmp_path, monkeypatch, zero={"offload_optimizer": None})
    assert "zero_force_ds_cpu_optimizer" not in config
    monkeypatch.setattr(script.settings, "device", lambda: torch.device("cuda"))
    arguments = {"ds_config": tmp_path / "gpu.json", "stage": 2, "batch_size": None}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    arguments["ds_config"].write_text(json.dumps({"zero_optimization": zero}))
    config = script.read_config(type("Arguments", (), arguments))
    assert config["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("path", [sharding.TRAIN_FSDP2, sharding.TRAIN_DEEPSPEED])
def test_a_wrong_mode_is_said(path, sentence):
    assert "auto, smoke and full" in sentence(path, mode="fast")


def test_the_config_that_ships_is_right(tmp_path, monkeypatch):
    config = read_config(tmp_path, monkeypatch, batch_size=16, stage=2)
    assert config["zero_optimization"]["stage"] == 2


def test_deepspeed_says_what_is_wrong_with_a_file(tmp_path, sentence):
    (tmp_path / "latest").write_text("step-000005-universal")
    flags = ["--resume", "--steps", 5, "--checkpoint-dir", tmp_path]
    assert "has all 5 steps" in sentence(sharding.TRAIN_DEEPSPEED, *flags)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    said = sentence(sharding.TRAIN_DEEPSPEED, "--ds-config", broken)
    assert "is no readable JSON file" in said


def test_a_checkpoint_of_another_world_size_says_how_to_convert(tmp_path):
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    for rank in range(2):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    script.check_world_size(tmp_path, 2)
    with pytest.raises(ValueError, match=r"made for 2 workers.*ds_to_universal"):
        script.check_world_size(tmp_path, 3)
    (tmp_path / "zero").mkdir()  # as in a converted one
    script.check_world_size(tmp_path, 3)


def test_the_scripts_train_the_same_model():
    fsdp2 = scripts.load(sharding.TRAIN_FSDP2)
    deepspeed = scripts.load(sharding.TRAIN_DEEPSPEED)
    assert fsdp2.MODELS == deepspeed.MODELS
    assert fsdp2.MODELS["smoke"] == SMOKE
