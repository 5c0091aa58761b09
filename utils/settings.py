"""Run mode, and what follows from it: device, number of workers, where results go."""

import argparse
import contextlib
import errno
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

MODES = ("auto", "smoke", "full")
T = TypeVar("T")


def mode() -> str:
    """The run mode: "smoke" (CPU and gloo, small) or "full" (GPUs).

    Read from the environment variable WORKSHOP_MODE. "auto", the default, means "full"
    where CUDA is visible and "smoke" elsewhere.

    Raises:
        ValueError: WORKSHOP_MODE is not one of auto, smoke and full.
    """
    chosen = os.environ.get("WORKSHOP_MODE", "auto").strip().lower()
    if chosen not in MODES:
        raise ValueError(
            f"WORKSHOP_MODE is {chosen!r}, but must be one of auto, smoke and full: "
            "set it to one of them, or unset it."
        )
    if chosen == "auto":
        return "full" if _cuda_is_available() else "smoke"
    return chosen


def pick(*, smoke: T, full: T) -> T:
    """Choose a value by run mode: `smoke` for a laptop and CI, `full` for GPUs."""
    return smoke if mode() == "smoke" else full


def device():
    """The torch.device of this process: its own GPU in full mode, else the CPU.

    The GPU is the one numbered LOCAL_RANK, which torchrun and Ray Train set for every
    worker (0 where it is not set).
    """
    import torch  # here, not above: importing it takes 2 s that the mode alone need not

    if mode() == "full" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def set_device():
    """Make the GPU of this process, if it has one, torch's current one; its device."""
    found = device()
    if found.type == "cuda":
        import torch

        torch.cuda.set_device(found)
    return found


def backend() -> str:
    """The torch.distributed backend of `device()`: "nccl" for GPUs, "gloo" for CPUs."""
    return "nccl" if device().type == "cuda" else "gloo"


def num_workers() -> int:
    """Workers to train with on this machine: its GPUs in full mode, else 2 processes."""
    if mode() == "full" and _cuda_is_available():
        import torch

        return torch.cuda.device_count()
    return 2


def storage_path() -> Path:
    """Absolute path of the folder for checkpoints and results, created if needed.

    WORKSHOP_STORAGE if set; else Anyscale's shared `/mnt/cluster_storage` where it
    exists; else `build/storage` in this repository. With several nodes it must be a
    folder that all of them share.

    Raises:
        ValueError: WORKSHOP_STORAGE is an address, as of a bucket.
        OSError: the folder cannot be created or written to.
    """
    shared = Path("/mnt/cluster_storage")
    if chosen := os.environ.get("WORKSHOP_STORAGE"):
        try:
            path = local_path(chosen)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"WORKSHOP_STORAGE: {error}") from None
    elif shared.is_dir():
        path = shared / "distributed-pytorch"
    else:
        path = Path(__file__).absolute().parent.parent / "build" / "storage"
    check_writable(path, "set WORKSHOP_STORAGE to another")
    return path


def local_path(text: str) -> Path:
    """An absolute path; as `type` of an argparse argument, for workers that run elsewhere.

    Raises:
        argparse.ArgumentTypeError: it is an address, as of a bucket; argparse shows it.
    """
    if "://" in text:  # pathlib would take it for a folder named "s3:", here
        raise argparse.ArgumentTypeError(
            f"{text} is an address: name a path, on several nodes one that all of them "
            "mount."
        )
    return Path(text).expanduser().absolute()


def check_writable(folder: Path, mend: str = "name another") -> None:
    """Create `folder` if needed, and find out now, not after an epoch, if it is of use.

    Raises:
        OSError: it cannot be created or written to; says so, and to `mend` it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"The folder {folder} cannot be written to ({error.strerror}): {mend}."
        ) from None


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """`with write_whole(path) as file:` write a file whole, or not at all.

    What is written goes to a file beside `path`, which takes that name once it is on the
    disk: a program that is killed, or a machine that loses power, leaves the old file or
    the new one. Missing folders are made.

    Raises:
        OSError: the disk is full or cannot be written to; says so, and what to do.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else the name may come before the data
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()  # nothing is there if it has its name


@contextlib.contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """For a block in which a library writes `path`: a full disk becomes a sentence.

    torch.save raises a RuntimeError of its own there, and torch's distributed checkpoints
    what failed on each rank, as text.

    Raises:
        OSError: as `cannot_write`.
    """
    try:
        yield
    except BaseException as error:
        if _reason(error):
            raise cannot_write(path, error) from error
        raise


def cannot_write(path: Path, error: BaseException) -> OSError:
    """What to raise where `path`, a checkpoint or a result, cannot be written."""
    return OSError(
        f"{path} cannot be written ({_reason(error) or error}): name a folder that is "
        "writable and has room. What was saved before is untouched."
    )


@contextlib.contextmanager
def explain_reading(path: str | Path) -> Iterator[None]:
    """For a block that loads a checkpoint: one that does not fit becomes a sentence.

    The errors are those that torch.load and load_state_dict raise for files that are cut,
    empty, of another kind or of another model (tried in the tests). Others are mistakes of
    the program, and pass.

    Raises:
        ValueError: the checkpoint is damaged, or of another model.
        OSError: it is not there, or cannot be read.
    """
    mend = "name another folder, or start without --resume."
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(
            f"There is no {path} to resume from: leave out --resume, or, on several "
            "nodes, name a folder that all of them share."
        ) from error
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): {mend}") from error
    except (EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is damaged, or was not written by torch.save: {mend}"
        ) from error
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()
        raise ValueError(
            f"The checkpoint {path} is damaged or of another model ({reason}): {mend}"
        ) from error


@contextlib.contextmanager
def explain_loading(folder: Path, *errors: type[BaseException]) -> Iterator[None]:
    """For a block in which a library loads a sharded checkpoint, of which ranks see parts.

    Args:
        folder: the checkpoint.
        errors: what the library raises for files that are damaged, missing or of another
            model. Others are mistakes of the program, and pass.

    Raises:
        ValueError: it cannot be loaded; says what may be the reason.
    """
    try:
        yield
    except errors as error:
        raise ValueError(
            f"The checkpoint {folder} is damaged, of another model, or not seen by all "
            "nodes: name another folder, or start without --resume."
        ) from error


def check_global_batch(saved: int, now: int) -> None:
    """Check that a run goes on with the global batch that its checkpoint was made with.

    Raises:
        ValueError: it is different.
    """
    if saved != now:
        raise ValueError(
            f"The checkpoint was trained with a global batch of {saved}, and now it is "
            f"{now}: set --batch-size so that all workers and passes together make {saved}."
        )


def _reason(error: BaseException | None) -> str | None:
    """Why nothing more could be written, if that is behind an error."""
    errors = []
    while error is not None:
        errors.append(error)
        error = error.__cause__ or error.__context__
    for error in errors:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
    refusals = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    known = "|".join(map(os.strerror, refusals))
    for text in map(str, errors):
        if said := re.search(rf"\[Errno \d+\] ([^:\n]+)|({known})", text):
            return said[1] or said[2]
        if "inline_container.cc" in text:  # there torch.save comes up short
            return "is the disk full?"
    return None


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
