"""A scheduler stops or kills a run and starts it again: it ends with the same weights."""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import scripts, sharding
from tests.waiting import TIMEOUT_S, wait_until
from utils import runs
from utils.launch import free_port, run_ranks

DDP, RAY = scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP
STREAM = scripts.TRAIN_RAY_DDP_WITH_RAY_DATA
FSDP2, DEEPSPEED = sharding.TRAIN_FSDP2, sharding.TRAIN_DEEPSPEED
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# torchrun's restarted ranks, and new nodes, take a fresh store: see docs/troubleshooting.md
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
OPTIONS = {
    DDP: ["--epochs", "2"],
    RAY: ["--epochs", "6", "--batch-size", "64", "--num-workers", "2"],
    FSDP2: ["--steps", "120", "--save-every", "200"],
    DEEPSPEED: ["--steps", "120", "--save-every", "200"],
}
BEGINS = "starts anew|goes on after|nothing is left"
STREAMED = ["--data-size-gb", "0.004", "--batch-size", "16", "--num-workers", "1"]


with_ray = functools.partial(pytest.param, marks=pytest.mark.ray)


class Job:
    """A script as a scheduler starts it, always with the same command."""

    def __init__(
        self, script: Path, folder: Path, *launcher: str, options=(), by_ray=False
    ):
        options = [*(options or OPTIONS[script])]
        if script in (FSDP2, DEEPSPEED):
            options += ["--export", folder / "model.pt"]
            options += ["--num-workers", "2"] * by_ray
        by_ray = by_ray or script in (RAY, STREAM)
        launcher = launcher or ([] if by_ray else TORCHRUN)
        command = [sys.executable, *launcher, script.name, "--smoke-test", *options]
        env = scripts.environment() | {"PYTHONUNBUFFERED": "1"}
        if any("max-restarts" in option for option in launcher):
            env |= FRESH_STORE
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*map(str, command), "--checkpoint-dir", str(folder)],
            cwd=script.parent,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    def printed(self, pattern: str) -> str | None:
        """Return the first line that holds the pattern, if there is one by now."""
        return next(
            (line for line in list(self.lines) if re.search(pattern, line)), None
        )

    def wait_for(self, pattern: str) -> None:
        wait_until(
            lambda: self.printed(pattern), self.process, lambda: "".join(self.lines)
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        code = self.process.wait(timeout=TIMEOUT_S)
        self.reader.join(timeout=TIMEOUT_S)
        return code


def final(script: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run."""
    if script in (FSDP2, DEEPSPEED):
        return torch.load(folder / "model.pt", weights_only=True)
    states = [path.parent for path in folder.rglob("run.json")]
    newest = max(states, key=lambda path: state_of(path)["epoch"])
    return torch.load(newest / "checkpoint.pt", weights_only=True)["model"]


def state_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "run.json").read_text())


def assert_equal(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Return the folder of a run of train_ddp.py that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(DDP, folder)
    assert job.end() == 0, "".join(job.lines)
    return folder


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_middle_goes_on_and_ends_the_same(
    undisturbed, tmp_path
):
    """By torchrun; the functions of three scripts: tests/test_training_scripts.py, and all
    scripts: the weekly test below."""
    first = Job(DDP, tmp_path)
    first.wait_for("epoch 1/2")
    first.stop()
    assert first.end() != 0
    line = first.printed("stopped (in|after)")
    assert line and "saved, and the same command goes on" in line, "".join(first.lines)
    again = Job(DDP, tmp_path)
    assert again.end() == 0, "".join(again.lines)
    assert again.printed("goes on after"), "".join(again.lines)
    assert_equal(final(DDP, tmp_path), final(DDP, undisturbed))


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("script", "by_ray"),
    [(DDP, False), (FSDP2, False), (DEEPSPEED, False)]
    + [with_ray(path, True, id=f"{path.stem} by Ray") for path in (RAY, FSDP2)],
)
def test_a_run_stopped_twice_at_random_moments_ends_the_same(script, by_ray, tmp_path):
    """Ray starts both scripts for texts by the same lines."""
    start = functools.partial(Job, script, by_ray=by_ray)
    undisturbed = start(tmp_path / "undisturbed")
    undisturbed.wait_for(BEGINS)
    began = time.monotonic()
    assert undisturbed.end() == 0, "".join(undisturbed.lines)
    at_most = (time.monotonic() - began) / 3  # two stops, and something is left
    seed = random.randrange(1000)
    print("seed", seed)
    moments, folder = random.Random(seed), tmp_path / "stopped"
    for _ in range(2):
        job = start(folder)
        job.wait_for(BEGINS)
        time.sleep(moments.uniform(0, at_most))
        job.stop()
        assert job.end() != 0 and job.printed("stopped (in|after)"), "".join(job.lines)
    job = start(folder)
    assert job.end() == 0, "".join(job.lines)
    assert job.printed("goes on after"), "".join(job.lines)
    assert_equal(final(script, folder), final(script, tmp_path / "undisturbed"))


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("script", "options"),
    [
        (DDP, ["--epochs", "30"]),
        (FSDP2, ["--steps", "220", "--save-every", "5", "--async-save"]),
        (DEEPSPEED, ["--steps", "220", "--save-every", "5"]),
        with_ray(RAY, ["--epochs", "40", "--num-workers", "2"]),
    ],
    ids=["DDP", "FSDP2, saving in the background", "DeepSpeed", "Ray"],
)
def test_a_run_killed_at_five_moments_of_its_saves_always_goes_on(
    script, options, tmp_path
):
    """Kill all its processes; the next start finds a whole checkpoint or none. The options
    ask for more than five starts get to the end of."""
    folder, moments = tmp_path / "killed", random.Random(random.randrange(1000))
    saving = 0
    for kill in range(5):
        job = Job(script, folder, options=options)
        job.wait_for(BEGINS)
        # Every second one waits for its save, and all where Ray takes long to start: on a
        # busy host a kill at any other moment may meet none.
        waits = script == RAY or kill % 2
        longest = TIMEOUT_S if waits else moments.uniform(0, 6)
        deadline, nth = time.monotonic() + longest, moments.choice([1, 2, 3, 4])
        # All five could fall into a first save, which leaves nothing to go on from. A save
        # has four names: with a fifth and sixth the last kill comes in a second one.
        nth = 6 if script == RAY and kill == 4 else nth
        before, seen = saves(folder), set()
        while time.monotonic() < deadline and job.process.poll() is None:
            seen |= saves(folder) - before  # of what was saved only two are kept
            if len(seen) >= nth:
                saving += 1
                break  # it is saving now
        assert job.process.poll() is None, "ended before its kill" + "".join(job.lines)
        time.sleep(moments.uniform(0, 0.05))
        kill_family(job.process.pid)
        job.end()
        # not of Ray's own processes, which tell so of a late answer on a busy host
        trouble = r"damaged|^Traceback|RayTrainWorker\b.*Traceback"
        assert not job.printed(trouble), "".join(job.lines)
    print(f"{saving} of 5 were saving")
    assert saving >= 2
    job = Job(script, folder, options=options)
    assert job.end() == 0, "".join(job.lines)
    # also if no kill left Ray the time to list what was saved
    assert script != RAY or job.printed("goes on after"), "".join(job.lines)
    names = [path.name for path in folder.rglob("*")]
    left = [n for n in names if re.match(r"\.?train_.*-\d|checkpoint_\d|\.saving-", n)]
    assert len(left) == 2, left  # the newest two, and nothing of a killed save


@pytest.mark.weekly
@pytest.mark.ray
def test_a_streamed_run_that_is_stopped_goes_on_after_its_last_epoch(tmp_path):
    first = Job(STREAM, tmp_path, options=[*STREAMED, "--num-epochs", "200"])
    first.wait_for("epoch 1/")
    first.stop()
    assert first.end() == runs.EXIT_STATUS
    stopped = re.search(
        r"in epoch (\d+) of 200: the same command begins that epoch anew",
        first.printed("stopped in epoch"),
    )
    assert stopped, "".join(first.lines)
    run = tmp_path
    cut_off = run / "checkpoint_2026-11-26_12-00-00.000000"
    cut_off.mkdir()
    (cut_off / "checkpoint.pt").write_bytes(b"half")
    epochs = ["--num-epochs", stopped[1]]
    again = Job(STREAM, tmp_path, options=[*STREAMED, *epochs])
    assert again.end() == 0, "".join(again.lines)
    assert again.printed(f"goes on after epoch {int(stopped[1]) - 1}")
    assert again.printed(f"epoch {stopped[1]}/")
    assert not cut_off.exists()
    assert len(list(run.glob("checkpoint_*/"))) == 2


def saves(folder: Path) -> set[str]:
    """Return all that belongs to checkpoints, whatever comes and goes meanwhile."""
    return {
        os.path.join(top, name)
        for top, folders, files in os.walk(folder)
        for name in [*folders, *files]
        if re.search(r"train_\w+-\d|checkpoint_\d", os.path.join(top, name))
    }


def kill_family(pid: int) -> None:
    family = [psutil.Process(pid)]
    family += family[0].children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.weekly  # the lock alone: tests/test_runs.py
@pytest.mark.parametrize("script", [DDP, with_ray(RAY, id="Ray")])
def test_a_second_start_in_a_folder_ends_in_a_sentence_and_changes_nothing(
    script, tmp_path
):
    """As where a scheduler tries again while the first still lives."""
    options = [*OPTIONS[script], "--epochs", "50", "--keep", "50"]
    first = Job(script, tmp_path, options=options)
    first.wait_for("epoch 1/")
    before = saves(tmp_path)
    second = Job(script, tmp_path, options=options)
    assert second.end() == 1
    assert second.printed(r"is in use by process \d+ on host .* Nothing was changed"), (
        "".join(second.lines)
    )
    assert before <= saves(tmp_path)
    first.stop()
    first.end()
    assert first.printed("stopped (in|after)"), "".join(first.lines)


@pytest.mark.weekly  # the loss alone: tests/test_runs.py
@pytest.mark.parametrize("script", [DDP, FSDP2, with_ray(RAY, id="Ray")])
def test_a_run_that_diverges_ends_in_a_sentence_and_saves_nothing(script, tmp_path):
    job = Job(script, tmp_path, options=[*OPTIONS[script], "--lr", "1e30"])
    assert job.end() == 1
    assert job.printed(
        r"The loss is (nan|inf) in step \d+: the training has diverged"
    ), "".join(job.lines)
    assert not saves(tmp_path)


@pytest.mark.weekly  # without torchrun: tests/test_scripts_bad_input.py
def test_a_checkpoint_of_another_run_survives_a_restart_by_torchrun(
    undisturbed, tmp_path
):
    """The refusal is a failure, too, after which torchrun starts the ranks again."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*/*")}
    finished = Job(DDP, tmp_path)
    assert finished.end() == 0
    assert finished.printed("nothing is left to train after epoch 2 of")
    other = ["--epochs", "3", "--lr", "0.01"]
    job = Job(DDP, tmp_path, *TORCHRUN, "--max-restarts=1", options=other)
    assert job.end() != 0
    assert job.printed(r"is of a run with --lr 0.0003, and this one has --lr 0.01: use")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*/*")} == before


@pytest.mark.weekly
def test_one_node_grows_to_two_without_a_restart_to_spare(tmp_path):
    """torchrun stops the ranks there are, and starts them with those of the new node."""
    at = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    at += ["--rdzv-id=grows", "--local-addr=127.0.0.1", "--max-restarts=0"]
    at += ["--nnodes=1:2", "--nproc_per_node=1"]

    def node(hosts_store: bool) -> Job:
        conf = f"--rdzv-conf=is_host={hosts_store},last_call_timeout=1"
        launcher = ["-m", "torch.distributed.run", *at, conf]
        return Job(DDP, tmp_path, *launcher, options=["--epochs", "8"])

    first = node(True)
    first.wait_for("epoch 1/8")
    second = node(False)
    ended = first.end(), second.end()
    printed = "".join([*first.lines, *second.lines])
    assert ended == (0, 0), printed
    assert "1 workers on cpu" in printed and "2 workers on cpu" in printed
    assert re.search(r"goes on after epoch \d", printed) and "epoch 8/8" in printed
    assert state_of(runs.newest(tmp_path))["epoch"] == 8


def test_all_ranks_stop_after_the_same_step_if_one_is_asked():
    def steps() -> int:
        dist.init_process_group("gloo")
        stop = runs.Stop()
        for step in range(100):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed() == runs.STOP:
                return step
        return -1

    assert run_ranks(steps, 3) == [3, 3, 3]


def test_a_signal_that_comes_while_ranks_agree_is_not_lost():
    """It counts after the next step: ranks spend much of their time waiting there."""

    def steps() -> int:
        dist.init_process_group("gloo")
        stop, agree = runs.Stop(), dist.all_reduce
        for step in range(100):

            def and_then(*args, step=step, **options):
                agree(*args, **options)
                if step == 3 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            dist.all_reduce = and_then
            if stop.agreed() == runs.STOP:
                return step
        return -1

    assert run_ranks(steps, 3) == [4, 4, 4]


def test_under_ray_a_file_asks_and_a_notice_saves_once(tmp_path, monkeypatch):
    def answers() -> list[int]:
        dist.init_process_group("gloo")
        runs.NOTICE_EVERY_S = 0.0
        noticed = [None, None, "a node will be gone", "a node will be gone"]
        stop = runs.Stop(tmp_path / "stop", lambda: noticed.pop(0))
        found = [stop.agreed() for _ in range(4)]
        if dist.get_rank() == 0:
            (tmp_path / "stop").touch()
        noticed.append(None)
        return [*found, stop.agreed()]

    nothing, save, stop = runs.NOTHING, runs.SAVE, runs.STOP
    assert run_ranks(answers, 2) == [[nothing, nothing, save, nothing, stop]] * 2
