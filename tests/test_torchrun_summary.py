"""utils.torchrun_summary: the rank that a summary calls the cause is the cause."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from utils.launch import run_ranks
from utils.torchrun_summary import LOST_A_PEER, Summary, write


def what_gloo_says() -> list[str]:
    """Return what it says of a peer that is gone: to a collective, and to DDP."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() == 1:
        dist.destroy_process_group()  # closes its connections, as its end would
        return []
    said = []
    for work in (
        lambda: model(torch.ones(1, 2)).sum().backward(),
        lambda: dist.all_reduce(torch.zeros(1)),
    ):
        try:
            work()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_gloo_names_its_transport_where_a_peer_is_gone():
    said = run_ranks(what_gloo_says, 2)[0]
    assert len(said) == 2 and all(LOST_A_PEER in each for each in said)


@pytest.fixture
def clock(monkeypatch):
    """Return `clock(seconds)`, which sets what time it is."""
    return lambda now: monkeypatch.setattr(time, "time", lambda: now)


def record(handler: ErrorHandler, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        handler.record_exception(raised)


def cause(*failed: tuple[int, int, Path]) -> int:
    """Return the rank that torchrun names; (rank, exit code, file) as it looks at them."""
    failures = {
        rank: errors.ProcessFailure(rank, 1000 + rank, code, str(file))
        for rank, code, file in failed
    }
    return errors.ChildFailedError("a script", failures).get_first_failure()[0]


GONE = RuntimeError(f"[{LOST_A_PEER}/tcp/pair.cc:538] Connection closed by peer")


@pytest.mark.parametrize(("torchs", "named"), [(False, 1), (True, 0)])
def test_a_killed_rank_is_the_cause_although_another_one_wrote_first(
    tmp_path, monkeypatch, clock, torchs, named
):
    """Rank 0 writes, a new second begins, and torchrun sees that rank 1 is gone."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    clock(1009.98)
    record(ErrorHandler() if torchs else Summary(tmp_path / "0.json"), GONE)
    clock(1010.03)
    assert cause((1, -9, tmp_path / "none"), (0, 1, tmp_path / "0.json")) == named


def test_an_exception_is_the_cause_although_torchrun_looks_at_the_other_one_first(
    tmp_path, clock
):
    clock(1009.5)
    record(Summary(tmp_path / "1.json"), ValueError("damaged image"))
    record(Summary(tmp_path / "0.json"), GONE)
    assert cause((0, 1, tmp_path / "0.json"), (1, 1, tmp_path / "1.json")) == 1


def test_the_file_is_torchs_own_but_for_the_time(tmp_path, monkeypatch, clock):
    clock(1009.5)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "theirs"))
    error = ValueError("damaged image")
    try:
        raise error
    except ValueError:
        ErrorHandler().record_exception(error)
        Summary(tmp_path / "ours").record_exception(error)
    ours, theirs = (json.loads((tmp_path / n).read_text()) for n in ("ours", "theirs"))
    assert ours == theirs and "damaged image" in str(ours)


def test_a_rank_that_ends_while_it_writes_leaves_no_half_of_a_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Path, "replace", lambda part, path: None)  # it ended before
    write(tmp_path / "0.json", {"message": "x", "timestamp": 1})
    assert not (tmp_path / "0.json").exists()
    assert cause((0, -15, tmp_path / "0.json")) == 0
