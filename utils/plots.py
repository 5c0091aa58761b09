"""Every figure of the workshop, drawn from numbers that a notebook measured.

Each function draws one figure, which the notebook shows below the cell. Colour-blind
readers can tell the colours apart: they are petroff8 (M. A. Petroff, "Accessible Color
Sequences for Data Visualization", arXiv 2107.02270). A strategy has one colour everywhere.
"""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

COLORS = [
    *("#1845fb", "#ff5e02", "#c91f16", "#c849a9"),
    *("#adad7d", "#86c8dd", "#578dff", "#656364"),
]
# Keys are the start of a name, in small letters and without what is between its words.
STRATEGIES = {
    "oneprocess": COLORS[7],
    "ddp": COLORS[0],
    "zero1": COLORS[4],
    "zero2": COLORS[5],
    "zero3": COLORS[6],
    "fsdp2": COLORS[1],
    "hsdp": COLORS[2],
    "tensorparallel": COLORS[3],
}
_STYLE = {
    "figure.dpi": 90,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLORS),
    "legend.frameon": False,
}


def color_of(name: str, number: int = 0) -> str:
    """Return the colour of a strategy ("ZeRO-3", "fsdp2-keep"), else the `number`-th."""
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [color for start, color in STRATEGIES.items() if key.startswith(start)]
    return found[0] if found else COLORS[number % len(COLORS)]


