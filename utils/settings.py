"""Choose by run mode: the device, the number of workers, where results go."""

import argparse
import os
from pathlib import Path
from typing import TypeVar

from utils.checkpoint_files import check_writable
from utils.errors import BadInput

MODES = ("auto", "smoke", "full")
T = TypeVar("T")


def mode(smoke_test: bool = False) -> str:
    """Return the run mode: "smoke" (CPU and gloo, small) or "full" (GPUs).

    Read from the environment variable WORKSHOP_MODE, unless a script's `--smoke-test` asks
    for "smoke". "auto", the default, means "full" where CUDA is visible and "smoke"
    elsewhere.

    Raises:
        BadInput: WORKSHOP_MODE is not one of auto, smoke and full.
    """
    if smoke_test:
        return "smoke"
    chosen = os.environ.get("WORKSHOP_MODE", "auto").strip().lower()
    if chosen not in MODES:
        raise BadInput(
            f"WORKSHOP_MODE is {chosen!r}, but must be one of auto, smoke and full: "
            "set it to one of them, or unset it."
        )
    if chosen == "auto":
        return "full" if _cuda_is_available() else "smoke"
    return chosen


def pick(*, smoke: T, full: T, joins: bool = False) -> T:
    """Choose a value by where it trains: `smoke` for a laptop and CI, `full` for GPUs.

    `full` needs a GPU here; but where a lesson `joins` a cluster, the mode is asked alone,
    as GPUs may be on other machines than the head, which has the notebook.
    """
    return full if mode() == "full" and (joins or _cuda_is_available()) else smoke


def device(smoke_test: bool = False):
    """Return this process's torch.device: its own GPU in full mode, else the CPU.

    The GPU is the one numbered LOCAL_RANK, which torchrun and Ray Train set for every
    worker (0 where it is not set).
    """
    import torch  # here, not above: importing it takes 2 s that the mode alone need not

    if mode(smoke_test) == "full" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def set_device(smoke_test: bool = False):
    """Select this process's GPU, if it has one. Returns its torch.device."""
    found = device(smoke_test)
    if found.type == "cuda":
        import torch

        torch.cuda.set_device(found)
    return found


def send(tensor, device):
    """Return a tensor on `device`; to a GPU from pinned memory, while that computes on."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def backend(of=None) -> str:
    """Return the torch.distributed backend of a device, by default of `device()`."""
    return "nccl" if (of or device()).type == "cuda" else "gloo"


def num_workers(smoke_test: bool = False) -> int:
    """Return how many workers to train with here: one per GPU in full mode, else 2."""
    if mode(smoke_test) == "full" and _cuda_is_available():
        import torch

        return torch.cuda.device_count()
    return 2


def storage_path() -> Path:
    """Return the absolute path of the folder for results, which is created if needed.

    It is WORKSHOP_STORAGE if set; else Anyscale's shared `/mnt/cluster_storage` where it
    exists; else `build/storage` in this repository. With several nodes it must be a
    folder that all of them share.

    Raises:
        BadInput: WORKSHOP_STORAGE is an address, as of a bucket, or the folder cannot be
            created or written to.
    """
    shared = Path("/mnt/cluster_storage")
    if chosen := os.environ.get("WORKSHOP_STORAGE"):
        try:
            path = local_path(chosen)
        except argparse.ArgumentTypeError as error:
            raise BadInput(f"WORKSHOP_STORAGE: {error}") from error
    elif shared.is_dir():
        path = shared / "distributed-pytorch"
    else:
        path = Path(__file__).absolute().parent.parent / "build" / "storage"
    check_writable(path, "set WORKSHOP_STORAGE to another")
    return path


def local_path(text: str) -> Path:
    """Return an absolute path, for workers in other folders; a `type` for argparse.

    Raises:
        argparse.ArgumentTypeError: it is an address, as of a bucket; argparse shows it.
    """
    if "://" in text:  # pathlib would take it for a folder named "s3:", here
        raise argparse.ArgumentTypeError(
            f"{text} is an address: name a path, on several nodes one that all of them "
            "mount."
        )
    return Path(text).expanduser().absolute()


def path_or_address(text: str) -> Path | str:
    """Return an absolute path, or an address as it is; a `type` for argparse."""
    return text if "://" in text else local_path(text)


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
