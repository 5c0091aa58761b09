"""What it is worth that ranks keep the memory they freed (utils.processes)."""

import numpy as np

from tests.tools.benchmarks import loop
from tests.tools.benchmarks.partners import AS_IT_COMES, Partner, torchrun
from tests.tools.benchmarks.ratios import Ratio, interleave, ratio
from tests.tools.benchmarks.report import Row

PAIRS = 24
# In bytes, as glibc's variables; `utils.processes` sets both to 1 GiB. Whoever sets one
# ends glibc's adjusting of both (mallopt(3)).
OTHER_SETTINGS = {
    "no trimming alone (that ends adjusting: blocks from 128 KiB on stay mapped)": {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30)
    },
    "no mapping alone (what is free above 128 KiB is given back)": {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30)
    },
    "both at 32 MiB, the most that glibc's manual allows for mapping": {
        "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    },
}


def start(settings: dict[str, str]) -> Partner:
    """Start ranks whose glibc has these settings; with none, those of utils.processes."""
    return Partner(lambda port: torchrun("serve", port, **settings))


def rows() -> list[Row]:
    """Return row 14 of the table."""
    kept, plain = start({}), start(AS_IT_COMES)
    others = {name: start(settings) for name, settings in OTHER_SETTINGS.items()}
    partners = kept, plain, *others.values()
    losses = [partner.ask("steps")[1] for partner in partners]
    assert all(each == losses[0] for each in losses), "not the same training"
    with_kept, note = compare(plain, kept)
    rows = [
        Row.of_ratio(
            14,
            "step time of ResNet-18 on 2 CPU ranks that keep the memory they freed "
            "(utils.processes), over ranks that give it back",
            with_kept,
            at_most=0.9,
            note=note,
        )
    ]
    for name, other in others.items():
        over_kept, note = compare(kept, other)
        what = f"other settings over that of row 14: {name}"
        rows.append(Row.of_ratio(14, what, over_kept, note=note))
    for partner in partners:
        partner.end()
        partner.started.wait(timeout=60)
    return rows


def compare(a: Partner, b: Partner) -> tuple[Ratio, str]:
    """Return B's step over A's, and what the steps of either took."""
    before = {partner: partner.ask("usage") for partner in (a, b)}
    seconds = interleave(
        lambda: a.ask("steps")[0], lambda: b.ask("steps")[0], PAIRS, warm_up=False
    )
    notes = []
    for partner, times in zip((a, b), seconds):
        used = np.subtract(partner.ask("usage"), before[partner])
        faults, in_kernel = used / len(times) / loop.STEPS
        notes.append(
            f"{1e3 * np.median(times) / loop.STEPS:.0f} ms per step with {faults:,.0f} "
            f"page faults and {1e3 * in_kernel:.0f} ms in the kernel"
        )
    return ratio(*seconds), f"{notes[1]}, against {notes[0]}"