def _name_at_the_end(ax: plt.Axes, gap: float = 0.085) -> None:
    """Write each line's name beside its end, in its colour, no two on top of each other."""
    ax.get_xlim(), ax.get_ylim()  # places depend on the limits: let them be set
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = [(to_axes.transform(line.get_xydata()[-1])[1], line) for line in ax.lines]
    ends.sort(key=lambda end: end[0])
    lowest = 1 - gap * (len(ends) - 1)  # the names above it need this much
    place = float("-inf")
    for number, (height, line) in enumerate(ends):
        place = max(min(height, lowest + number * gap), place + gap)
        ax.annotate(
            line.get_label(),
            (1, place),
            xytext=(6, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=line.get_color(),
        )


def curves(
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str = "step",
    ylabel: str = "loss",
    log: bool = False,
    x: Sequence[float] | None = None,
    reference: tuple[str, float] | None = None,
    from_zero: bool = False,
) -> None:
    """Draw lines over `x`, or over their index; later ones thinner, so all are seen.

    reference: a labelled vertical line. from_zero: the vertical axis begins there.
    """
    with plt.rc_context(_STYLE):
        _, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
        for number, (name, values) in enumerate(series.items()):
            width = 1.5 + 2.5 * (len(series) - 1 - number) / max(1, len(series) - 1)
            at = range(len(values)) if x is None else x
            color = color_of(name, number)
            ax.plot(at, values, label=name, linewidth=width, color=color)
        if x is None:
            ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if log:
            ax.set_yscale("log")
        if from_zero:
            ax.set_ylim(bottom=0)
        if len(series) > 1:
            _name_at_the_end(ax)
        if reference:
            text, place = reference
            ax.axvline(place, color="k", linestyle=":")
            ax.text(place, 1, f" {text}", transform=ax.get_xaxis_transform(), va="top")
        plt.show()


def fits(
    points: Mapping[str, Mapping[float, float]],
    lines: Mapping[str, tuple[float, float]],
    title: str,
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw measured points by x, and dashed lines (value at x = 0, slope) from 0 on."""
    with plt.rc_context(_STYLE):
        _, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
        end = max(x for each in points.values() for x in each)
        for number, (name, (at_zero, slope)) in enumerate(lines.items()):
            color = color_of(name, number)
            drawn = [at_zero, at_zero + slope * end]
            ax.plot([0, end], drawn, "--", label=name, linewidth=1.2, color=color)
        for number, (name, each) in enumerate(points.items()):
            color = color_of(name, number)
            ax.scatter(list(each), list(each.values()), s=26, color=color, zorder=3)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
        ax.set_xlim(0, end * 1.03)
        _name_at_the_end(ax)
        plt.show()


def bars(
    values: Mapping[str, float],
    title: str,
    xlabel: str,
    reference: tuple[str, float] | None = None,
    one_color: bool = False,
) -> None:
    """Draw horizontal bars with their values; `reference` is a labelled vertical line.

    one_color: for all bars, also for names that have a colour of their own elsewhere.
    """
    with plt.rc_context(_STYLE):
        height = 1.1 + 0.36 * len(values)
        _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        colors = [COLORS[0] if one_color else color_of(name) for name in values]
        drawn = ax.barh(list(values), list(values.values()), color=colors, height=0.6)
        ax.bar_label(drawn, [f"{value:.3g}" for value in values.values()], padding=3)
        ax.margins(x=0.12)
        ax.invert_yaxis()
        if reference:
            ax.axvline(
                reference[1], color=COLORS[1], linestyle="--", label=reference[0]
            )
            ax.legend(loc="lower right")
        ax.set(title=title, xlabel=xlabel)
        plt.show()


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], title: str, xlabel: str
) -> None:
    """Draw horizontal bars made of parts, with totals; every row has the same parts."""
    with plt.rc_context(_STYLE):
        height = 1.3 + 0.4 * len(rows)
        _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        left = [0.0] * len(rows)
        for part in next(iter(rows.values())):
            widths = [row[part] for row in rows.values()]
            drawn = ax.barh(list(rows), widths, left=left, height=0.6, label=part)
            left = [start + width for start, width in zip(left, widths)]
        ax.bar_label(drawn, [f"{total:.3g}" for total in left], padding=3)
        # set, as a last part of width 0 would hold the axis at its edge
        ax.set_xlim(0, 1.12 * max(left))
        ax.invert_yaxis()
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        ax.set(title=title, xlabel=xlabel)
        plt.show()


def timeline(
    rows: Mapping[str, Sequence[tuple[float, float, str]]],
    title: str,
    xlabel: str,
    marks: Mapping[str, float] | None = None,
    kinds: Sequence[str] = (),
) -> None:
    """Draw spans over time from 0 on: per row a list of (start, end, label).

    `marks` are labelled vertical lines: what happened when. A row has a colour of its own,
    or that of the one of `kinds` with which its name begins.
    """
    marks = dict(sorted((marks or {}).items(), key=lambda mark: mark[1]))
    with plt.rc_context(_STYLE):
        height = 1.2 + 0.45 * len(rows) + 0.2 * len(marks)
        _, ax = plt.subplots(figsize=(8, height), layout="constrained")
        for number, (name, spans) in enumerate(rows.items()):
            kind = [n for n, start in enumerate(kinds) if name.startswith(start)]
            color = color_of(name, *(kind or [number]))
            red, green, blue = to_rgb(color)
            light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            for start, end, label in spans:
                ax.barh(
                    name,
                    end - start,
                    left=start,
                    height=0.6,
                    color=color,
                    edgecolor="w",
                    linewidth=0.3,  # a wide edge would hide a short span
                )
                middle = (start + end) / 2
                ink = "k" if light else "w"
                ax.text(
                    middle, number, label, ha="center", va="center", color=ink, size=8
                )
        ax.invert_yaxis()
        ax.set(xlabel=xlabel, xlim=(0, None))
        ax.set_title(title, pad=8 + 13 * len(marks))
        _mark(ax, marks)
        plt.show()


def _mark(ax: plt.Axes, marks: Mapping[str, float]) -> None:
    """Draw labelled vertical lines; each label has a height of its own above the axes."""
    middle = sum(ax.get_xlim()) * 0.6
    # No line may cross a label: of those that stand right of their line, the last one is
    # lowest, and of those that stand left of it, the last one is highest.
    right = [mark for mark in marks.items() if mark[1] <= middle]
    left = [mark for mark in marks.items() if mark[1] > middle]
    for height, (text, place) in enumerate([*reversed(right), *left]):
        is_left = place > middle
        ax.axvline(place, color="k", linestyle=":", linewidth=1)
        ax.annotate(
            f"{text} " if is_left else f" {text}",
            (place, 1),
            xytext=(0, 3 + 13 * height),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if is_left else "left",
            size=9,
            arrowprops={
                "arrowstyle": "-",
                "linestyle": ":",
                "relpos": (float(is_left), 0.5),
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )


def images(pictures, labels: Sequence, columns: int = 10) -> None:
    """Draw a grid of images of shape [n, channels, height, width], each with its label."""
    with plt.rc_context(_STYLE):
        rows = -(-len(pictures) // columns)
        size = (columns * 0.75, rows * 0.95)
        _, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False
        )
        for ax in axes.flat:
            ax.axis("off")
        for ax, picture, label in zip(axes.flat, pictures, labels):
            ax.imshow(picture.permute(1, 2, 0).numpy(), cmap="gray_r")
            ax.set_title(str(label), size=9)
        plt.show()
