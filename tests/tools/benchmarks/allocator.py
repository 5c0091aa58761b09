"""What it is worth that ranks keep the memory they freed, and who does so anyway."""

import subprocess
from functools import partial

import numpy as np

from tests.tools.benchmarks import loop
from tests.tools.benchmarks.partners import AS_IT_COMES, Partner, torchrun
from tests.tools.benchmarks.ratios import Ratio, interleave, ratio
from tests.tools.benchmarks.rows import Row

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


def rows() -> list[Row]:
    """Return row 14 of the table, and the reason of row 1."""
    kept = Partner(lambda port: torchrun("serve", port))
    plain = Partner(lambda port: torchrun("serve", port, **AS_IT_COMES))
    thread = Partner(lambda port: torchrun("serve-in-a-thread", port, **AS_IT_COMES))
    as_ray = Partner(lambda port: torchrun("serve-as-ray", port))
    others = {
        name: Partner(partial(by_torchrun, s)) for name, s in OTHER_SETTINGS.items()
    }
    partners = kept, plain, thread, as_ray, *others.values()
    losses = [partner.ask("steps")[1] for partner in partners]
    assert all(each == losses[0] for each in losses), "not the same training"
    with_kept, said_kept = compare(plain, kept)
    in_thread, said_thread = compare(plain, thread)
    nicely, said_nicely = compare(kept, as_ray)
    compared = {name: compare(kept, other) for name, other in others.items()}
    for partner in partners:
        partner.end()
        partner.started.wait(timeout=60)
    return [
        Row.of_ratio(
            14,
            "step time of ResNet-18 on 2 CPU ranks that keep the memory they freed "
            "(utils.processes), over ranks that give it back",
            with_kept,
            at_most=0.9,
            note=said_kept,
        ),
        *(
            Row.of_ratio(
                14, f"other settings over that of row 14: {name}", ratio, note=said
            )
            for name, (ratio, said) in compared.items()
        ),
        Row.of_ratio(
            1,
            "why it was 0.90 before row 14: the same loop under torchrun, in a thread (as "
            "Ray Train runs it) over the main thread, both as glibc comes",
            in_thread,
            note=f"{said_thread}: of the main thread's memory glibc hands back more",
        ),
        Row.of_ratio(
            1,
            "what else Ray Train does differently: the same loop under torchrun, in a "
            "thread and with niceness 15, over the main thread with 0, as in row 14",
            nicely,
            note=said_nicely,
        ),
    ]


def by_torchrun(settings: dict, port: int) -> subprocess.Popen:
    return torchrun("serve", port, **settings)


def compare(a: Partner, b: Partner) -> tuple[Ratio, str]:
    """Return B's step over A's, and what the steps of either took."""
    before = {partner: partner.ask("usage") for partner in (a, b)}
    seconds = interleave(
        lambda: a.ask("steps")[0], lambda: b.ask("steps")[0], PAIRS, warm_up=0
    )
    said = []
    for partner, times in zip((a, b), seconds):
        used = np.subtract(partner.ask("usage"), before[partner]) / PAIRS / loop.STEPS
        said.append(
            f"{1e3 * np.median(times) / loop.STEPS:.0f} ms per step with {used[0]:,.0f} "
            f"page faults and {1e3 * used[1]:.0f} ms in the kernel"
        )
    return ratio(*seconds), f"{said[1]}, against {said[0]}"
