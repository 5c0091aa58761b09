"""The log of a run: who says what in it, also while the run is being ended."""

import pytest
import torch.distributed as dist

from utils import events
from utils.launch import run_ranks


def three_notes(path) -> None:
    events.note(path, "before")
    dist.init_process_group("gloo")
    events.note(path, "step", seen=8)
    dist.barrier()
    dist.destroy_process_group()
    events.note(path, "step", seen=16)  # as where Ray has ended the group meanwhile


def test_a_step_says_its_rank_even_after_the_group_has_ended(tmp_path):
    path = tmp_path / "log"
    run_ranks(three_notes, 2, path)
    steps = events.noted(path, "step", world_size=2)
    found = {(step["rank"], step["seen"]) for step in steps}
    assert found == {(rank, seen) for rank in (0, 1) for seen in (8, 16)}
    assert all("rank" not in each for each in events.noted(path, "before"))


@pytest.mark.parametrize("status", [0, 1, -9, True])
def test_waiting_ends_when_the_process_that_would_write_has_ended(status, tmp_path):
    """Also at once if it ended well: `Popen.poll` returns 0 then."""
    path = tmp_path / "log"
    with pytest.raises(TimeoutError, match=r"'step' with .* did not happen"):
        events.wait_for(path, "step", unless=lambda: status, seconds=600)
    answers = iter([None, False, status])

    def ends_with_a_step():
        if (answer := next(answers)) is status:
            events.note(path, "step")
        return answer

    assert events.wait_for(path, "step", unless=ends_with_a_step)["event"] == "step"


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    """Where it crosses a page of memory, a reader may see its first half alone."""
    path = tmp_path / "log"
    assert events.noted(path, "step") == []
    events.note(path, "step", seen=8)
    events.note(path, "step", seen=16)
    whole = path.read_text()
    for cut in range(whole.index("\n") + 1, len(whole)):
        path.write_text(whole[:cut])
        assert [entry["seen"] for entry in events.noted(path, "step")] == [8]
    path.write_text(whole)
    assert [entry["seen"] for entry in events.noted(path, "step")] == [8, 16]
