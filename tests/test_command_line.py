"""utils.command_line: what is wrong with a command line is one sentence, printed last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import TIMEOUT_S
from utils import command_line, settings
from utils.errors import BadInput


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--epochs 0", "--epochs: it is 0, but has to be a whole number, and at least"),
        ("--epochs 1.5", "--epochs: it is 1.5, but has to be a whole number"),
        ("--lr 0", "--lr: it is 0, but has to be a number above 0."),
        ("--lr nan", "--lr: it is nan, but has to be a number above 0."),
        ("--lr fast", "--lr: it is fast, but has to be a number above 0."),
        (f"--seed {'9' * 30}", "has to be a whole number from 0 to 999999999."),
        ("--seed=-1", "--seed: it is -1, but has to be a whole number from 0"),
        ("--checkpoint-dir s3://a", "s3://a is an address: name a path"),
        ("--epoch-count 3", "unrecognized arguments: --epoch-count"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(arguments, sentence):
    parser = command_line.Parser("A script.")
    parser.add_argument("--epochs", type=command_line.count, default=3)
    with pytest.raises(BadInput, match=sentence):
        parser.parse_args(arguments.split())


def test_smoke_test_is_handed_down_and_sets_nothing(monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    args = command_line.Parser("A script.").parse_args(["--smoke-test"])
    assert settings.device(args.smoke_test).type == "cpu"
    assert settings.num_workers(args.smoke_test) == 2
    assert (settings.mode(), settings.num_workers()) == ("full", 8)


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
    said = start(ALONE, "command_line.Parser('A script.').parse_args(['--keep', '0'])")
    assert said == [
        "a_script.py: argument --keep: it is 0, but has to be a whole number, and at "
        "least 1."
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
