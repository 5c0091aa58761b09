"""On more ranks than this machine has, FSDP2 holds and sends what the formulas say."""

import pytest

from tests import sharding
from utils import memory
from utils.checks.sharding import simulate
from utils.models import GPT, GPTConfig


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("keep", [False, True])
def test_fsdp2_on_simulated_ranks_follows_the_formulas(world_size, keep):
    config = GPTConfig(layers=2)
    parameters = sum(p.numel() for p in GPT(config).parameters())

    def wrap(model, mesh):
        return sharding.shard(model, keep, mesh=mesh)

    step = simulate(wrap, config, world_size)
    for measured, predicted in zip(
        step.state, memory.predict(parameters, world_size, 3)
    ):
        assert measured == pytest.approx(predicted, rel=0.02)
    strategy = "fsdp2-keep" if keep else "fsdp2"
    predicted = sharding.predict_sent(strategy, world_size, config)
    assert step.comms.sent(world_size) == pytest.approx(predicted, rel=0.01)
