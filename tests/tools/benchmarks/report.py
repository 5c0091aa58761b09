"""The results as a JSON file, a table in Markdown, and a figure of the ratios."""

import json
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from utils.plots import COLORS

HEAD = """# Results of `make bench`

Written by `make bench`, which measures all parts in one run, or by `python -m
tests.tools.benchmarks PART`, which measures one anew and keeps the others: do not edit.

{parts}

A value is the median of paired ratios, measured in turns (A B B A ...); its interval is a
95% bootstrap interval. The control is the same for two neighbours of one variant: how far
from 1 a ratio is seen where there is no difference. A bar is *met* if the whole interval
clears it, and *not decided* if the control is wider than the distance to it. *Before* is
the value of the run before this one.

| # | what | bar | value | interval | control | verdict | before | |
|---|---|---|---|---|---|---|---|---|
"""


def read(folder: Path) -> dict:
    """Return the results of an earlier run, or none."""
    file = folder / "results.json"
    return json.loads(file.read_text()) if file.exists() else {"parts": {}}


def all_rows(results: dict) -> list[dict]:
    rows = [row for part in results["parts"].values() for row in part["rows"]]
    return sorted(rows, key=lambda row: row["number"])


def where(results: dict) -> str:
    """Return per part its rows, how long it took, and the machine that it ran on."""
    lines = ["| part | rows | minutes | measured on |", "|---|---|---|---|"]
    for name, part in results["parts"].items():
        numbers = ", ".join(map(str, sorted({row["number"] for row in part["rows"]})))
        machine = (
            "{cores} cores ({processor}), Python {python}, torch {torch}, Ray {ray}"
        ).format(**part["machine"])
        minutes = part["seconds"] / 60
        lines.append(f"| {name} | {numbers} | {minutes:.1f} | {machine} |")
    return "\n".join(lines)


def markdown(results: dict) -> str:
    keys = ["number", "what", "bar", "value", "interval", "control", "verdict"]
    keys += ["before", "note"]
    lines = [
        "| " + " | ".join(str(row.get(key, "")) for key in keys) + " |"
        for row in all_rows(results)
    ]
    head = HEAD.format(parts=where(results))
    return head + "\n".join(lines) + "\n\n![Ratios and their bars](ratios.png)\n"


def write(folder: Path, results: dict) -> None:
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    results = read(folder)
    (folder / "RESULTS.md").write_text(markdown(results))
    draw(folder / "ratios.png", [r for r in all_rows(results) if "spread" in r["data"]])


def draw(path: Path, rows: list[dict]) -> None:
    """Draw per row the interval of the ratio, the control around 1, and the bar."""
    if not rows:
        return
    figure, ax = plt.subplots(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        data = row["data"]
        bar = data["at_most"] if data["at_least"] is None else data["at_least"]
        control = [1 / data["spread"], data["spread"]]
        first = y == 0
        ax.plot(control, [y, y], color="#cccccc", linewidth=9, label="control" * first)
        ends = [data["low"], data["high"]]
        ax.plot(ends, [y, y], color=COLORS[0], linewidth=3, label="interval" * first)
        ax.plot(data["value"], y, "o", color=COLORS[0], label="median" * first)
        ax.plot(bar, y, "|", color=COLORS[1], markersize=18, label="bar" * first)
    labels = [textwrap.fill(f"{row['number']}  {row['what']}", 55) for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=8)
    ax.set_xscale("log")
    ticks = [0.5, 1, 2, 5]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.invert_yaxis()
    ax.set_xlabel("ratio")
    figure.legend(fontsize=8, loc="outside upper right", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)
