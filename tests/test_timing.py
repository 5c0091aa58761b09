"""The model of a step: its bounds, its constants found again, its units."""

import numpy as np
import pytest

from utils import timing
from utils.errors import BadInput
from utils.timing import Machine, Work

pytestmark = pytest.mark.part03
LAPTOP = Machine(flops=4e10, bandwidth=1e9, latency=3e-4, start=2e-3)


def works() -> list[Work]:
    return [
        Work(
            timing.training_flops(p, t),
            6 * p,
            timing.messages(strategy, layers),
            layers,
        )
        for p, t, layers in ((1e5, 512, 2), (4e5, 1024, 4), (2e6, 512, 8))
        for strategy in ("ddp", "fsdp2", "fsdp2-keep")
    ]


def test_the_constants_of_a_machine_are_found_again():
    noise = np.random.default_rng(0).uniform(0.98, 1.02, len(works()))
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
    four = [works()[i] for i in (0, 1, 4, 8)]
    seconds = [timing.predict(work, LAPTOP).exposed for work in four]
    assert timing.fit(four, seconds) == pytest.approx(LAPTOP)


def test_flops_of_a_token_and_the_links_of_a_node():
    assert timing.training_flops(10, 100) == 6000
    of_gpus = {n: timing.h100_cluster(n).bandwidth for n in (4, 8, 16)}
    assert of_gpus == {4: 450e9, 8: 450e9, 16: 400e9}
    assert Machine(1, 1, 1).start == 0  # a layer costs nothing unless it is said
    assert {"L40S", "L40", "L4"} < timing.PEAK_FLOPS.keys()


def test_two_steps_do_not_tell_four_constants():
    with pytest.raises(ValueError, match="2 steps cannot tell 4"):
        timing.fit(works()[:2], [1, 1])


def test_what_is_hidden_costs_nothing_until_it_takes_longer():
    computes = Work(flops=8e10, sent=1e9, messages=0)
    assert timing.predict(computes, LAPTOP) == (2, 3)
    sends = Work(flops=4e10, sent=2e9, messages=1000)
    assert timing.predict(sends, LAPTOP) == (2.3, 3.3)


def test_messages_are_one_per_trip_and_group():
    assert timing.messages("fsdp2", 4) == 15
    assert timing.messages("fsdp2-keep", 4) == 10
    assert timing.messages("ddp", 4) == 2


def test_a_hop_takes_what_the_source_measured():
    """An all-reduce of 1 MiB: twice a ring's hops; bus bandwidth in GB/s, by its source."""
    for gpus, bus_bandwidth in ((8, 36.06e9), (32, 5.37e9)):
        measured = 2 * (gpus - 1) / gpus * 2**20 / bus_bandwidth
        assert 2 * timing.h100_cluster(gpus).latency == pytest.approx(
            measured, rel=0.02
        )


@pytest.mark.parametrize(
    "case",
    [
        *((0.1e9, 8, 4096), (7e9, 4, 4096), (70e9, 64, 4096), (7e9, 1024, 4096)),
        *((7e9, 8, 1024), (7e9, 8, 65536)),
    ],
)
def test_what_was_not_checked_is_refused(case):
    timing.check_range(7e9, 8, 49152)
    with pytest.raises(BadInput, match="measure a step instead"):
        timing.check_range(*case)
