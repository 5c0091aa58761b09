"""The model of a step: its bounds, its constants found again, its units."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from utils import timing
from utils.comms import Comms
from utils.errors import BadInput
from utils.timing import Machine, Work

LAPTOP = Machine(4e10, bandwidth=1e9, latency=3e-4, start=2e-3, group=1e-3, memory=4e9)


def works() -> list[Work]:
    return [
        Work(
            timing.training_flops(p, t),
            network * 6 * p,
            network * timing.messages(strategy, layers),
            layers,
            timing.groups(strategy, layers),
            16 * p / (1 if strategy == "ddp" else 2),
        )
        for p, t, layers in ((1e5, 512, 2), (1e6, 2048, 4), (2e6, 128, 8))
        for strategy in ("ddp", "fsdp2", "fsdp2-keep")
        for network in (True, False)
    ]


def test_a_fit_finds_the_constants_of_a_machine_again():
    exact = np.array([timing.predict(work, LAPTOP).exposed for work in works()])
    noise = np.random.default_rng(0).uniform(0.995, 1.005, len(exact))
    assert timing.fit(works(), exact * noise) == pytest.approx(LAPTOP, rel=0.1)
    six = [0, 3, 4, 8, 11, 16]  # as many steps as constants
    found = timing.fit([works()[i] for i in six], exact[six])
    assert found == pytest.approx(LAPTOP)
    with pytest.raises(ValueError, match="2 steps cannot tell 6"):
        timing.fit(works()[2:4], [1, 1])


def test_a_constant_that_no_step_needs_costs_nothing():
    alone = [work._replace(sent=0) for work in works()]
    seconds = [timing.predict(work, LAPTOP).exposed for work in alone]
    found = timing.fit(alone, seconds)
    assert found.bandwidth == float("inf")
    assert found[2:] == pytest.approx(LAPTOP[2:])


def test_sending_that_overlaps_costs_nothing_until_it_takes_longer():
    computes = Work(flops=8e10, sent=1e9, messages=0)
    assert timing.predict(computes, LAPTOP) == (2, 3)
    sends = Work(flops=4e10, sent=2e9, messages=1000)
    assert timing.predict(sends, LAPTOP) == (2.3, 3.3)


def test_flops_of_a_token_attention_and_checkpointing():
    assert timing.training_flops(10, 100) == 6000
    assert timing.training_flops(10, 100, attention=(2, 3, 4)) == 100 * (60 + 12 * 24)
    assert timing.training_flops(10, 100, checkpointing=True) == pytest.approx(8000)


@pytest.mark.parametrize(
    ("strategy", "layers", "parameters", "expected"),
    [
        ("ddp", 4, 0, 2),
        ("fsdp2", 4, 0, 3 * 5),
        ("fsdp2-keep", 4, 0, 2 * 5),
        ("zero1", 4, 4e8, 2),
        # at 7 billion a matrix has 73 MB or more, and is a bucket of DDP's by itself
        ("ddp", 32, 7e9, 2 * 4 * 32),
        ("ddp", 24, 8e8, 2 * 3 * 24),  # `out` fills no bucket alone
        ("fsdp2", 32, 7e9, 3 * 33),
        ("zero2", 32, 7.1e9, 2 * 15),  # the last is not full
    ],
)
def test_messages_of_a_step(strategy, layers, parameters, expected):
    assert timing.messages(strategy, layers, parameters) == expected


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_buckets_are_those_of_the_function_that_ddp_calls(layers):
    for width in range(300, 3100, 50):
        squares = [4, 4, 1, 3] * layers  # on the meta device they take no memory
        matrices = [torch.empty(n * width**2, device="meta") for n in squares]
        for mb in (10, 25):
            limit = [mb * 2**20]
            found, _ = dist._compute_bucket_assignment_by_size(matrices, limit)
            parameters = sum(matrix.numel() for matrix in matrices)
            assert timing.ddp_buckets(layers, parameters, mb) == len(found), (width, mb)


def test_a_ring_of_h100s_has_its_bandwidth_and_its_hops():
    """In microseconds, added up by hand from the constants of the source."""
    assert {n: timing.h100_ring(n).bandwidth for n in (4, 16)} == {4: 450e9, 16: 400e9}
    of_a_node = timing.h100_ring(8)
    assert of_a_node == (450e9, pytest.approx((8.4 + 7 * 3.4) * 1e-6))
    over_eight = timing.h100_ring(64)  # 7 hops lead to another node, 56 do not
    assert over_eight == (400e9, pytest.approx((8.4 + 56 * 3.4 + 7 * 14) * 1e-6))
    one_of_each = timing.h100_ring(8, nodes=8)
    assert one_of_each == (50e9, pytest.approx((8.4 + 7 * 14) * 1e-6))
    small = timing.h100_ring(64, protocol="LL128").latency
    assert small == pytest.approx((14 + 56 * 1.9 + 7 * 4) * 1e-6)


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
    adding = 2 * 7 / 8 * 9e9 / across.bandwidth + 2 * 2 * across.latency
    assert found == pytest.approx({"allgather": gathering, "allreduce": adding})


@pytest.mark.parametrize(
    "size",
    [
        *((0.75e9, 8, 4096), (66e9, 64, 4096), (7e9, 7, 4096), (7e9, 513, 4096)),
        *((7e9, 8, 4095), (7e9, 8, 49153)),
    ],
)
def test_a_size_that_no_published_run_covers_is_refused(size):
    timing.check_range(0.76e9, 8, 4096)
    timing.check_range(65e9, 512, 49152)
    with pytest.raises(BadInput, match="measure a step instead"):
        timing.check_range(*size)
