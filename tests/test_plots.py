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


def test_a_fit_begins_at_zero_beside_its_points():
    plots.fits({"DDP": {32: 90, 64: 150}}, {"DDP": (30, 2.0)}, "title", "x", "y")
    ax = plt.gca()
    assert ax.lines[0].get_xydata().tolist() == [[0, 30], [64, 158]]
    assert ax.collections[0].get_offsets().tolist() == [[32, 90], [64, 150]]
    assert ax.get_xlim()[0] == ax.get_ylim()[0] == 0


def test_a_strategy_has_one_colour_everywhere():
    assert plots.color_of("ZeRO-3") == plots.color_of("zero3", 5)
    assert plots.color_of("FSDP2, kept") == plots.color_of("fsdp2-keep", 1)
    assert len(set(plots.STRATEGIES.values())) == len(plots.STRATEGIES)
    assert plots.color_of("loss", 9) == plots.COLORS[1]


def test_a_range_has_its_ends_and_its_dot():
    rows = {"one": [(0, 4), (0, 2)], "two": [(1, 9), (1, 3)]}
    plots.ranges(rows, {"two": 5, "one": 3}, ["wide", "narrow", "found"], "title", "s")
    ax = plt.gca()
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches]
    assert ends == [(0, 4), (1, 9), (0, 2), (1, 3)]
    assert list(ax.lines[0].get_xdata()) == [3, 5]
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(named) == ["found", "narrow", "wide"]


def test_rows_of_a_kind_have_one_colour():
    rows = {name: [(0.0, 1.0, "")] for name in ("scan 1", "nap 1", "scan 2")}
    plots.timeline(rows, "title", "seconds", kinds=("nap", "scan"))
    colours = [patch.get_facecolor() for patch in plt.gca().patches]
    assert colours[0] == colours[2] != colours[1]


def test_marks_of_a_timeline_stand_where_they_happened_and_not_on_each_other():
    marks = {"the last": 9.9, "the first": 1, "the second": 1.1}
    plots.timeline({"a row": [(0, 10, "")]}, "title", "seconds", marks)
    ax = plt.gca()
    assert sorted(line.get_xdata()[0] for line in ax.lines) == [1, 1.1, 9.9]
    named = {text.get_text().strip(): text for text in ax.texts if text.get_text()}
    assert named.keys() == marks.keys()
    for name, place in marks.items():
        assert named[name].xy[0] == place
    heights = sorted(text.xyann[1] for text in named.values())
    assert min(b - a for a, b in pairwise(heights)) > 10
