"""Sharded checkpoints: killed workers, full disks, what cannot be resumed from."""

import contextlib
import io
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
from ray.train import WorkerGroupError

from tests import scripts, sharding
from tests.patience import PATIENCE, wait_until
from utils import settings, torchrun_or_ray, zero
from utils.errors import BadInput
from utils.launch import run_ranks

pytestmark = pytest.mark.part03

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
    output, _ = job.communicate(timeout=PATIENCE)
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
            marks=[pytest.mark.weekly, pytest.mark.xdist_group("ray")],
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


def test_a_full_disk_is_a_sentence_on_all_ranks_and_leaves_what_was_saved(tmp_path):
    """On the disk of rank 1 alone, for FSDP2's checkpoint."""

    def save() -> tuple[list[str], Path]:
        script, said = scripts.load(FSDP2), []
        model, optimizer = build_fsdp2()
        script.save_checkpoint(model, optimizer, 5, 12, tmp_path)
        if dist.get_rank() == 1:
            fill_the_disk()
        with pytest.raises(BadInput, match="cannot be written") as error:
            script.save_checkpoint(model, optimizer, 10, 12, tmp_path)
        said.append(str(error.value))
        if dist.get_rank() == 0:
            fill_the_disk()
            with pytest.raises(BadInput, match="cannot be written") as error:
                script.export(model, tmp_path / "model.pt")
            said.append(str(error.value))
        else:
            script.export(model, tmp_path / "model.pt")
        return said, script.last_checkpoint(tmp_path)

    (first, found), (second, _) = run_ranks(save, 2)
    assert first[0] == second[0]
    assert first[0].startswith(f"{tmp_path / 'step-000010'} cannot be written (")
    assert first[1].startswith(f"{tmp_path / 'model.pt'} cannot be written (")
    assert found == tmp_path / "step-000005"
    assert not list(tmp_path.glob("*model.pt*"))


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
        run_ranks(save, 2, timeout=PATIENCE)
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_mistake_of_ours_is_no_damaged_checkpoint(tmp_path, monkeypatch):
    """It keeps its own error, and so its traceback."""

    class Engine:
        def load_checkpoint(self, folder, tag):
            return self.misspelt

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(AttributeError, match="misspelt"):
        scripts.load(DEEPSPEED).load_checkpoint(Engine(), tmp_path)
    fsdp2 = scripts.load(FSDP2)
    monkeypatch.setattr(fsdp2, "state_of", lambda *_: None)
    with pytest.raises(AttributeError):
        fsdp2.load_checkpoint(None, None, 12, tmp_path)


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


@pytest.mark.slow
def test_a_finished_run_starts_again_and_ends_well(tmp_path):
    """It evaluates, says so, and leaves its checkpoints alone; asked for less, too."""

    def train(script: Path, steps: int) -> tuple[dict, str]:
        sys.argv = [script.name, "--smoke-test", "--batch-size", "4"]
        sys.argv += ["--steps", str(steps)]
        sys.argv += ["--checkpoint-dir", str(tmp_path / script.stem)]
        module = scripts.load(script)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            report = module.train(args := module.parse_args())
            torchrun_or_ray.end(args, report)
        return report, printed.getvalue()

    def again() -> list:
        dist.init_process_group("gloo")
        scripts_ = (FSDP2, DEEPSPEED)
        return [[train(script, steps) for steps in (2, 2, 1)] for script in scripts_]

    for (first, _), *later in run_ranks(again, 2)[0]:
        assert len(first["losses"]) == 2
        for report, said in later:
            assert report["losses"] == [] and report["first_step"] == 2
            assert report["test_loss"] == first["test_loss"]
            assert "nothing is left to train after step 2 of train_" in said
            assert f"test loss {report['test_loss']:.3f}" in said


def test_folders_are_written_to_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    args = Namespace(fresh=False, num_workers=None, export=tmp_path / "new" / "m.pt")
    args.checkpoint_dir = tmp_path
    torchrun_or_ray.check_launch(args)
    (tmp_path / "a file").touch()
    args.export = tmp_path / "a file" / "model.pt"
    with pytest.raises(BadInput, match="cannot be written to"):
        torchrun_or_ray.check_launch(args)


def call(
    script: Path, monkeypatch, *flags, rank: str | None = "0", mode: str = "smoke"
):
    """Call the script's `main` in this process, as if rank 0, or without a launcher."""
    monkeypatch.setenv("WORKSHOP_MODE", mode)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", [script.name, *map(str, flags)])
    scripts.load(script).main()


@pytest.mark.parametrize("script", [FSDP2, DEEPSPEED], ids=lambda path: path.stem)
def test_how_a_script_was_called_is_checked_first(script, tmp_path, monkeypatch):
    def said(*flags, **how) -> str:
        try:
            call(script, monkeypatch, *flags, **how)
        except BadInput as error:
            return str(error)
        pytest.fail("nothing was wrong")

    assert "start me with torchrun" in said(rank=None)
    assert "auto, smoke and full" in said(mode="fast")
    assert "--steps: it is 0, but has to be" in said("--steps", 0)
    assert "--lr: it is 0, but has to be a number above 0" in said("--lr", 0)
    assert "--clip: it is -1, but has to be a number above 0" in said("--clip=-1")
    assert "leave out one of them" in said("--num-workers", 2)
    (tmp_path / "step-000005").mkdir()
    folder = ["--checkpoint-dir", tmp_path]
    assert "is not empty, and --fresh starts" in said(*folder, "--fresh")
    if script == FSDP2:
        assert "needs a GPU to offload from" in said("--offload")
    else:
        assert "--export needs --checkpoint-dir" in said("--export", "model.pt")


@pytest.mark.parametrize("script", [FSDP2, DEEPSPEED], ids=lambda path: path.stem)
def test_what_a_worker_of_ray_finds_is_what_the_script_raises(
    script, monkeypatch, tmp_path
):
    """All nodes are asked for its folders before that."""

    def fit(trainer):
        raise WorkerGroupError("failed", {1: BadInput("a sentence")})

    asked = []
    monkeypatch.setattr("utils.cluster.start_ray", lambda num_workers, **_: None)
    monkeypatch.setattr("utils.preflight.check_shared", asked.append)
    monkeypatch.setattr("ray.train.torch.TorchTrainer.fit", fit)
    arguments = ["--num-workers", 2, "--checkpoint-dir", tmp_path]
    with pytest.raises(BadInput, match=r"^a sentence$"):
        call(script, monkeypatch, *arguments, rank=None)
    assert asked == [settings.storage_path(), tmp_path]


@pytest.mark.parametrize("script", [FSDP2, DEEPSPEED], ids=lambda path: path.stem)
def test_ray_can_send_the_training_to_workers(script):
    """With it go submodules of torch whose names it mentions, as if it had meant them."""
    assert cloudpickle.dumps(scripts.load(script).train)
