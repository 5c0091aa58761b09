"""Write and read checkpoints: whole or not at all, and with a sentence where that fails."""

import contextlib
import errno
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from utils.errors import BadInput

# A disk that is full, over its quota, for reading only or not ours; a file that is too
# large, a folder that is none, a disk that is broken or gone. Not a network that fails.
_REFUSALS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.ESTALE,
)


def check_writable(folder: Path, hint: str = "name another") -> None:
    """Create `folder` if needed, and check now, not after an epoch, that it can be written.

    Raises:
        BadInput: it cannot be created or written to; says so, and the `hint` what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(
            f"The folder {folder} cannot be written to ({error.strerror}): {hint}."
        ) from error


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all: `with write_whole(path) as file:`.

    What is written goes to a file beside `path`, which takes that name once it is on the
    disk: a program that is killed, or a machine that loses power, leaves the old file or
    the new one. Missing folders are made.

    Raises:
        BadInput: the disk is full or cannot be written to; says so, and what to do.
    """
    part = path.with_name(f".{path.name}.part")
    with explain_writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else the name may come before the data
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()  # nothing is there if it has its name


@contextlib.contextmanager
def explain_writing(path: Path | str) -> Iterator[None]:
    """Turn a full disk into a sentence, around a block in which a library writes `path`.

    torch.save raises a RuntimeError of its own there, and torch's distributed checkpoints
    what failed on each rank, as text.

    Raises:
        BadInput: `path`, a checkpoint or a result, was not written; says why.
    """
    try:
        yield
    except BadInput:
        raise  # has its sentence
    except BaseException as error:
        if not (reason := _reason(error)):
            raise
        raise BadInput(
            f"{path} cannot be written ({reason}): name a folder that is writable and has "
            "room. What was saved before is untouched."
        ) from error


# What torch, its distributed checkpoints and DeepSpeed raise for files that are cut, empty,
# missing, of another kind or of another model (tried in the tests).
_DAMAGE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    RuntimeError,
    AssertionError,
    ValueError,
    LookupError,
    TypeError,
)


@contextlib.contextmanager
def explain_reading(checkpoint: str | Path) -> Iterator[None]:
    """Turn a checkpoint that does not fit into a sentence, around a block that loads it.

    A GPU without room, or a rank that is gone, is no damage, and passes.

    Raises:
        BadInput: the checkpoint is damaged, of another model, or not seen by this rank.
    """
    try:
        yield
    except BadInput:
        raise  # has its sentence
    except BaseException as error:
        # by name, as this module needs no torch
        damaged = type(error).__name__ == "CheckpointException"
        damaged = damaged or isinstance(error, _DAMAGE)
        if not damaged or _is_of_the_machine(error):
            raise
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise BadInput(
            f"The checkpoint {checkpoint} is damaged, of another model, or not seen by all "
            f"nodes ({why.strip().splitlines()[-1].strip()}): name another folder, or "
            "delete it to go on from the one before."
        ) from error


def _is_of_the_machine(error: BaseException) -> bool:
    """Return whether memory was short, a GPU failed or a rank died: then no file is bad.

    torch's distributed checkpoints raise one error with those of all ranks, as `failures`.
    """
    of_ranks = getattr(error, "failures", None) or {}
    errors = [error, *(failed for failed, _ in of_ranks.values())]
    kinds = {"OutOfMemoryError", "AcceleratorError"}
    kinds |= {"DistBackendError", "DistNetworkError"}  # another rank is gone
    said = re.compile("DefaultCPUAllocator|gloo/transport")
    return any(type(e).__name__ in kinds or said.search(str(e)) for e in errors)


def _reason(error: BaseException | None) -> str | None:
    """Return why nothing more could be written, if that is behind an error."""
    errors = []
    while error is not None:
        errors.append(error)
        error = error.__cause__ or error.__context__
    for error in errors:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            return os.strerror(error.errno)
    known = "|".join(map(os.strerror, _REFUSALS))
    for text in map(str, errors):
        if found := re.search(known, text):
            return found[0]
        if "inline_container.cc" in text:  # there torch.save comes up short
            return "is the disk full?"
    return None
