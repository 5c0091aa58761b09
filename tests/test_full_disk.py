"""A full disk under the scripts: whole files or none, and a sentence at the end."""

import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests import scripts
from tests.waiting import TIMEOUT_S
from utils.errors import BadInput
from utils.runs import Run


def test_a_checkpoint_is_written_whole_or_not_at_all(small_disk):
    """torch.save raises a RuntimeError of its own after the error of the disk."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    script = scripts.load(scripts.TRAIN_DDP)

    def save(width: int, epochs: int) -> None:
        # another model would not load
        how = script.save_checkpoint, lambda *_: None
        run, model = Run(small_disk, "train_ddp", *how), torch.nn.Linear(width, width)
        run.resume(model, torch.optim.AdamW(model.parameters()))
        for _ in run.epochs(epochs):
            run.steps += 1
            run.done(1.0)

    save(100, 1)
    path = small_disk / "train_ddp-000001" / "checkpoint.pt"
    before = path.read_bytes()
    with pytest.raises(
        BadInput, match=r"cannot be written.*What was saved before"
    ) as said:
        save(2000, 2)  # 16 MB
    assert str(small_disk / "train_ddp-000002") in str(said.value)
    save(100, 1)  # the next start removes what did not fit
    assert path.read_bytes() == before
    assert {each.name for each in small_disk.iterdir()} == {".lock", path.parent.name}
    dist.destroy_process_group()


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


# torch does not always say that it is the disk: that depends on where in its file it ends
WHY = r"(.*No space left on device|is the disk full\?)"
SENTENCE = rf"cannot be written \({WHY}\): name a folder that"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc_per_node=2"]


@pytest.mark.weekly  # tests/test_sharding_checkpoints.py, in every change
def test_the_second_checkpoint_of_shards_does_not_fit(small_disk):
    """3 MB each: every rank writes some of it, and the first stays what it is."""
    script = scripts.ROOT / "03-fsdp-deepspeed" / "train_fsdp2.py"
    arguments = ["--smoke-test", "--steps", 2, "--save-every", 1, "--batch-size", 2]
    last = launch(TORCHRUN, script, *arguments, "--checkpoint-dir", small_disk)
    name = f"{small_disk}/train_fsdp2-000002"
    assert re.search(rf"train_fsdp2\.py: {name} {SENTENCE}", last)
    assert len(list(small_disk.glob("train_fsdp2-*/.metadata"))) == 1


# In every change: the first test, and torchrun's summary in tests/test_command_line.py.
@pytest.mark.weekly
def test_under_torchrun_the_last_line_is_the_sentence(small_disk):
    arguments = ["--epochs", 1, "--batch-size", 700, "--checkpoint-dir", small_disk]
    last = launch(TORCHRUN, scripts.TRAIN_DDP, *arguments)
    assert re.search(rf"train_ddp\.py: {small_disk}/train_ddp-\d+ {SENTENCE}", last)
    assert not list(small_disk.glob("train_ddp-*"))


@pytest.mark.weekly  # torchrun's, above, in every change
@pytest.mark.ray
def test_under_ray_the_last_line_is_the_sentence(small_disk):
    arguments = ["--num-workers", 1, "--epochs", 1, "--batch-size", 1400]
    arguments += ["--checkpoint-dir", small_disk]
    last = launch([sys.executable], scripts.TRAIN_RAY_DDP, *arguments)
    assert re.fullmatch(rf"train_ray_ddp\.py: The checkpoint {SENTENCE}.*", last), last
