"""Sharded checkpoints: killed workers, full disks, what cannot be resumed from."""

import os
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from tests import scripts, sharding
from tests.waiting import TIMEOUT_S, wait_until
from utils import zero
from utils.errors import BadInput
from utils.launch import run_ranks

FSDP2, DEEPSPEED = sharding.TRAIN_FSDP2, sharding.TRAIN_DEEPSPEED
STEPS = 40  # so that the kill, after the fifth, comes before the end
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc_per_node=2", "--max-restarts=1"]


def start(*command) -> subprocess.Popen:
    # else the new ranks may find the addresses of the dead ones (pytorch issue 135712)
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=FSDP2.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=scripts.environment() | fresh_store,
    )


def undisturbed(script: Path) -> str:
    """Return what a script should report: the losses of two forked ranks."""

    def train() -> dict:
        sys.argv = [script.name, "--smoke-test", "--steps", str(STEPS)]
        module = scripts.load(script)
        args = module.parse_args()
        dist.init_process_group("gloo")
        return module.train(args)

    report = run_ranks(train, 2)[0]
    return f"last loss {report['losses'][-1]:.3f}, test loss {report['test_loss']:.3f}"


def kill_one(job: subprocess.Popen, workers: Callable, saved: Callable) -> str:
    """SIGKILL to the last worker of a job that has saved; returns what the job prints."""
    wait_until(saved, job, lambda: job.stdout.read()[-3000:] if job.poll() else "")
    workers(psutil.Process(job.pid))[-1].kill()
    output, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher", "workers"),
    [
        pytest.param(
            FSDP2,
            [],
            scripts.workers_of_ray,
            id="FSDP2, Ray",
            marks=[pytest.mark.weekly, pytest.mark.ray],
        ),
        pytest.param(DEEPSPEED, TORCHRUN, psutil.Process.children, id="ZeRO, torchrun"),
    ],
)
def test_killed_workers_change_nothing(script, launcher, workers, tmp_path):
    """Ray Train replaces one, and torchrun another: what starts them is the same code."""
    module = scripts.load(script)
    flags = ["--smoke-test", "--save-every", 5, "--checkpoint-dir", tmp_path]
    flags += [] if launcher else ["--num-workers", 2]
    job = start(*launcher, script, "--steps", STEPS, *flags)
    output = kill_one(job, workers, lambda: module.last_checkpoint(tmp_path))
    found = re.search(r"steps (\d+) to \d+: (last loss .*)", output)
    assert found, output[-3000:]
    assert 5 < int(found[1]) <= STEPS
    assert "Warning" not in output
    assert found[2] == undisturbed(script)


def test_zero_names_a_checkpoint_only_when_all_ranks_have_written_it(tmp_path):
    class Engine:
        """DeepSpeed's part of saving, in which rank 1 is slow."""

        def train_batch_size(self):
            return 12

        def save_checkpoint(self, folder, tag, client_state, save_latest=True):
            rank = dist.get_rank()
            time.sleep(rank)
            assert not (folder / "latest").exists()  # nobody reads this one yet
            (folder / f"partition-{rank}").touch()
            if save_latest and rank == 0:
                (folder / "latest").write_text(tag)

    def save():
        dist.init_process_group("gloo")
        script = scripts.load(DEEPSPEED)
        script.save_checkpoint(Engine(), 5, tmp_path)
        return script.last_checkpoint(tmp_path), len(list(tmp_path.glob("partition-*")))

    assert run_ranks(save, 2)[0] == (tmp_path / "step-000005", 2)


def build_fsdp2(config=sharding.CONFIG) -> tuple:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharding.shard(sharding.GPT(config))
    return model, torch.optim.AdamW(model.parameters())


def build_zero(stage: int, batch_size: int = 12, config=sharding.CONFIG):
    os.environ["WORKSHOP_MODE"] = "smoke"
    deepspeed = zero.load_deepspeed()
    deepspeed.init_distributed("gloo")
    model = sharding.GPT(config)
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config=sharding.zero_config(stage, batch_size),
    )[0]


