"""Figures at the edges of what they may be asked for."""

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
import torch

from utils import plots


@pytest.fixture(autouse=True)
def no_window(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (1, 10), (3, 2), (4, 1)])
def test_a_grid_has_a_place_for_every_image(count, columns):
    plots.images(torch.rand(count, 1, 8, 8), range(count), columns)
    shown = [ax.get_title() for ax in plt.gcf().axes if ax.images]
    assert shown == [str(number) for number in range(count)]


@pytest.mark.parametrize("ends", [[1.0] * 7, [1, 2, 3], [3, 3, 1, 9, 9], [9, 9, 9, 1]])
def test_names_beside_lines_do_not_overlap(ends):
    plots.curves({f"line {n}": [5, end] for n, end in enumerate(ends)}, "title")
    ax = plt.gca()
    places = sorted(text.xy[1] for text in ax.texts)
    assert min(b - a for a, b in pairwise(places)) > 0.08
    assert places[0] >= 0 and places[-1] <= 1
    assert [text.get_color() for text in ax.texts].count(plots.COLORS[0]) == 1


def test_a_strategy_has_one_colour_everywhere():
    assert plots.color_of("ZeRO-3") == plots.color_of("zero3", 5)
    assert plots.color_of("FSDP2, kept") == plots.color_of("fsdp2-keep", 1)
    assert len(set(plots.STRATEGIES.values())) == len(plots.STRATEGIES)
    assert plots.color_of("loss", 9) == plots.COLORS[1]
