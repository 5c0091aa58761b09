"""Asking ranks that hang: each answers for itself, and nothing is left of them."""

import faulthandler
import os
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from utils import stacks
from utils.checks.part01 import a_job_that_hangs


def waits_in_vain(pids):
    faulthandler.register(signal.SIGUSR1)
    (pids / str(os.getpid())).touch()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        time.sleep(1_000)


def test_ranks_that_hang_say_where_and_are_ended(tmp_path):
    answers = stacks.of_hanging(waits_in_vain, 2, tmp_path)
    assert answers == ["waits_in_vain > all_reduce", "waits_in_vain"]
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def test_ranks_that_end_do_not_hang():
    with pytest.raises(RuntimeError, match="do not stand still"):
        stacks.of_hanging(time.sleep, 2, 0.1)


def waits_a_while():
    time.sleep(1.5)


def goes_on_later():
    faulthandler.register(signal.SIGUSR1)
    waits_a_while()
    waits_in_vain_then()


def waits_in_vain_then():
    time.sleep(1_000)


@pytest.mark.slow
def test_ranks_that_wait_a_while_do_not_hang_yet():
    """As before they try again to reach a store, which did not listen yet."""
    later = "goes_on_later > waits_in_vain_then"
    assert stacks.of_hanging(goes_on_later, 2) == [later, later]


def test_the_newest_of_two_answers_counts():
    old, new = (
        f"Current thread 0x1 (most recent call first):\n"
        f'  File "a.py", line 1 in {name}\n  File "b.py", line 2 in wrapper\n'
        f'  File "c.py", line 3 in outer\n  File "d.py", line 4 in _answer_into\n'
        for name in ("old", "new")
    )
    assert stacks.calls(old + new) == "outer > new"


@pytest.mark.slow
def test_the_job_of_the_exercise_hangs_as_it_says():
    waits = "a_job_that_hangs > train > train_step > all_reduce"
    saves = "a_job_that_hangs > train > save_checkpoint > barrier"
    assert stacks.of_hanging(a_job_that_hangs, 3) == [saves, waits, waits]
