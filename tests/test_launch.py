"""run_ranks: results by rank, and a sentence for a rank that fails, dies or hangs."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.waiting import TIMEOUT_S
from utils.launch import run_ranks


def test_results_come_back_by_rank(tmp_path):
    factor = 10  # a closure, as of a function that was typed into a notebook

    def last_first(offset):
        rank = int(os.environ["RANK"])
        while rank < 2 and not (tmp_path / f"{rank + 1}").exists():
            time.sleep(0.01)
        (tmp_path / f"{rank}").touch()
        return offset + factor * rank, torch.full((2,), rank)

    results = run_ranks(last_first, 3, 5)
    assert [number for number, _ in results] == [5, 15, 25]
    assert [tensor.tolist() for _, tensor in results] == [[0, 0], [1, 1], [2, 2]]


class SlowToLoad:
    """On rank 1; it says when it is there."""

    def __init__(self, there: Path):
        self.there = there

    def __setstate__(self, state):
        self.__dict__ |= state
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            self.there.touch()


def test_ranks_begin_when_all_have_loaded(tmp_path):
    def begin(slow: SlowToLoad) -> bool:
        return slow.there.exists()

    assert run_ranks(begin, 2, SlowToLoad(tmp_path / "there")) == [True, True]


def test_ranks_see_what_torchrun_sets(monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    monkeypatch.setenv("SET_JUST_NOW", "yes")
    results = run_ranks(lambda: (os.getpid(), dict(os.environ)), 2)
    environments = [environment for _, environment in results]
    assert len({os.getpid(), *(pid for pid, _ in results)}) == 3
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
        assert environment["SET_JUST_NOW"] == "yes"
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]
    assert "RANK" not in os.environ


def test_no_variable_of_an_earlier_run_stays(monkeypatch):
    monkeypatch.setenv("SET_JUST_NOW", "yes")
    run_ranks(os.getpid, 1)
    monkeypatch.delenv("SET_JUST_NOW")
    assert run_ranks(lambda: os.environ.get("SET_JUST_NOW"), 1) == [None]


def test_ranks_can_make_a_process_group():
    def sum_of_ranks():
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    assert run_ranks(sum_of_ranks, 3) == [3, 3, 3]


def test_a_rank_that_has_returned_still_serves_the_others():
    """Else an early rank 0 takes the store along, and a late rank's connection is reset."""

    held = []  # as torch.distributed holds the store of a process group

    def meet() -> bytes:
        rank = int(os.environ["RANK"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(
            *address,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        held.append(store)
        if rank == 0:
            store.set("word", "kept")
            return b""
        time.sleep(1)  # long enough for rank 0 to return, and to end if it does
        return store.get("word")

    assert run_ranks(meet, 2) == [b"", b"kept"]


CALLER = """
import os, pathlib, sys, time
from utils.launch import run_ranks

def note(folder):
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600 * int(os.environ["RANK"]))

run_ranks(note, 2, sys.argv[1])
"""


def test_a_rank_that_has_returned_ends_when_its_caller_is_killed(tmp_path):
    caller = subprocess.Popen([sys.executable, "-c", CALLER, tmp_path])
    try:
        while not (tmp_path / "0").exists() or not (tmp_path / "0").read_text():
            assert caller.poll() is None, "the caller has ended"
            time.sleep(0.05)
        returned = psutil.Process(int((tmp_path / "0").read_text()))
    finally:
        caller.kill()
        caller.wait(timeout=TIMEOUT_S)
    returned.wait(timeout=TIMEOUT_S)


def test_failing_rank_is_named_and_ends_the_others(tmp_path):
    def fail():
        if os.environ["RANK"] == "1":
            raise ValueError("the batch is empty")
        time.sleep(200)
        (tmp_path / "slept").touch()

    with pytest.raises(RuntimeError) as e:
        run_ranks(fail, 3)
    assert str(e.value) == "rank 1 failed with ValueError: the batch is empty"
    assert 'raise ValueError("the batch is empty")' in str(e.value.__cause__)
    assert not (tmp_path / "slept").exists()  # nobody waited for them


def test_result_that_cannot_be_sent_is_named():
    with pytest.raises(RuntimeError, match=r"rank 0 failed with TypeError: .*pickle"):
        run_ranks(threading.Lock, 1)


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "exit code -9 (SIGKILL)"),
    ],
)
def test_dying_rank_is_named_and_ends_the_others(die, how, tmp_path):
    def function():
        if os.environ["RANK"] == "0":
            die()
        time.sleep(200)
        (tmp_path / "slept").touch()

    with pytest.raises(RuntimeError) as e:
        run_ranks(function, 2)
    assert str(e.value) == f"rank 0 died with {how}"
    assert not (tmp_path / "slept").exists()


def test_crashing_rank_prints_the_lines_that_led_to_it(tmp_path):
    def read_nowhere():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file is left
        os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
        ctypes.string_at(0)

    with pytest.raises(RuntimeError, match=r"rank 0 died with .* \(SIGSEGV\)"):
        run_ranks(read_nowhere, 1)
    assert " in read_nowhere\n" in (tmp_path / "stderr").read_text()


def gather_pairs(pairs: int) -> None:
    """Keep two of the gathers under way that `full_tensor()` starts one by one."""
    import torch  # a pickled `torch.ops` would be refused

    dist.init_process_group("gloo")
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    for _ in range(pairs):
        works = [gather(torch.ones(1), 2, dist.group.WORLD.group_name) for _ in "ab"]
        for work in works:
            torch.ops._c10d_functional.wait_tensor(work)


def gather_pairs_with_two_threads(pairs: int) -> None:
    c10d._register_builtin_gloo_backend()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        gather_pairs(pairs)
    except RuntimeError:
        time.sleep(TIMEOUT_S)  # the other rank has crashed: that is the error to name


@pytest.mark.weekly
def test_gathers_leave_a_group_of_gloo_alive():
    assert run_ranks(gather_pairs, 2, 10_000) == [None, None]


@pytest.mark.weekly
def test_a_group_with_the_threads_of_torch_crashes():
    """A negative control. Does it live? Then utils/gloo_in_one_thread.py can go."""
    with pytest.raises(RuntimeError, match=r"died with .* \((SIGABRT|SIGSEGV)\)"):
        run_ranks(gather_pairs_with_two_threads, 2, 200_000)


@pytest.mark.slow
def test_hanging_ranks_are_named_and_ended(tmp_path):
    def function():
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        if os.environ["RANK"] != "1":
            time.sleep(10_000)

    run_ranks(os.getpid, 1)  # so that what ranks are forked from has started
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] did not return in time"):
        run_ranks(function, 3, timeout=15)
    for rank in range(3):
        assert not psutil.pid_exists(int((tmp_path / str(rank)).read_text()))


def test_there_has_to_be_a_rank():
    with pytest.raises(ValueError, match="num_workers is 0, but must be at least 1"):
        run_ranks(os.getpid, 0)
