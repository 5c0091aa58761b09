"""Seconds on GPUs by data sheets: their units, their formulas, added up by hand."""

import pytest

from utils import timing
from utils.comms import Comms


def test_flops_of_a_token_attention_and_checkpointing():
    assert timing.training_flops(10, 100) == 6000
    assert timing.training_flops(10, 100, attention=(2, 3, 4)) == 100 * (60 + 12 * 24)
    assert timing.training_flops(10, 100, checkpointing="full") == pytest.approx(8000)
    assert timing.training_flops(10, 100, checkpointing="selective") == 6000


def test_a_ring_of_h100s_has_its_bandwidth_and_its_hops():
    """In microseconds, added up by hand from the constants of the source."""
    assert {n: timing.h100_ring(n).bandwidth for n in (4, 16)} == {4: 450e9, 16: 400e9}
    of_a_node = timing.h100_ring(8)
    assert of_a_node == (450e9, pytest.approx((8.4 + 7 * 3.4) * 1e-6))
    over_eight = timing.h100_ring(64)  # 7 hops lead to another node, 56 do not
    assert over_eight == (400e9, pytest.approx((8.4 + 56 * 3.4 + 7 * 14) * 1e-6))
    one_of_each = timing.h100_ring(8, nodes=8)
    assert one_of_each == (50e9, pytest.approx((8.4 + 7 * 14) * 1e-6))


@pytest.mark.parametrize(
    ("gpus", "nodes", "microseconds"),
    [
        (8, 1, 56),  # a ring: a tree in the node would take 64
        (64, 8, 148.4),  # a tree: the ring takes 819
        (64, 64, 176.4),  # a GPU of each node
        (512, 64, 232.4),
    ],
)
def test_an_all_reduce_takes_a_ring_or_a_tree(gpus, nodes, microseconds):
    assert timing.allreduce_latency(gpus, nodes) == pytest.approx(microseconds * 1e-6)


def test_each_collective_takes_the_ring_of_its_group():
    near, far = tuple(range(8)), tuple(range(0, 64, 8))
    gathers = Comms({"allgather": 3}, {"allgather": 9e9})
    sums = Comms({"allreduce": 2}, {"allreduce": 9e9})
    both = Comms({"allgather": 3, "allreduce": 2}, gathers.payload | sums.payload)
    found = timing.on_h100_rings(Comms(groups={near: gathers, far: both}))
    in_node, across = timing.h100_ring(8), timing.h100_ring(8, nodes=8)
    gathering = sum(  # of a shard, in both groups
        7 * 9e9 / ring.bandwidth + 3 * ring.latency for ring in (in_node, across)
    )
    adding = 2 * 7 / 8 * 9e9 / across.bandwidth + 2 * timing.allreduce_latency(8, 8)
    assert found == pytest.approx({"allgather": gathering, "allreduce": adding})
