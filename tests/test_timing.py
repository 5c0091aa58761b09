"""The model of a step: its bounds, its constants found again, its units."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from utils import timing
from utils.comms import Comms
from utils.errors import BadInput
from utils.timing import Machine, Work

pytestmark = pytest.mark.part03
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


def test_the_constants_of_a_machine_are_found_again():
    noise = np.random.default_rng(0).uniform(0.995, 1.005, len(works()))
    seconds = [timing.predict(w, LAPTOP).exposed for w in works()] * noise
    found = timing.fit(works(), seconds)
    assert found == pytest.approx(LAPTOP, rel=0.1)


def test_a_constant_that_is_not_needed_costs_nothing():
    alone = [work._replace(sent=0) for work in works()]
    seconds = [timing.predict(work, LAPTOP).exposed for work in alone]
    found = timing.fit(alone, seconds)
    assert found.bandwidth == float("inf")
    assert found[2:] == pytest.approx(LAPTOP[2:])


def test_as_many_steps_as_constants_are_enough():
    six = [works()[i] for i in (0, 3, 4, 8, 11, 16)]
    seconds = [timing.predict(work, LAPTOP).exposed for work in six]
    assert timing.fit(six, seconds) == pytest.approx(LAPTOP)


def test_flops_of_a_token_and_the_links_of_a_node():
    assert timing.training_flops(10, 100) == 6000
    of_gpus = {n: timing.h100_cluster(n).bandwidth for n in (4, 8, 16)}
    assert of_gpus == {4: 450e9, 8: 450e9, 16: 400e9}
    # nothing else costs anything unless it is said
    everything = Work(1, 1, 1, layers=9, groups=9, state=9)
    assert timing.predict(everything, Machine(1, 1, 1)) == (2, 3)
    assert {"L40S", "L40", "L4"} < timing.PEAK_FLOPS.keys()


def test_two_steps_do_not_tell_six_constants():
    with pytest.raises(ValueError, match="2 steps cannot tell 6"):
        timing.fit(works()[2:4], [1, 1])


def test_what_is_hidden_costs_nothing_until_it_takes_longer():
    computes = Work(flops=8e10, sent=1e9, messages=0)
    assert timing.predict(computes, LAPTOP) == (2, 3)
    sends = Work(flops=4e10, sent=2e9, messages=1000)
    assert timing.predict(sends, LAPTOP) == (2.3, 3.3)


def test_messages_are_one_per_trip_and_group():
    assert timing.messages("fsdp2", 4) == 15
    assert timing.messages("fsdp2-keep", 4) == 10
    assert timing.messages("ddp", 4) == 2
    assert timing.messages("zero1", 4, 4e8) == 2
    assert [timing.groups(name, 4) for name in ("ddp", "zero3", "fsdp2-keep")] == [
        0,
        0,
        5,
    ]


def test_large_models_are_many_messages_of_ddp_and_few_of_fsdp2():
    """At 7 billion a matrix has 73 MB or more, and is a bucket of DDP's by itself."""
    assert timing.messages("ddp", 32, 7e9) == 2 * 4 * 32
    assert timing.messages("ddp", 24, 8e8) == 2 * 3 * 24  # `out` fills no bucket alone
    assert timing.messages("ddp", 32, 7e9, bucket_mb=10_000) == 2 * 3
    assert timing.messages("fsdp2", 32, 7e9) == 3 * 33
    assert timing.messages("zero2", 32, 7e9) == 2 * 14
    assert timing.messages("zero2", 32, 7.1e9) == 2 * 15  # the last is not full


def test_a_ring_passes_the_hops_that_it_has():
    """In microseconds, added up by hand from the constants of the source."""
    of_a_node = timing.h100_ring(8)
    assert of_a_node.latency == pytest.approx((8.4 + 7 * 3.4) * 1e-6)
    over_eight = timing.h100_ring(64)  # 7 hops lead to another node, 56 do not
    assert over_eight == (400e9, pytest.approx((8.4 + 56 * 3.4 + 7 * 14) * 1e-6))
    one_of_each = timing.h100_ring(8, nodes=8)
    assert one_of_each == (50e9, pytest.approx((8.4 + 7 * 14) * 1e-6))
    small = timing.h100_ring(64, protocol="LL128").latency
    assert small == pytest.approx((14 + 56 * 1.9 + 7 * 4) * 1e-6)
    assert timing.h100_cluster(64, 0.5) == (0.5 * 989e12, *over_eight, 0, 0, np.inf)


def test_attention_and_a_second_forward_pass_are_counted():
    assert timing.training_flops(10, 100, attention=(2, 3, 4)) == 100 * (60 + 12 * 24)
    assert timing.training_flops(10, 100, checkpointing=True) == pytest.approx(8000)


@pytest.mark.parametrize(
    "case",
    [
        *((0.75e9, 8, 4096), (66e9, 64, 4096), (7e9, 7, 4096), (7e9, 513, 4096)),
        *((7e9, 8, 4095), (7e9, 8, 49153)),
    ],
)
def test_what_was_not_checked_is_refused(case):
    timing.check_range(0.76e9, 8, 4096)
    timing.check_range(65e9, 512, 49152)
    with pytest.raises(BadInput, match="measure a step instead"):
        timing.check_range(*case)


def test_each_collective_takes_the_ring_of_its_group():
    near, far = tuple(range(8)), tuple(range(0, 64, 8))
    gathers = Comms({"allgather": 3}, {"allgather": 9e9})
    sums = Comms({"allreduce": 2}, {"allreduce": 9e9})
    found = timing.on_h100_rings(Comms(groups={near: gathers, far: sums}))
    in_node, across = timing.h100_ring(8), timing.h100_ring(8, nodes=8)
    gathering = 7 * 9e9 / in_node.bandwidth + 3 * in_node.latency  # of a shard
    adding = 2 * 7 / 8 * 9e9 / across.bandwidth + 2 * 2 * across.latency
    assert found == pytest.approx({"allgather": gathering, "allreduce": adding})


def test_a_collective_that_two_groups_share_is_added_up():
    near, far = (0, 1), (0, 8)
    one = Comms({"allreduce": 1}, {"allreduce": 1e9})
    both = timing.on_h100_rings(Comms(groups={near: one, far: one}))["allreduce"]
    each = [
        timing.on_h100_rings(Comms(groups={g: one}))["allreduce"] for g in (near, far)
    ]
    assert both == pytest.approx(sum(each))


def test_a_bucket_of_ddp_closes_at_25_mib():
    matrix = 25 * 2**20  # bytes of each of the two large matrices of a layer
    parameters = 3 * matrix / 4  # the layer has three such, with qkv and out together
    assert timing.ddp_buckets(1, parameters) == 3  # each is full with its matrix
    assert timing.ddp_buckets(1, 0.98 * parameters) == 2  # one needs two matrices
    assert timing.messages_per_trip("ddp", 1, parameters) == 3
    assert timing.messages_per_trip("ddp", 1, 0.98 * parameters) == 2
    assert timing.messages("ddp", 1, parameters) == 2 * 3
    assert timing.messages_per_trip("fsdp2", 3) == 3 + 1


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


def test_a_cluster_computes_at_40_percent_and_sends_on_its_ring():
    small = timing.h100_cluster(64, protocol="LL128")
    assert small.flops == pytest.approx(0.4 * 989e12)
    assert (small.bandwidth, small.latency) == timing.h100_ring(64, protocol="LL128")
