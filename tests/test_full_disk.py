"""A full disk under the scripts: whole files or none, and a sentence at the end."""

import re
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from tests import scripts
from tests.waiting import TIMEOUT_S
from utils import runs
from utils.errors import BadInput


def test_a_checkpoint_is_written_whole_or_not_at_all(small_disk, monkeypatch):
    """torch.save raises a RuntimeError of its own after the error of the disk."""
    train_ddp = scripts.load(scripts.TRAIN_DDP)
    monkeypatch.setattr(train_ddp.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train_ddp.generators, "states", bytes)
    args = Namespace(checkpoint_dir=small_disk, run={}, keep=2)

    def save(width: int, steps: int) -> None:
        model = torch.nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters())
        train_ddp.save_checkpoint(args, model, optimizer, {"steps": steps})

    save(100, 1)
    (path,) = small_disk.iterdir()
    before = path.read_bytes()
    with pytest.raises(BadInput, match=r"No space left.*What was saved before") as said:
        save(2000, 2)  # 16 MB
    assert str(small_disk / "step-000002.pt") in str(said.value)
    assert path.read_bytes() == before
    assert list(small_disk.iterdir()) == [path]


def launch(command: list, path, *arguments) -> str:
    """Return the last line that a run prints which fails."""
    done = subprocess.run(
        [*command, path.name, *map(str, arguments)],
        cwd=path.parent,
        env=scripts.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1, done.stdout
    return [line for line in done.stdout.splitlines() if line.strip("= ")][-1]


SENTENCE = r"cannot be written \(.*No space left on device\): name a folder that"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc_per_node=2"]


@pytest.mark.weekly  # tests/test_sharding_checkpoints.py, in every change
def test_the_second_checkpoint_of_shards_does_not_fit(small_disk):
    """3 MB each: every rank writes some of it, and the first stays what it is."""
    script = scripts.ROOT / "03-fsdp-deepspeed" / "train_fsdp2.py"
    arguments = ["--smoke-test", "--steps", 2, "--save-every", 1, "--batch-size", 2]
    last = launch(TORCHRUN, script, *arguments, "--checkpoint-dir", small_disk)
    # torch does not always say that it is the disk
    says = r"cannot be written \((No space left.*|is the disk full\?)\): name a folder"
    assert re.search(rf"train_fsdp2\.py: {small_disk}/step-000002 {says}", last)
    assert len(list(small_disk.glob("step-*/.metadata"))) == 1


# In every change: the first test, and torchrun's summary in tests/test_command_line.py.
@pytest.mark.weekly
def test_under_torchrun_the_last_line_is_the_sentence(small_disk):
    arguments = ["--epochs", 1, "--batch-size", 700, "--checkpoint-dir", small_disk]
    last = launch(TORCHRUN, scripts.TRAIN_DDP, *arguments)
    assert re.search(rf"train_ddp\.py: {small_disk}/step-\d+\.pt {SENTENCE}", last)
    assert [path.name for path in small_disk.iterdir()] == [runs.OWNER]


@pytest.mark.weekly  # torchrun's, above, in every change
@pytest.mark.ray
def test_under_ray_the_last_line_is_the_sentence(small_disk):
    """torch.save fails in the run's folder; torch does not say that the disk is full."""
    arguments = ["--num-workers", 1, "--epochs", 1, "--batch-size", 1400]
    arguments += ["--checkpoint-dir", small_disk]
    last = launch([sys.executable], scripts.TRAIN_RAY_DDP, *arguments)
    sentence = SENTENCE.replace(r".*No space left on device", r"is the disk full\?")
    assert re.fullmatch(rf"train_ray_ddp\.py: The checkpoint {sentence}.*", last), last
