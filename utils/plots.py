"""Every figure of the workshop, drawn from numbers that a notebook measured.

Each function draws one figure, which the notebook shows below the cell.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

COLORS = ["#3b6ea8", "#d9822b", "#4a9d6a", "#b5494e", "#7d64a8", "#6b6b6b", "#c06fa8"]
_STYLE = {
    "figure.dpi": 90,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLORS),
    "legend.frameon": False,
}


def curves(
    series: Mapping[str, Sequence[float]],
    title: str,
    xlabel: str = "step",
    ylabel: str = "loss",
    log: bool = False,
    x: Sequence[float] | None = None,
    reference: tuple[str, float] | None = None,
) -> None:
    """Lines over `x`, or over their index; later ones thinner, so that all are seen.

    `reference` is a labelled vertical line.
    """
    with plt.rc_context(_STYLE):
        _, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
        for number, (name, values) in enumerate(series.items()):
            width = 1.5 + 2.5 * (len(series) - 1 - number) / max(1, len(series) - 1)
            at = range(len(values)) if x is None else x
            ax.plot(at, values, label=name, linewidth=width, alpha=0.9)
        if x is None:
            ax.xaxis.get_major_locator().set_params(integer=True)
        if reference:
            ax.axvline(reference[1], color="k", linestyle=":", label=reference[0])
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if log:
            ax.set_yscale("log")
        if len(series) > 1:
            ax.legend()
        plt.show()


def bars(
    values: Mapping[str, float],
    title: str,
    xlabel: str,
    reference: tuple[str, float] | None = None,
    number_format: str = "{:.3g}",
) -> None:
    """Horizontal bars with their values; `reference` is a labelled vertical line."""
    with plt.rc_context(_STYLE):
        height = 1.1 + 0.36 * len(values)
        _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        drawn = ax.barh(
            list(values), list(values.values()), color=COLORS[0], height=0.6
        )
        ax.bar_label(
            drawn, [number_format.format(v) for v in values.values()], padding=3
        )
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
    """Horizontal bars made of parts, with their totals; every row has the same parts."""
    with plt.rc_context(_STYLE):
        height = 1.3 + 0.4 * len(rows)
        _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        left = [0.0] * len(rows)
        for part in next(iter(rows.values())):
            widths = [row[part] for row in rows.values()]
            drawn = ax.barh(list(rows), widths, left=left, height=0.6, label=part)
            left = [start + width for start, width in zip(left, widths)]
        ax.bar_label(drawn, [f"{total:.3g}" for total in left], padding=3)
        ax.margins(x=0.12)
        ax.invert_yaxis()
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        ax.set(title=title, xlabel=xlabel)
        plt.show()


def timeline(
    rows: Mapping[str, Sequence[tuple[float, float, str]]], title: str, xlabel: str
) -> None:
    """Spans over time from 0 on: per row a list of (start, end, label)."""
    with plt.rc_context(_STYLE):
        height = 1.2 + 0.45 * len(rows)
        _, ax = plt.subplots(figsize=(8, height), layout="constrained")
        for number, (name, spans) in enumerate(rows.items()):
            color = COLORS[number % len(COLORS)]
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
                ax.text(
                    middle, number, label, ha="center", va="center", color="w", size=8
                )
        ax.invert_yaxis()
        ax.set(title=title, xlabel=xlabel, xlim=(0, None))
        plt.show()


def images(pictures, labels: Sequence, columns: int = 10) -> None:
    """A grid of images of shape [n, channels, height, width], each with its label."""
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
