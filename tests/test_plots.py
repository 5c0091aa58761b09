"""Figures at the edges of what they may be asked for."""

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
