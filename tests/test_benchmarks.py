"""The benchmark's statistics, its table, and that each part runs: no timing is tested."""

import numpy as np
import pytest

from tests.tools.benchmarks import __main__ as benchmark
from tests.tools.benchmarks import ray_data, report
from tests.tools.benchmarks.ratios import (
    MET,
    MISSED,
    NOT_DECIDED,
    Ratio,
    interleave,
    ratio,
)


def test_variants_alternate_and_keep_their_places():
    order = []
    a, b = interleave(
        lambda: order.append("A") or 1.0, lambda: order.append("B") or 2.0, pairs=4
    )
    assert "".join(order) == "BA" + "ABBAABBA"  # a pair to warm up
    assert (a.tolist(), b.tolist()) == ([1.0] * 4, [2.0] * 4)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_a_ratio_is_found_although_the_machine_slows_down(factor):
    generator, pairs = np.random.default_rng(0), 12
    drift = np.repeat(np.linspace(1, 1.5, pairs), 2).reshape(pairs, 2)
    seconds = drift * np.exp(0.02 * generator.standard_normal([pairs, 2]))
    found = ratio(seconds[:, 0], factor * seconds[:, 1])
    assert found.low <= factor <= found.high
    assert found.value == pytest.approx(factor, rel=0.03)
    assert 1 < found.spread < 1.15  # the drift between two neighbours, and the noise
    inverse = found.inverse()
    assert inverse.low <= 1 / found.value == inverse.value <= inverse.high


def test_the_control_compares_neighbours_only():
    """In B A A B the A's are neighbours: a factor between variants is not in it."""
    # pair 0 ends with B and pair 1 begins with it: the first A is no neighbour's
    for a in ([1.0, 1.0, 1.0, 1.0], [5.0, 1.0, 1.0, 1.0]):
        assert ratio(a, [9.0, 9.0, 9.0, 9.0]).spread == pytest.approx(1)


@pytest.mark.parametrize(
    ("low", "value", "high", "spread", "verdict"),
    [
        (0.90, 0.95, 0.99, 1.01, MET),
        (1.10, 1.15, 1.20, 1.01, MISSED),
        (0.90, 0.95, 1.20, 1.01, NOT_DECIDED),  # the interval contains the bar
        (0.90, 0.95, 0.99, 1.20, NOT_DECIDED),  # the control is wider than the distance
    ],
)
def test_a_bar_is_met_only_if_the_whole_interval_clears_it(
    low, value, high, spread, verdict
):
    found = Ratio(value, low, high, spread)
    assert found.verdict(1.0) == verdict
    other = {MET: MISSED, MISSED: MET, NOT_DECIDED: NOT_DECIDED}
    assert found.verdict(1.0, at_least=True) == other[verdict]


@pytest.mark.parametrize(
    ("kept", "spilled", "verdict"),
    [(0.01, 0, MET), (0.9, 0, MISSED), (0.1, 0, NOT_DECIDED), (0.01, 5, MISSED)],
)
def test_a_stream_that_keeps_or_spills_what_it_read_misses(kept, spilled, verdict):
    scatter = 5e6 * np.random.default_rng(0).standard_normal([2, 10])
    small, large = np.add(scatter, [[20e6], [20e6 + kept * 252e6]])
    row = ray_data.memory_row(small, large, 252_000_000, spilled)
    assert row.verdict == verdict
    assert float(row.value) == pytest.approx(kept, abs=0.03)


def test_the_page_says_what_the_json_file_says():
    results = report.read(benchmark.FOLDER)
    assert results.keys() == set(benchmark.PARTS)
    page = (benchmark.FOLDER / "RESULTS.md").read_text()
    assert page == report.markdown(results)


@pytest.mark.weekly
def test_bytes_are_those_of_the_formulas_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    benchmark.main(["formulas"])
    rows = report.read(tmp_path)["formulas"]["rows"]
    assert [(row["number"], row["verdict"]) for row in rows] == [(6, MET), (7, MET)]
    assert "| 6 | bytes sent per step" in (tmp_path / "RESULTS.md").read_text()