def fill_the_disk() -> None:
    """Let no file of this process get longer than 64 KiB from here on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_full_disk_is_a_sentence_on_all_ranks_and_leaves_what_was_saved(
    background, tmp_path
):
    """On the disk of rank 1 alone."""

    def save() -> tuple[str, Path]:
        script = scripts.load(FSDP2)
        model, optimizer = build_fsdp2()
        group = dist.new_group(backend="gloo") if background else None
        args = Namespace(checkpoint_dir=tmp_path, keep=2)

        def save_step(step: int) -> None:
            trained = model, optimizer, step, 12, tmp_path
            script.finish(script.save_checkpoint(*trained, background=group), args)

        save_step(5)
        if dist.get_rank() == 1:
            fill_the_disk()
        with pytest.raises(BadInput, match="cannot be written") as error:
            save_step(10)
        return str(error.value), script.last_checkpoint(tmp_path)

    (first, found), (second, _) = run_ranks(save, 2)
    named = tmp_path if background else tmp_path / "step-000010"
    assert first.startswith(f"{named} cannot be written (")
    assert second.startswith(f"{named} cannot be written (")
    assert found == tmp_path / "step-000005"


def test_an_export_to_a_full_disk_leaves_no_file(tmp_path):
    def export() -> None:
        model, _ = build_fsdp2()
        if dist.get_rank() == 0:  # which alone writes it
            fill_the_disk()
        scripts.load(FSDP2).export(model, tmp_path / "model.pt")

    with pytest.raises(
        RuntimeError, match=r"BadInput: .*model.pt cannot be written \("
    ):
        run_ranks(export, 2, timeout=TIMEOUT_S)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 3])
def test_what_zero_exports_is_what_its_ranks_hold(stage, tmp_path):
    """At stage 0 nothing is in partitions, and DeepSpeed's converter finds nothing."""

    def save() -> int:
        torch.manual_seed(0)
        engine, script = build_zero(stage, 6), scripts.load(DEEPSPEED)
        script.save_checkpoint(engine, 5, tmp_path)
        script.export(engine, script.last_checkpoint(tmp_path), tmp_path / "model.pt")
        return next(engine.module.parameters()).numel()

    held = run_ranks(save, 2)[0]
    expected = sharding.build_model(torch.float32).state_dict()
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert held == (0 if stage == 3 else expected["tokens.weight"].numel())
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_a_full_disk_of_one_rank_ends_zero_with_a_sentence(tmp_path):
    """The others wait for it, and end with it, under every launcher."""

    def save() -> None:
        engine = build_zero(3, 6)
        script = scripts.load(DEEPSPEED)
        script.save_checkpoint(engine, 5, tmp_path)
        if dist.get_rank() == 1:
            fill_the_disk()
        script.save_checkpoint(engine, 10, tmp_path)

    with pytest.raises(
        RuntimeError, match=r"rank 1 .*BadInput: .*10 cannot be written"
    ):
        run_ranks(save, 2, timeout=TIMEOUT_S)
    assert (tmp_path / "latest").read_text() == "step-000005"


WIDER = sharding.GPTConfig(layers=2, block_size=32, width=96)


def damages(path: Path) -> Iterator[None]:
    """Damage a file in one way after the other, and mend it at the end."""
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"damaged", b"", None):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        yield
    path.write_bytes(whole)


def says(match: str, load: Callable, *args) -> str:
    with pytest.raises(BadInput, match=match) as error:
        load(*args)
    return str(error.value)


def refusals_of_fsdp2(folder: Path) -> Iterator[str]:
    script = scripts.load(FSDP2)
    model, optimizer = build_fsdp2()
    script.save_checkpoint(model, optimizer, 5, 12, folder)
    saved = script.last_checkpoint(folder)
    yield says("global batch of 12", script.load_checkpoint, model, optimizer, 6, saved)
    yield says(
        "of another model", script.load_checkpoint, *build_fsdp2(WIDER), 12, saved
    )
    for file in (saved / "__0_0.distcp", saved / ".metadata"):
        for _ in damages(file):
            load = script.load_checkpoint
            yield says("is damaged", load, model, optimizer, 12, saved)


def refusals_of_zero(folder: Path) -> Iterator[str]:
    script, engine = scripts.load(DEEPSPEED), build_zero(3)
    folder.mkdir()
    script.save_checkpoint(engine, 5, folder)
    saved = script.last_checkpoint(folder)
    yield says("global batch of 12", script.load_checkpoint, build_zero(3, 6), saved)
    yield says(
        "of another model", script.load_checkpoint, build_zero(3, 12, WIDER), saved
    )
    for part in ("optim", "model"):
        file = saved / f"zero_pp_rank_0_mp_rank_00_{part}_states.pt"
        for _ in damages(file):
            yield says("is damaged", script.load_checkpoint, engine, saved)


def test_what_cannot_be_resumed_from_is_said(tmp_path):
    def refuse():
        fsdp2 = list(refusals_of_fsdp2(tmp_path / "fsdp2"))
        return fsdp2, list(refusals_of_zero(tmp_path / "zero"))

    fsdp2, deepspeed = run_ranks(refuse, 1)[0]
    assert "now it is 6" in fsdp2[0]
    assert fsdp2[0] == deepspeed[0]
    for folder, said in ((tmp_path / "fsdp2", fsdp2), (tmp_path / "zero", deepspeed)):
        step = folder / "step-000005"
        (sentence,) = set(said[1:])
        assert sentence.startswith(
            f"The checkpoint {step} is damaged, of another model"
        )


def test_a_checkpoint_of_another_world_size_says_how_to_convert(tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    zero.check_world_size(tmp_path, 2)
    with pytest.raises(BadInput, match=r"made for 2 workers.*ds_to_universal"):
        zero.check_world_size(tmp_path, 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(BadInput, match="made for 2 workers"):
        scripts.load(DEEPSPEED).load_checkpoint(None, tmp_path)
    (tmp_path / "zero").mkdir()  # as in a converted one
    zero.check_world_size(tmp_path, 3)


def test_a_converted_checkpoint_is_not_exported(tmp_path):
    """It lacks what DeepSpeed's own export reads; a step of training saves it again."""
    converted = tmp_path / "step-000009-universal"
    (converted / "zero").mkdir(parents=True)
    with pytest.raises(
        BadInput, match="step-000009-universal was converted, and --exp"
    ):
        zero.check_exportable(converted)


@pytest.mark.parametrize("script", [FSDP2, DEEPSPEED], ids=lambda path: path.stem)
def test_ray_can_send_the_training_to_workers(script):
    """With it go submodules of torch whose names it mentions, as if it had meant them."""
    assert cloudpickle.dumps(scripts.load(script).train)
