"""Files are written whole or not at all, and what prevents it is a sentence."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from torch.distributed.checkpoint import CheckpointException

from tests.waiting import TIMEOUT_S
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

    def recorded_fsync(file: int) -> None:
        calls.append(("fsync", os.fstat(file).st_size))
        fsync(file)

    def recorded_replace(*paths) -> None:
        calls.append(("replace", paths[1].name))
        replace(*paths)

    monkeypatch.setattr(checkpoint_files.os, "fsync", recorded_fsync)
    monkeypatch.setattr(checkpoint_files.os, "replace", recorded_replace)
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
        killed = subprocess.run([sys.executable, "-c", KILLED, path], timeout=TIMEOUT_S)
        assert killed.returncode == -signal.SIGKILL
    left, there = sorted(tmp_path.iterdir())
    assert there == path and left.name.startswith(".checkpoint.pt.")
    assert left.stat().st_size == 1000
    assert path.read_bytes() == b"first"
    with checkpoint_files.write_whole(path) as file:
        file.write(b"second")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"second"


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]
)
def test_a_disk_that_refuses_is_a_sentence(code):
    """Also where a library raises an error of its own, or has only a text."""
    refusal = OSError(code, os.strerror(code))
    says = rf"The file cannot be written \({os.strerror(code)}\): name a folder"
    wrapped = RuntimeError("a library's own")
    wrapped.__context__ = refusal
    for error in (refusal, RuntimeError(str(refusal)), wrapped):
        with pytest.raises(BadInput, match=says):
            with checkpoint_files.explain_writing("The file"):
                raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),  # of a network
        RuntimeError(f"[Errno {errno.EPIPE}] {os.strerror(errno.EPIPE)}"),
        RuntimeError("a mistake of ours"),
        BadInput("what was wrong before the disk was full"),
    ],
    ids=str,
)
def test_another_error_while_writing_stays_what_it_is(error):
    error.__cause__ = OSError(errno.ENOSPC, "full") if type(error) is BadInput else None
    with pytest.raises(type(error)) as found:
        with checkpoint_files.explain_writing("The file"):
            raise error
    assert found.value is error


class OutOfMemoryError(RuntimeError):
    """Stands for torch's, which needs a GPU."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        AttributeError("a mistake of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_error_while_loading_is_not_called_a_damaged_checkpoint(error):
    """Who reads that it is damaged deletes it; and Ray would not start the run again."""
    with pytest.raises(type(error)), checkpoint_files.explain_reading("checkpoint.pt"):
        raise error


def test_a_lack_of_memory_of_one_rank_is_not_called_a_damaged_checkpoint(tmp_path):
    damaged, full = KeyError("x"), OutOfMemoryError("Tried to allocate 2.00 GiB")
    loading = checkpoint_files.explain_reading
    with pytest.raises(CheckpointException), loading(tmp_path):
        raise CheckpointException("load", {0: (damaged, None), 1: (full, None)})
    with pytest.raises(BadInput, match="damaged"), loading(tmp_path):
        raise CheckpointException("load", {0: (damaged, None)})
