"""Which growth of memory counts. Sampling is tested in test_streaming.py."""

from types import SimpleNamespace

import pytest

from utils import ray_memory
from utils.ray_memory import Sample, growth


def samples(*by_process):
    return [Sample(0, 0, each, 0) for each in by_process]


def test_a_process_that_starts_is_not_growth_and_one_that_keeps_data_is():
    before = samples({1: 100, 2: 130}, {1: 110, 2: 130, 3: 130})
    assert growth(before, samples({1: 105, 2: 130, 4: 130}, {1: 105, 2: 131})) == -4
    after = samples({1: 105, 2: 130, 4: 130}, {1: 300, 2: 131})
    assert growth(before, after) == 191
    assert growth(before, after, only={2, 4}) == 1


def test_what_a_batch_takes_for_a_moment_is_not_growth():
    before = samples({1: 100}, {1: 120}, {1: 110})
    spikes = [100, 220, 100, 220, 220, 120, 220, 119]
    assert growth(before, samples(*({1: each} for each in spikes))) == -1
    kept = [120, 140, 160, 180, 200, 220, 240, 260]
    assert growth(before, samples(*({1: each} for each in kept))) == 120
    assert growth(before, samples({1: 150})) == 30  # a pass with a single sample


@pytest.mark.parametrize(("limit", "used"), [(1000, 700), (500, 60)])
def test_memory_in_use_is_that_of_the_machine_or_of_its_container(
    monkeypatch, limit, used
):
    machine = SimpleNamespace(total=1000, available=300)
    monkeypatch.setattr(ray_memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(ray_memory, "get_system_memory", lambda: limit)
    monkeypatch.setattr(ray_memory, "get_used_memory", lambda: 60)  # as Ray counts
    assert ray_memory.used_memory() == used
    assert ray_memory.share_of_memory(used) == used / limit
