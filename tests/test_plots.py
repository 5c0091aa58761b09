"""Figures: what a reader could misread if it were drawn wrongly."""

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


def test_every_image_has_its_place_and_label():
    plots.images(torch.rand(3, 1, 8, 8), "abc", columns=2)
    shown = [ax.get_title() for ax in plt.gcf().axes if ax.images]
    assert shown == list("abc")


@pytest.mark.parametrize("ends", [[1.0] * 7, [3, 3, 1, 9, 9], [9, 9, 9, 1]])
def test_names_beside_lines_do_not_overlap(ends):
    plots.curves({f"line {n}": [5, end] for n, end in enumerate(ends)}, "title")
    places = sorted(text.xy[1] for text in plt.gca().texts)
    assert min(b - a for a, b in pairwise(places)) > 0.08
    assert places[0] >= 0 and places[-1] <= 1


def test_a_strategy_has_one_colour_everywhere():
    assert plots.color_of("ZeRO-3") == plots.color_of("zero3", 5)
    assert plots.color_of("FSDP2, kept") == plots.color_of("fsdp2-keep", 1)
    assert len(set(plots.STRATEGIES.values())) == len(plots.STRATEGIES)


def test_marks_of_a_timeline_stand_where_they_happened_and_not_on_each_other():
    marks = {"the last": 9.9, "the first": 1, "the second": 1.1}
    plots.timeline({"a row": [(0, 10, "")]}, "title", "seconds", marks)
    ax = plt.gca()
    labels = {text.get_text().strip(): text for text in ax.texts if text.get_text()}
    assert {name: text.xy[0] for name, text in labels.items()} == marks
    heights = sorted(text.xyann[1] for text in labels.values())
    assert min(b - a for a, b in pairwise(heights)) > 10
