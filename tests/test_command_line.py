"""utils.command_line: what is wrong with a command line is one sentence, said last."""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from utils import command_line, datasets, runs
from utils.errors import BadInput

SCRIPT = """
from utils import command_line
from utils.errors import BadInput

import torch
import torch.distributed as dist
from utils.errors import BadInput


def main():
    parser = command_line.Parser("A script.")
    parser.add_argument("--epochs", type=command_line.count, default=3)
    parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise BadInput("rank 1 found no data: name another folder.")
    dist.all_reduce(torch.zeros(1))  # fails with rank 1, and has nothing to say


if __name__ == "__main__":
    command_line.run(main)
"""


@pytest.mark.parametrize("restarts", [None, "0", "1"])
def test_what_a_restart_by_torchrun_finds_is_of_the_start_before(
    restarts, tmp_path, monkeypatch
):
    """With --fresh, too. (A node that joins is no restart that torchrun counts.)"""
    monkeypatch.setattr(sys, "argv", ["train_ddp.py"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if restarts:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    args = argparse.Namespace(checkpoint_dir=tmp_path, fresh=True)
    command_line.prepare_folder(args)
    runs.claim(tmp_path, "train_ddp.py", None)
    (tmp_path / "step-000022.pt").touch()
    again = pytest.raises(BadInput, match="is not empty, and --fresh")
    with contextlib.nullcontext() if restarts == "1" else again:
        command_line.prepare_folder(args)
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py"])
    args.fresh = False
    with pytest.raises(BadInput, match=r"holds checkpoints of train_ddp\.py"):
        command_line.prepare_folder(args)
    monkeypatch.setenv("RANK", "1")
    command_line.prepare_folder(args)  # rank 0 speaks


def test_a_stopped_run_of_ray_says_where_its_checkpoint_is(tmp_path, capsys):
    at = {"epoch": 1, "images": 64}
    result = argparse.Namespace(return_value=at, checkpoint=None)
    for folder, path, said in [
        (None, None, "nothing was saved, as --checkpoint-dir names no folder"),
        (
            None,
            "a/b",
            "the last checkpoint is in a/b, but the same command starts anew",
        ),
        (tmp_path, "a/b", "saved, and the same command goes on from there"),
    ]:
        result.checkpoint = path and argparse.Namespace(path=path)
        with pytest.raises(SystemExit):
            command_line.end_run(result, 3, folder)
        assert f"stopped in epoch 2: {said}" in capsys.readouterr().out


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "a_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--epochs 0", "--epochs: it is 0, but has to be a whole number, and at least"),
        ("--epochs 1.5", "--epochs: it is 1.5, but has to be a whole number"),
        ("--batch-size -4", "--batch-size: it is -4, but has to be a whole number"),
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
    assert command_line.os.environ["WORKSHOP_MODE"] == "smoke"


def test_started_alone_a_script_ends_with_the_sentence(script):
    command = [sys.executable, script, "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr == (
        "a_script.py: --fresh needs --checkpoint-dir: name the folder to start in.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "rank 1 found no data: name another folder."),
        pytest.param(
            ["--epochs", "0"],
            "argument --epochs: it is 0, but has to be a whole number",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_under_torchrun_the_summary_ends_with_the_sentence(script, arguments, sentence):
    """Whichever rank has it, and whatever the others fail with because of it."""
    command = ["torchrun", "--standalone", "--nproc_per_node=2", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    cause = done.stderr[done.stderr.index("Root Cause") :].splitlines()
    assert cause[-2].strip().startswith(f"traceback : a_script.py: {sentence}")
    assert set(cause[-1]) == {"="}


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("['cat'].index('dog')", "ValueError: 'dog' is not in list"),
        ("open('/nowhere')", "FileNotFoundError: [Errno 2] No such file or directory"),
        (
            "socket.create_connection(('127.0.0.1', 9))",
            "ConnectionRefusedError: [Errno 111]",
        ),
    ],
)
def test_a_mistake_keeps_its_traceback(mistake, says, tmp_path):
    path = mistaken(tmp_path, mistake)
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert f'File "{path}", line 6, in main' in done.stderr
    assert done.stderr.splitlines()[-1].startswith(says)


def mistaken(folder: Path, mistake: str) -> Path:
    """Return a script whose `main`, line 6, has a mistake."""
    path = folder / "a_script.py"
    path.write_text(
        "import socket\n\nfrom utils import command_line\n\n"
        f"def main():\n    {mistake}\n\ncommand_line.run(main)\n"
    )
    return path


@pytest.mark.slow
def test_under_torchrun_the_summary_has_the_traceback_of_a_mistake(tmp_path):
    path = mistaken(tmp_path, "['cat'].index('dog')")
    command = ["torchrun", "--standalone", "--nproc_per_node=2", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert f'File "{path}", line 6, in main' in cause
    assert "ValueError: 'dog' is not in list" in cause


def test_a_log_file_has_a_line_before_a_run_is_killed(tmp_path):
    """Python keeps what it prints to a file until there are 8 KiB of it, or an end."""
    work = "import os, signal; print('this run waits'); os.kill(os.getpid(), 9)"
    program, log = mistaken(tmp_path, work), tmp_path / "log.txt"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, program], env=environment, stdout=file, timeout=PATIENCE
        )
    assert log.read_text() == "this run waits\n"


def test_batches_larger_than_a_shard_are_refused():
    datasets.check_batch_size(50, 100, 2)
    with pytest.raises(BadInput, match="each of 2 workers gets 50 of the 101 rows"):
        datasets.check_batch_size(51, 101, 2)


def test_thirty_people_who_start_together_get_thirty_runs(tmp_path, monkeypatch):
    """On one disk, within the same second."""
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    monkeypatch.setattr(command_line.time, "strftime", lambda _: "now")
    names = {command_line.new_run(argparse.Namespace())[0] for _ in range(30)}
    assert len(names) == len(list(tmp_path.iterdir())) == 30
