"""DeepSpeed, loaded by utils.zero: nothing is compiled, and no compiler is needed."""

import sys

import pytest
import torch

from tests import sharding
from utils.launch import run_ranks

pytestmark = pytest.mark.part03


def train() -> tuple[list[float], bool]:
    losses = sharding.zero(3, torch.float32, 2)["losses"]
    return losses, "torch._inductor.compile_fx" in sys.modules


@pytest.mark.slow
def test_zero_trains_without_a_compiler(monkeypatch):
    """Left alone, DeepSpeed would compile an operator when it starts on a CPU.

    And it would import torch's own compiler, 2 s in each process, for an optimizer that
    nobody asked for.
    """
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    losses, has_compiler = run_ranks(train, 2)[0]
    assert losses[1] < losses[0]
    assert not has_compiler
