"""utils.command_line: what is wrong with a command line is one sentence, printed last."""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import TIMEOUT_S
from utils import command_line, runs
from utils.errors import BadInput


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--epochs 0", "--epochs: it is 0, but has to be a whole number, and at least"),
        ("--epochs 1.5", "--epochs: it is 1.5, but has to be a whole number"),
        ("--lr 0", "--lr: it is 0, but has to be a number above 0."),
        ("--lr nan", "--lr: it is nan, but has to be a number above 0."),
        ("--lr fast", "--lr: it is fast, but has to be a number above 0."),
        ("--fresh", "--fresh needs --checkpoint-dir: name the folder to start in."),
        ("--checkpoint-dir s3://a", "s3://a is an address: name a path"),
        ("--epoch-count 3", "unrecognized arguments: --epoch-count"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(arguments, sentence):
    parser = command_line.Parser("A script.")
    parser.add_argument("--epochs", type=command_line.count, default=3)
    with pytest.raises(BadInput, match=sentence):
        parser.parse_args(arguments.split())


def test_smoke_test_sets_the_mode(monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    assert command_line.Parser("A script.").parse_args(["--smoke-test"]).smoke_test
    assert os.environ["WORKSHOP_MODE"] == "smoke"


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_fresh_refuses_what_another_run_saved_and_not_what_this_one_did(
    restarts, tmp_path, monkeypatch
):
    """After a restart by torchrun its own checkpoints are there. (A node that joins is no
    restart that torchrun counts.) Another script is refused in any case."""
    monkeypatch.setattr(sys, "argv", ["train_ddp.py"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    args = argparse.Namespace(checkpoint_dir=tmp_path, fresh=True)
    command_line.prepare_folder(args)
    runs.claim(tmp_path, "train_ddp.py", None)
    (tmp_path / "step-000022.pt").touch()
    refused = pytest.raises(BadInput, match="is not empty, and --fresh")
    with contextlib.nullcontext() if restarts == "1" else refused:
        command_line.prepare_folder(args)
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py"])
    args.fresh = False
    with pytest.raises(BadInput, match=r"holds checkpoints of train_ddp\.py"):
        command_line.prepare_folder(args)
    monkeypatch.setenv("RANK", "1")
    command_line.prepare_folder(args)  # rank 0 alone speaks


@pytest.mark.parametrize(
    ("folder", "path", "sentence"),
    [
        (None, None, "nothing was saved, as --checkpoint-dir names no folder"),
        (
            None,
            "a/b",
            "the last checkpoint is in a/b, but the same command starts anew",
        ),
        ("runs", "a/b", "saved, and the same command goes on from there"),
    ],
)
def test_a_stopped_run_of_ray_says_what_was_saved(folder, path, sentence, capsys):
    result = argparse.Namespace(return_value={"epoch": 1, "images": 64})
    result.checkpoint = path and argparse.Namespace(path=path)
    with pytest.raises(SystemExit):
        command_line.end_run(result, 3, folder)
    assert f"stopped in epoch 2: {sentence}" in capsys.readouterr().out


def test_thirty_people_who_start_together_get_thirty_runs(tmp_path, monkeypatch):
    """On one disk, within the same second."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    monkeypatch.setattr(command_line.time, "strftime", lambda _: "now")
    names = {command_line.new_run(argparse.Namespace())[0] for _ in range(30)}
    assert len(names) == len(list(tmp_path.iterdir())) == 30


SCRIPT = """import os, signal, sys
import torch
import torch.distributed as dist
from utils import command_line
from utils.errors import BadInput

def main():
    {}

command_line.run(main)
"""
# rank 1 finds no data; the others fail with it, and have nothing to say
NO_DATA = """dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise BadInput("rank 1 found no data: name another folder.")
    dist.all_reduce(torch.zeros(1))"""
MISTAKE = "['cat'].index('dog')"
ALONE = [sys.executable]
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def start(tmp_path):
    """Return a function that runs a script with a `main`, for the lines of its stderr."""

    def call(launcher: list[str], main: str) -> list[str]:
        path = Path(tmp_path, "a_script.py")
        path.write_text(SCRIPT.format(main))
        done = subprocess.run(
            [*launcher, path], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 1
        return done.stderr.splitlines()

    return call


def test_a_script_ends_with_the_sentence(start):
    said = start(ALONE, "command_line.Parser('A script.').parse_args(['--fresh'])")
    assert said == [
        "a_script.py: --fresh needs --checkpoint-dir: name the folder to start in."
    ]


def test_a_mistake_keeps_its_traceback(start):
    said = start(ALONE, MISTAKE)
    assert any('a_script.py", line 8, in main' in line for line in said)
    assert said[-1].startswith("ValueError: 'dog' is not in list")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "end"),
    [
        (NO_DATA, ["traceback : a_script.py: rank 1 found no data: name another"]),
        (
            MISTAKE,
            ['a_script.py", line 8, in main', "ValueError: 'dog' is not in list"],
        ),
    ],
    ids=["bad input", "a mistake"],
)
def test_the_summary_of_torchrun_ends_with_the_cause(start, main, end):
    """Whichever rank has it, and whatever the others fail with because of it."""
    summary = "\n".join(start(TORCHRUN, main)).partition("Root Cause")[2]
    assert all(words in summary for words in end)
    assert end[-1] in [line for line in summary.splitlines() if line.strip(" =")][-1]


def test_a_log_file_has_a_line_before_a_run_is_killed(tmp_path):
    """Python keeps what it prints to a file until there are 8 KiB of it, or an end."""
    program, log = tmp_path / "a_script.py", tmp_path / "log.txt"
    program.write_text(
        SCRIPT.format("print('this run waits'); os.kill(os.getpid(), signal.SIGKILL)")
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, program], env=environment, stdout=file, timeout=TIMEOUT_S
        )
    assert log.read_text() == "this run waits\n"
