"""Files that are written whole or not at all, and sentences where that fails."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.patience import PATIENCE
from utils import checkpoint_files
from utils.errors import BadInput


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new folder" / "result"
    with checkpoint_files.write_whole(path) as file:
        file.write(b"first")
        assert not path.exists()
    with suppress(KeyboardInterrupt), checkpoint_files.write_whole(path) as file:
        file.write(b"second, cut")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_has_its_name_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(file: int) -> None:
        calls.append(("fsync", os.fstat(file).st_size))
        fsync(file)

    def noted_replace(*paths) -> None:
        calls.append(("replace", paths[1].name))
        replace(*paths)

    monkeypatch.setattr(checkpoint_files.os, "fsync", noted_fsync)
    monkeypatch.setattr(checkpoint_files.os, "replace", noted_replace)
    with checkpoint_files.write_whole(tmp_path / "result") as file:
        file.write(b"all of it")
    assert calls == [("fsync", len(b"all of it")), ("replace", "result")]


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "result"
    path.write_bytes(b"first")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files.os, "fsync", full)
    with pytest.raises(
        BadInput, match=r"cannot be written \(No space left on device\)"
    ):
        with checkpoint_files.write_whole(path) as file:
            file.write(b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from utils import checkpoint_files
with checkpoint_files.write_whole(Path(sys.argv[1])) as file:
    file.write(bytes(1000))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_saves_leave_one_file_which_the_next_save_replaces(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"first")
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED, path], timeout=PATIENCE)
        assert killed.returncode == -signal.SIGKILL
    left, there = sorted(tmp_path.iterdir())
    assert there == path and left.name.startswith(".checkpoint.pt.")
    assert left.stat().st_size == 1000
    assert path.read_bytes() == b"first"
    with checkpoint_files.write_whole(path) as file:
        file.write(b"second")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"second"


def test_a_save_that_hangs_does_not_write_into_the_next_one(tmp_path):
    """An old rank 0 that nobody reaches fails, while the new one has saved."""
    path = tmp_path / "checkpoint.pt"
    with suppress(FileNotFoundError), checkpoint_files.write_whole(path) as old:
        old.write(b"old")
        old.flush()
        with checkpoint_files.write_whole(path) as new:
            new.write(b"new")
        old.write(b" and longer")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_hangs_does_not_name_what_the_next_one_has_half_written(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"first")
    old = checkpoint_files.write_whole(path)
    old.__enter__().write(b"old")
    with checkpoint_files.write_whole(path) as new:
        new.write(b"new, ")
        new.flush()
        with pytest.raises(FileNotFoundError):
            old.__exit__(None, None, None)  # it goes on, and finishes
        assert path.read_bytes() == b"first"
        new.write(b"whole")
    assert path.read_bytes() == b"new, whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES]
)
def test_what_refuses_to_write_is_a_sentence(code):
    """Also where a library raises an error of its own, or says only a text."""
    refusal = OSError(code, os.strerror(code))
    says = rf"The file cannot be written \({os.strerror(code)}\): name a folder"
    wrapped = RuntimeError("a library's own")
    wrapped.__context__ = refusal
    for error in (refusal, RuntimeError(str(refusal)), wrapped):
        with pytest.raises(BadInput, match=says):
            with checkpoint_files.explain_writing("The file"):
                raise error


@pytest.mark.parametrize(
    "code", [errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT]
)
def test_a_network_that_fails_is_no_disk_that_refuses(code):
    error = OSError(code, os.strerror(code))
    for raised in (error, RuntimeError(f"[Errno {code}] {os.strerror(code)}")):
        with pytest.raises(type(raised)) as found:
            with checkpoint_files.explain_writing("The file"):
                raise raised
        assert found.value is raised


class OutOfMemoryError(RuntimeError):
    """Stands for torch's, which needs a GPU."""


class OfAllRanks(BaseException):
    """Has what torch's CheckpointException has."""

    def __init__(self, failures):
        self.failures = failures


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_lack_of_memory_is_not_called_a_damaged_checkpoint(error, tmp_path):
    """Who reads that it is damaged deletes it; and Ray would not start the run again."""
    with pytest.raises(type(error)), checkpoint_files.explain_reading(tmp_path):
        raise error
    for kind, raised in {
        RuntimeError: error,
        OfAllRanks: OfAllRanks({0: (KeyError("x"), None), 1: (error, None)}),
    }.items():
        with (
            pytest.raises(type(raised)),
            checkpoint_files.explain_loading(tmp_path, kind),
        ):
            raise raised
    with (
        pytest.raises(BadInput, match="damaged"),
        checkpoint_files.explain_loading(tmp_path, OfAllRanks),
    ):
        raise OfAllRanks({0: (KeyError("x"), None)})


def test_a_sentence_stays_as_it_is():
    inner = BadInput("the inner one")
    inner.__cause__ = OSError(errno.ENOSPC, "full")
    with pytest.raises(BadInput) as found, checkpoint_files.explain_writing("The file"):
        raise inner
    assert found.value is inner
