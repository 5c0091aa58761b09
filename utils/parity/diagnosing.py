"""One table of mistakes: what each is called, what is said, and how it is seen.

A diagnosis is a function of the records that returns its evidence, or nothing. The table is
in the order of cause and effect: what an earlier row explains, a later one leaves alone.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import averaging, content, held, items, noise
from .comparing import Case


class Finding(NamedTuple):
    """A mistake: a short name, what it is and how to mend it, and its evidence."""

    name: str
    sentence: str
    evidence: str


class Diagnosis(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the finding; several rows may have one name.
        sentence: what it is, and how to mend it.
        find: returns the evidence, or "".
        unless: names of findings that are its cause, or say the same.
        parts: whether it may be why N workers part from one process.
    """

    name: str
    sentence: str
    find: Callable[[Case], str]
    unless: tuple[str, ...] = ()
    parts: bool = True


_ITEMS = ("items", "same order", "global batch", "unequal batches")
_AVERAGING = ("not averaged", "summed", "divided twice")
BATCH_NORM = (
    "BatchNorm normalizes by the statistics of each rank's own share: use GroupNorm, or "
    "SyncBatchNorm on GPUs"
)
_SEED = "seed each rank differently once the weights are built, as in `wrap`"
_SUM = "gradients are summed over the ranks, not averaged: divide by the world size"

