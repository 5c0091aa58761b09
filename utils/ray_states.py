"""A state in a checkpoint of Ray Train, as lesson 02/04 saves and loads it."""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist

FILE = "checkpoint.pt"


def report_state(state: dict[str, Any]) -> None:
    """Report rank 0's state as a checkpoint; every rank has to call this.

    Returns once Ray has listed the checkpoint, so that a restart begins from it.
    """
    checkpoint = None
    if dist.get_rank() == 0:
        target = tempfile.mkdtemp()
        torch.save(state, Path(target, FILE))
        checkpoint = ray.train.Checkpoint.from_directory(target)
    ray.train.report({}, checkpoint, delete_local_checkpoint_after_upload=True)
    ray.train.get_all_reported_checkpoints()


def latest_state() -> dict[str, Any] | None:
    """Return the state that was reported last, on every rank; None in a fresh run."""
    if not (checkpoint := ray.train.get_checkpoint()):
        return None
    with checkpoint.as_directory() as source:
        return torch.load(Path(source, FILE), weights_only=True)
