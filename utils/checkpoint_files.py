"""Write and read checkpoints: whole or not at all, and with a sentence where that fails."""

import contextlib
import errno
import os
import pickle
import re
import secrets
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
    # a name of its own: a save that hangs must not give its name to what this one writes
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with explain_writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.iterdir():  # by saves that were killed, or hang
                if left.name.startswith(f".{path.name}.") and left.suffix == ".tmp":
                    left.unlink(missing_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else the name may come before the data
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()  # nothing is there if it has its name


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


@contextlib.contextmanager
def explain_reading(path: str | Path) -> Iterator[None]:
    """Turn a checkpoint that does not fit into a sentence, around a block that loads it.

    The errors are those that torch.load and load_state_dict raise for files that are cut,
    empty, of another kind or of another model (tried in the tests). Others are mistakes of
    the program, or a GPU without room, and pass.

    Raises:
        BadInput: the checkpoint is damaged or of another model, is not there, or cannot
            be read.
    """
    hint = "name another folder, or delete it."
    try:
        yield
    except FileNotFoundError as error:
        raise BadInput(
            f"This worker does not see {path}: name a folder that all nodes share."
        ) from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): {hint}") from error
    except (EOFError, pickle.UnpicklingError) as error:
        raise BadInput(
            f"{path} is damaged, or was not written by torch.save: {hint}"
        ) from error
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        if _is_of_the_machine(error):
            raise
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()
        raise BadInput(
            f"The checkpoint {path} is damaged or of another model ({reason}): {hint}"
        ) from error


@contextlib.contextmanager
def explain_loading(folder: Path, *errors: type[BaseException]) -> Iterator[None]:
    """Turn a sharded checkpoint that does not load into a sentence, around the block.

    Args:
        folder: the checkpoint.
        errors: what the library raises for files that are damaged, missing or of another
            model. Others are mistakes of the program, and pass, as does a GPU without room.

    Raises:
        BadInput: it cannot be loaded; says what may be the reason.
    """
    try:
        yield
    except errors as error:
        if _is_of_the_machine(error):
            raise
        raise BadInput(
            f"The checkpoint {folder} is damaged, of another model, or not seen by all "
            "nodes: name another folder, or delete it."
        ) from error


def check_global_batch(saved: int, now: int) -> None:
    """Check that a run goes on with the global batch that its checkpoint was made with.

    Raises:
        BadInput: it is different.
    """
    if saved != now:
        raise BadInput(
            f"The checkpoint was trained with a global batch of {saved}, and now it is "
            f"{now}: set --batch-size so that all workers and gradient accumulation steps "
            f"together make {saved}."
        )


def _is_of_the_machine(error: BaseException) -> bool:
    """Return whether memory was short, or a GPU failed: then no file is bad.

    By name, as this module needs no torch. Its distributed checkpoints raise one error
    with those of all ranks in it, as `failures`.
    """
    of_ranks = getattr(error, "failures", None) or {}
    errors = [error, *(failed for failed, _ in of_ranks.values())]
    kinds = {"OutOfMemoryError", "AcceleratorError"}
    return any(
        type(e).__name__ in kinds or "DefaultCPUAllocator" in str(e) for e in errors
    )


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