TABLE = [
    Diagnosis(
        "not finite",
        "a gradient or weight is infinite, or no number: is something divided by a "
        "number that may be 0, such as a count of items?",
        held.not_finite,
    ),
    Diagnosis(
        "nothing trained",
        "no optimizer takes a step, so there is nothing to compare: call "
        "`optimizer.step()`, or train until it is called (`--steps`)",
        held.no_update,
    ),
    Diagnosis(
        "nothing trained",
        "no step changes a weight, as no gradient is there when the optimizer steps: "
        "is the last backward kept from averaging (`set_requires_gradient_sync`), or "
        "everything frozen?",
        held.no_gradient,
        unless=("nothing trained",),
    ),
    Diagnosis(
        "nothing trained",
        "no step changes a weight: the optimizer was made before the wrap, whose "
        "parameters are new ones. Wrap first (or is the learning rate 0?)",
        held.other_parameters,
        unless=("nothing trained",),
    ),
    Diagnosis(
        "unequal batches",
        "ranks have unequal numbers of batches, so one waits for the others for ever: "
        "give all ranks equally many (`drop_last=True`)",
        items.unequal_steps,
    ),
    Diagnosis(
        "items",
        "an index means another item on another rank: make the same data set on all",
        items.odd_index,
    ),
    Diagnosis(
        "items",
        "all ranks draw the same batch: seed what chooses the items by the rank, or "
        "let all ranks draw the whole batch and take their share of it",
        items.equal_batches,
    ),
    Diagnosis(
        "global batch",
        "ranks cannot share the batch equally: choose a batch size, and a number of "
        "items, that every world size divides, or other world sizes (`--world-sizes`)",
        items.cannot_be_shared,
    ),
    Diagnosis(
        "global batch",
        "the global batch grows with the number of workers: divide the batch size by "
        "the world size, or compare with one process that has the larger batch",
        items.global_batch,
        unless=("items", "unequal batches", "global batch"),
    ),
    Diagnosis(
        "items",
        "every rank sees every item: deal with a DistributedSampler (rank, world size, "
        "equal seeds)",
        items.every_item,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "items",
        "items are seen twice: deal with a DistributedSampler (rank, world size, equal "
        "seeds); it repeats items to give all ranks equally many: `drop_last=True`",
        items.repeated_items,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "items",
        "items are seen twice or never: deal with a DistributedSampler (rank, world "
        "size, equal seeds)",
        items.badly_dealt,
        unless=("items", "global batch"),
    ),
    Diagnosis(
        "same order",
        "items come in the same order in every epoch: call `sampler.set_epoch(epoch)`",
        items.same_order,
        parts=False,
    ),
    Diagnosis(
        "other order",
        "each item is seen once, but in other steps than in one process: deal item i "
        "of a common order to rank i % N",
        items.other_order,
        unless=(*_ITEMS, "not finite"),
    ),
    Diagnosis(
        "start",
        "ranks differ before training: seed every rank equally before the model is "
        "built, or broadcast from rank 0",
        held.ranks_start_apart,
    ),
    Diagnosis(
        "start",
        "the start depends on the number of workers, or on chance: seed the generator "
        "in `build_model`",
        held.start_by_n,
        unless=("start",),
    ),
    Diagnosis(
        "not averaged",
        "gradients are not averaged over the ranks: each rank steps with its own (a "
        "wrap that is bypassed, or `no_sync` around the last backward?)",
        averaging.not_averaged,
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, made after the model was wrapped: wrap the "
        "model when it is complete",
        averaging.made_late,
        unless=("not averaged",),
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, frozen when the model was wrapped, and "
        "trained later: wrap the model when it is complete",
        averaging.trained_late,
        unless=("not averaged",),
    ),
    Diagnosis(
        "parameter not averaged",
        "no step averages some parameters, unused or forgotten in averaging: wrap the "
        "model when it is complete",
        averaging.forgotten,
        unless=("not averaged",),
    ),
    Diagnosis("summed", _SUM, averaging.summed),
    Diagnosis("summed", _SUM, averaging.clipped_and_summed, unless=("summed",)),
    Diagnosis(
        "divided twice",
        "gradients are divided by the world size once too often",
        averaging.divided_by_n,
    ),
    Diagnosis(
        "accumulation",
        "micro-batches are dropped: gradients are set to zero between the backward "
        "passes of one update",
        averaging.zeroed,
    ),
    Diagnosis(
        "accumulation",
        "micro-batches are dropped: a part of the batch never goes through the model",
        averaging.never_forwarded,
        unless=("accumulation",),
    ),
    Diagnosis(
        "accumulation",
        "the optimizer steps after another number of batches than in one process: does "
        "something count per rank?",
        averaging.updates_by_rank,
        unless=("accumulation",),
    ),
    Diagnosis(
        "clipping",
        "gradients are clipped after each micro-batch, when they are a rank's own "
        "still: clip once, after the last backward",
        averaging.clipped_early,
    ),
    Diagnosis(
        "clipping",
        "clipping counts per rank: clip when the gradients are averaged, by their norm "
        "over all ranks",
        averaging.clipped_alone,
        unless=("clipping",),
    ),
    Diagnosis(
        "divided twice",
        "gradients are divided by the world size once too often: DDP averages, so "
        "leave the loss as it is (and make it a mean over items, not a sum; with "
        "micro-batches, a mean over all of them)",
        content.divided_once_too_often,
        unless=("not finite", "divided twice", "accumulation", "start", *_ITEMS),
    ),
    Diagnosis(
        "divided twice",
        "most gradients are divided by the world size once too often: what is gathered "
        "from other ranks lets no gradient through; gather with gradients "
        "(`torch.distributed.nn.functional.all_gather`)",
        content.partly_divided,
        unless=("not finite", "divided twice", "accumulation", "start", *_ITEMS),
    ),
    Diagnosis(
        "unequal batches",
        "ranks count equally, whatever their batches hold: weight each loss by what it "
        "is a mean of (items, tokens, weights of classes), or drop what is uneven",
        content.counted_equally,
        unless=("not finite", "accumulation", "start", "items", "unequal batches"),
    ),
    Diagnosis(
        "modes",
        "ranks train in different modes, so one has no dropout, say: call "
        "`model.train()` on all of them after an evaluation",
        held.modes,
    ),
    Diagnosis(
        "batch statistics",
        BATCH_NORM,
        held.statistics_of_a_share,
    ),
    Diagnosis(
        "state",
        "what is held beside the model comes to differ between ranks (a teacher, an "
        "average of the weights, a centre): change it on all ranks, by the items of all",
        held.state_beside,
        unless=("start", *_AVERAGING),
    ),
    Diagnosis(
        "batch statistics",
        "a rank's gradient depends on which items share its batch, so no average of "
        "ranks is that of one process: a statistic of the batch, micro-batches or "
        "ranks whose loss is no mean over items, or what is gathered from the others",
        content.of_the_batch,
        unless=(
            "not finite",
            "start",
            "accumulation",
            "clipping",
            "items",
            "modes",
            "state",
            "divided twice",
            "not averaged",
            "parameter not averaged",
        ),
    ),
    Diagnosis(
        "schedule",
        "learning rates differ between ranks: step the scheduler on all of them",
        held.rates_of_ranks,
    ),
    Diagnosis(
        "schedule",
        "the learning rate depends on the world size: for the same global batch, one "
        "learning rate fits",
        held.rate_by_n,
        unless=("schedule",),
    ),
    Diagnosis(
        "schedule",
        "a scheduler counts per rank, or per world size: for the same global batch, "
        "one learning rate fits",
        held.schedule_by_n,
        unless=("schedule",),
    ),
    Diagnosis(
        "options",
        "an option of the optimizer depends on the world size, or on the rank: for the "
        "same global batch, one fits",
        held.other_option,
        unless=("schedule",),
    ),
    Diagnosis(
        "same noise",
        f"dropout, or other noise in the step, is the same on every rank: {_SEED}",
        noise.same_draws,
        parts=False,
    ),
    Diagnosis(
        "same noise",
        f"augmentation is the same on every rank: {_SEED}",
        noise.same_states,
        unless=("same noise",),
        parts=False,
    ),
    Diagnosis(
        "unseeded noise",
        "what is drawn is not seeded, so no run can be repeated: seed torch, random "
        "and NumPy in your functions",
        noise.unseeded,
        parts=False,
    ),
    Diagnosis(
        "buffers",
        "a buffer is computed from each rank's own items, and differs between ranks: "
        "average it, too",
        held.buffers_of_shares,
    ),
    Diagnosis(
        "buffers",
        "only some of the ranks change a buffer: do on all ranks what changes it",
        held.buffers_of_some,
    ),
    Diagnosis(
        "shards nothing",
        "the strategy claims to shard and does not: each rank holds the whole state",
        held.shards_nothing,
        parts=False,
    ),
    Diagnosis(
        "weights",
        "weights come to differ between ranks: does a rank do something that the "
        "others do not, or draw noise of its own for them?",
        held.weights_part_by_noise,
        unless=("not finite",),
    ),
]
# What is said of differing weights where nothing above explains them.
WEIGHTS = Diagnosis("weights", TABLE[-1].sentence, held.weights_part)
HARMLESS = {row.name for row in TABLE if not row.parts}


