"""Memory in use, as a node counts it. Sampling is tested in test_streaming.py."""

from types import SimpleNamespace

import pytest

from utils import ray_memory


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
