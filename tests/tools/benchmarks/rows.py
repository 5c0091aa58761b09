"""A row of the table of results."""

from dataclasses import dataclass, field

from tests.tools.benchmarks.ratios import MET, MISSED, NOT_DECIDED, Ratio


@dataclass(frozen=True)
class Row:
    """What was measured, as texts; `data` are the numbers behind them, for the JSON file.

    verdict is one of met, missed, not decided, or empty where there is no bar.
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

    def __post_init__(self) -> None:
        if self.verdict not in (MET, MISSED, NOT_DECIDED, ""):
            raise ValueError(f"The verdict of row {self.number} is {self.verdict!r}.")

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
        bar = "printed"
        if at_most is not None or at_least is not None:
            bar = (
                f"at most {at_most:g}" if at_least is None else f"at least {at_least:g}"
            )
        return cls(
            number,
            what,
            bar,
            f"{ratio.value:.3g}",
            f"{ratio.low:.3g} to {ratio.high:.3g}",
            f"{1 / ratio.spread:.3g} to {ratio.spread:.3g}",
            "" if bar == "printed" else ratio.verdict(at_most, at_least),
            note,
            {}  # nothing to draw without a bar
            if bar == "printed"
            else vars(ratio) | {"at_most": at_most, "at_least": at_least},
        )