def diagnose(case: Case) -> list[Finding]:
    """Return all mistakes that the records of a number of workers show, causes first."""
    found: dict[str, Finding] = {}
    for row in TABLE:
        if found.keys() & set(row.unless) or row.name in found:
            continue
        if evidence := row.find(case):
            found[row.name] = Finding(row.name, row.sentence, evidence)
    unexplained = case.live.differs and not explains(case, found.values())
    if unexplained and (evidence := WEIGHTS.find(case)):
        found["weights"] = Finding("weights", WEIGHTS.sentence, evidence)
    return [*found.values()]


def explains(case: Case, findings: Iterable[Finding]) -> bool:
    """Return whether one of the findings may be why N workers differ from one process.

    Noise is the same in the runs that are compared, if it can be pinned. A first gradient
    comes before any update, so nothing of the optimizer has a part in it. And where ranks
    differ with BatchNorm frozen as well, it is not BatchNorm alone.
    """
    aside = {"shards nothing"} if case.loose else set(HARMLESS)
    if case.still.items_differ is not None:
        aside.discard("same order")
    at = case.live.differs
    if at and at.point == 0 and at.update is not None:
        aside |= {"schedule", "options", "state", "weights"}
    by_norm = case.still is not case.live and case.still.differs
    return any(
        finding.name not in aside and not (by_norm and finding.sentence == BATCH_NORM)
        for finding in findings
    )
