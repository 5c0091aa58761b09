"""Take docs/pictures/tensorboard.png: TensorBoard's page with the losses of two workers.

`python -m tests.tools.board`, after `make electives`, where Chromium is installed. It
trains as 02-ddp-pytorch-ray/electives/03_experiment_tracking.ipynb does: a run for the
mean loss of the ranks, and one for what each rank has at hand.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from tests.patience import PATIENCE
from tests.tools.notebooks.pictures import PICTURES
from utils.datasets import digits
from utils.launch import run_ranks
from utils.processes import free_port

STEPS, BATCH, RANKS = 20, 64, 2


def train() -> list[tuple[float, float]]:
    """Train on this rank's share; of each step its own loss, and the mean of all ranks."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = digits("train").tensors
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    for step in range(STEPS):
        mine = torch.arange(step * BATCH, (step + 1) * BATCH)[rank::world_size]
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # sum over all ranks
        found.append((loss.item(), mean.item() / world_size))
    return found


def write_runs(logs: Path) -> None:
    """Write a run with the mean of the ranks, and one for each rank with its own loss."""
    ranks = run_ranks(train, RANKS)
    runs = {f"rank {rank} alone": [own for own, _ in r] for rank, r in enumerate(ranks)}
    runs["mean of the ranks"] = [mean for _, mean in ranks[0]]
    for name, losses in runs.items():
        with SummaryWriter(logs / name) as writer:
            for step, loss in enumerate(losses):
                writer.add_scalar("loss", loss, step)


def take_picture(logs: Path, picture: Path) -> None:
    """Start TensorBoard for these logs, and let Chromium take a picture of its page.

    Raises:
        RuntimeError: TensorBoard does not answer.
    """
    page = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs.name]
    server = subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=logs.parent,  # the page shows the name of the folder
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not runs_read(page):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("TensorBoard does not answer.")
            time.sleep(0.2)
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars"]
        options += ["--window-size=960,600", "--virtual-time-budget=20000"]
        options += [f"--screenshot={picture}"]
        subprocess.run(
            ["chromium", *options, f"{page}/#scalars&_smoothingWeight=0"],
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
    finally:
        server.terminate()
        server.wait(PATIENCE)


def runs_read(page: str) -> bool:
    """Return whether TensorBoard is up, and has read all runs."""
    try:
        return len(json.load(urlopen(f"{page}/data/runs"))) == RANKS + 1
    except OSError:  # it is not up yet
        return False


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "tensorboard")
        write_runs(logs)
        take_picture(logs, PICTURES / "tensorboard.png")


if __name__ == "__main__":
    main()
