"""Sharded checkpoints: killed workers, full disks, what cannot be resumed from."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd

from tests import scripts, sharding
from tests.waiting import TIMEOUT_S, wait_until
from utils import runs, zero
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
    return f"loss {report['loss']:.3f}, test loss {report['test_loss']:.3f}"


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
    flags = ["--smoke-test", "--save-every", 5, "--checkpoint-dir", tmp_path]
    flags += [] if launcher else ["--num-workers", 2]
    job = start(*launcher, script, "--steps", STEPS, *flags)
    output = kill_one(job, workers, lambda: runs.newest(tmp_path))
    went_on = re.search(r"goes on after step (\d+) of", output)
    assert went_on and 5 <= int(went_on[1]) < STEPS, output[-3000:]
    assert "Warning" not in output
    assert f"step {STEPS}: {undisturbed(script)}\n" in output


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


def run_of(script, folder: Path, *parts, batch: int = 12, **settings) -> runs.Run:
    """Return a run of a script, resumed, as its `train` makes it."""
    how = script.save_checkpoint, script.load_checkpoint
    run = runs.Run(folder, script.__name__, *how, {"global batch": batch} | settings)
    run.resume(*parts)
    return run


def save_five(run: runs.Run) -> Path:
    """Take five steps, of which the last one is saved."""
    for _ in run.each_step(run.steps + 5, save_every=100):
        run.stepped(torch.tensor(1.0))
    return runs.newest(run.folder)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_full_disk_is_a_sentence_on_all_ranks_and_leaves_what_was_saved(
    background, tmp_path
):
    """On the disk of rank 1 alone."""

    def save() -> tuple[str, Path]:
        script = scripts.load(FSDP2)
        parts = build_fsdp2()
        group = dist.new_group(backend="gloo") if background else None
        run = run_of(script, tmp_path, *parts, group)
        save_five(run)
        if dist.get_rank() == 1:
            fill_the_disk()
        with pytest.raises(BadInput, match="cannot be written") as error:
            save_five(run)
        return str(error.value), runs.newest(tmp_path)

    (first, found), (second, _) = run_ranks(save, 2)
    named = tmp_path / "train_fsdp2-000010"
    assert first.startswith(f"{named} cannot be written (")
    assert second.startswith(f"{named} cannot be written (")
    assert found == tmp_path / "train_fsdp2-000005"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_with_fsdp2_goes_on_with_more_or_fewer_ranks(ranks, tmp_path):
    """With the weights and Adam's averages that two ranks have saved."""
    script = scripts.load(FSDP2)

    def numbers(model, optimizer) -> list[torch.Tensor]:
        state = sd.get_state_dict(model, optimizer)
        moments = [each["exp_avg"] for each in state[1]["state"].values()]
        return [t.full_tensor().clone() for t in (*state[0].values(), *moments)]

    def trained(seed: int) -> tuple:
        dist.init_process_group("gloo")
        torch.manual_seed(seed)
        model = sharding.shard(sharding.GPT(sharding.CONFIG))
        optimizer = torch.optim.AdamW(model.parameters())
        sharding.loss_of(model, *sharding.share(0)).backward()
        optimizer.step()
        return model, optimizer

    def save() -> list[torch.Tensor]:
        parts = trained(0)
        save_five(run_of(script, tmp_path, *parts))
        return numbers(*parts)

    def load() -> tuple[int, list[torch.Tensor]]:
        parts = trained(1)
        return run_of(script, tmp_path, *parts).steps, numbers(*parts)

    saved = run_ranks(save, 2)[0]
    for steps, loaded in run_ranks(load, ranks):
        assert steps == 5
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


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
        checkpoint = save_five(run_of(script, tmp_path, engine))
        script.export(engine, checkpoint, tmp_path / "model.pt")
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
        run = run_of(scripts.load(DEEPSPEED), tmp_path, engine)
        save_five(run)
        if dist.get_rank() == 1:
            fill_the_disk()
        save_five(run)

    with pytest.raises(
        RuntimeError, match=r"rank 1 .*BadInput: .*10 cannot be written"
    ):
        run_ranks(save, 2, timeout=TIMEOUT_S)
    assert runs.newest(tmp_path).name == "train_deepspeed-000005"


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
    script, parts = scripts.load(FSDP2), build_fsdp2()
    saved = save_five(run_of(script, folder, *parts))
    yield says("global batch 12", partial(run_of, batch=6), script, folder, *parts)
    yield says("of another model", run_of, script, folder, *build_fsdp2(WIDER))
    for file in (saved / "__0_0.distcp", saved / ".metadata"):
        for _ in damages(file):
            yield says("is damaged", run_of, script, folder, *parts)


def refusals_of_zero(folder: Path) -> Iterator[str]:
    script, engine = scripts.load(DEEPSPEED), build_zero(3)
    saved = save_five(run_of(script, folder, engine))
    yield says("global batch 12", partial(run_of, batch=6), script, folder, engine)
    wider = build_zero(3, 12, WIDER)
    yield says("of another model", run_of, script, folder, wider)
    for part in ("optim", "model"):
        file = saved / f"zero_pp_rank_0_mp_rank_00_{part}_states.pt"
        for _ in damages(file):
            yield says("is damaged", run_of, script, folder, engine)


def test_what_cannot_be_resumed_from_is_said(tmp_path):
    def refuse():
        fsdp2 = list(refusals_of_fsdp2(tmp_path / "fsdp2"))
        return fsdp2, list(refusals_of_zero(tmp_path / "zero"))

    fsdp2, deepspeed = run_ranks(refuse, 1)[0]
    assert "this one has global batch 6" in fsdp2[0]
    assert "this one has global batch 6" in deepspeed[0]
    for said in (*fsdp2[1:], *deepspeed[1:]):
        assert re.search(r"-000005 is damaged, of another model, or not seen by", said)
        assert "\n" not in said


def test_a_checkpoint_of_another_world_size_says_how_to_convert(tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    zero.check_world_size(tmp_path, 2)
    with pytest.raises(BadInput, match=r"made for 2 workers.*ds_to_universal"):
        zero.check_world_size(tmp_path, 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(BadInput, match="made for 2 workers"):
        scripts.load(DEEPSPEED).load_checkpoint(tmp_path, None)
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
