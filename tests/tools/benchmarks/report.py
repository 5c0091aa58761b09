"""The rows of the table of results: a JSON file, from which RESULTS.md is written."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.tools.benchmarks.ratios import Ratio

HEAD = """# Results of `make bench`

Written by `make bench`, which measures all parts in one run, or by `python -m
tests.tools.benchmarks PART`, which measures one anew and keeps the others: do not edit.

{parts}

A value is the median of paired ratios, measured in turns (A B B A ...); its interval is a
95% bootstrap interval. The control is the same for two neighbours of one variant: how far
from 1 a ratio is seen where there is no difference. A bar is *met* if the whole interval
clears it, and *not decided* if the control is wider than the distance to it.

| # | what | bar | value | interval | control | verdict | |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What was measured, as texts; `data` are the numbers behind them, for the JSON file.

    verdict: met, missed, not decided, or empty where there is no bar.
    """

    number: int
    what: str
    bar: str
    value: str
    interval: str = ""
    control: str = ""
    verdict: str = ""
    note: str = ""
    data: dict = field(default_factory=dict)

    @classmethod
    def of_ratio(
        cls,
        number: int,
        what: str,
        ratio: Ratio,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> "Row":
        """Make a row of a ratio, with or without a bar."""
        bar, verdict = "printed", ""
        if at_most is not None:
            bar, verdict = f"at most {at_most:g}", ratio.verdict(at_most)
        elif at_least is not None:
            bar, verdict = f"at least {at_least:g}", ratio.verdict(at_least, True)
        return cls(
            number,
            what,
            bar,
            f"{ratio.value:.3g}",
            f"{ratio.low:.3g} to {ratio.high:.3g}",
            f"{1 / ratio.spread:.3g} to {ratio.spread:.3g}",
            verdict,
            note,
            asdict(ratio),
        )


def read(folder: Path) -> dict:
    """Return the results of earlier runs, by part, or none."""
    file = folder / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(folder: Path, results: dict) -> None:
    """Write results.json, and RESULTS.md from it."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "RESULTS.md").write_text(markdown(results))


def markdown(results: dict) -> str:
    """Return the page: where each part was measured, and all rows by their number."""
    parts = ["| part | rows | measured on |", "|---|---|---|"]
    for name, part in results.items():
        numbers = ", ".join(map(str, sorted({row["number"] for row in part["rows"]})))
        parts.append(f"| {name} | {numbers} | {part['machine']} |")
    rows = [row for part in results.values() for row in part["rows"]]
    keys = "number", "what", "bar", "value", "interval", "control", "verdict", "note"
    lines = [
        "| " + " | ".join(str(row[key]) for key in keys) + " |"
        for row in sorted(rows, key=lambda row: row["number"])
    ]
    return HEAD.format(parts="\n".join(parts)) + "\n".join(lines) + "\n"
