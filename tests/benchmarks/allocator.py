"""What it is worth that ranks keep the memory they freed, and who does so anyway."""

import numpy as np

from tests.benchmarks import loop
from tests.benchmarks.partners import AS_IT_COMES, Partner, torchrun
from tests.benchmarks.ratios import Ratio, interleave, ratio
from tests.benchmarks.rows import Row

PAIRS = 24


def rows() -> list[Row]:
    """Row 14 of the table, and the reason of row 1."""
    kept = Partner(lambda port: torchrun("serve", port))
    plain = Partner(lambda port: torchrun("serve", port, **AS_IT_COMES))
    thread = Partner(lambda port: torchrun("serve-in-a-thread", port, **AS_IT_COMES))
    partners = kept, plain, thread
    losses = [partner.ask("steps")[1] for partner in partners]
    assert losses[0] == losses[1] == losses[2], "not the same training"
    with_kept, said_kept = compare(plain, kept)
    in_thread, said_thread = compare(plain, thread)
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
        Row(
            1,
            "why it was 0.90 before row 14: the same loop under torchrun, in a thread (as "
            "Ray Train runs it) over the main thread, both as glibc comes",
            "printed",
            f"{in_thread.value:.3g}",
            f"{in_thread.low:.3g} to {in_thread.high:.3g}",
            f"{1 / in_thread.spread:.3g} to {in_thread.spread:.3g}",
            note=f"{said_thread}: glibc trims the heap of the main thread after every "
            "step, and hardly those of others",
        ),
    ]


def compare(a: Partner, b: Partner) -> tuple[Ratio, str]:
    """B's step over A's, and what the steps of either took."""
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
