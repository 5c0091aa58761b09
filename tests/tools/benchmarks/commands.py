"""What the test commands took, beside `make test` before it was split in tiers."""

from tests.tools.benchmarks.ratios import MET, MISSED, NOT_DECIDED
from tests.tools.benchmarks.rows import Row
from tests.tools.seconds import noted_runs

# All tests, on a calm machine with two cores where a warm fit took as long as this.
BEFORE, FIT_BEFORE = 1599.0, 7.5  # seconds
BARS = {"test": 0.28, "test-all": 0.82}


def rows() -> list[Row]:
    """Return row 13, from the notes of both commands' last runs, which passed."""
    return [row(command, noted_runs().get(command)) for command in BARS]


def row(command: str, noted: dict[str, float] | None) -> Row:
    """Return the row of a command, of the seconds `noted`, and of a warm fit after it.

    Seconds say how fast the machine is, too, and fits how fast it is with Ray. So the bar
    is met if both clear it, and missed if neither does.
    """
    what = f"`make {command}` over `make test` before there were tiers, in warm fits"
    bar = f"at most {BARS[command]}, in seconds too"
    before = BEFORE / FIT_BEFORE
    if not noted:
        note = f"no run of `make {command}` passed since code changed; run it, then "
        return Row(
            13, what, bar, "", note=note + "`python -m tests.tools.benchmarks commands`"
        )
    seconds, fits = noted["seconds"], noted["seconds"] / noted["fit"]
    shares = fits / before, seconds / BEFORE
    clear = [share <= BARS[command] for share in shares]
    note = (
        f"{fits:.0f} fits over {before:.0f}, of {noted['fit']:.1f} s and {FIT_BEFORE} s; "
        f"in seconds {shares[1]:.2f}, {seconds:.0f} over {BEFORE:.0f}"
    )
    verdict = MET if all(clear) else NOT_DECIDED if any(clear) else MISSED
    value = f"{shares[0]:.2f}"
    return Row(13, what, bar, value, verdict=verdict, note=note, data=dict(noted))
