"""Which growth of memory counts; how it is sampled is tested in test_streaming.py."""

import pytest

from utils.ray_memory import Sample, growth

pytestmark = pytest.mark.part02


def test_a_process_that_starts_is_not_growth_and_one_that_keeps_data_is():
    def samples(*by_process):
        return [Sample(0, 0, each, 0) for each in by_process]

    before = samples({1: 100, 2: 130}, {1: 110, 2: 130, 3: 130})
    assert growth(before, samples({1: 105, 2: 130, 4: 130}, {1: 105, 2: 131})) == -4
    assert growth(before, samples({1: 105, 2: 130, 4: 130}, {1: 300, 2: 131})) == 191
