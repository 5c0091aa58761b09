"""The verdict in words: equal, or where not, or that it cannot be judged."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .averaging import labels_of, level_of
from .comparing import LATER, ROUNDED, Case
from .content import other_state
from .diagnosing import HARMLESS, Finding, diagnose, explains
from .groups import Failure
from .recording import Record, Records
from .sketches import apart, relative

EQUAL, DIFFERS, UNJUDGED = "equal", "differs", "cannot be judged"
LOW = 0.03  # what bfloat16 or float16 may cost


@dataclass
class Report:
    """What `check` found; as text, a few lines.

    Attributes:
        verdicts: for each number of workers: "equal" to one process, "differs", or
            "cannot be judged".
        findings: mistakes, each once; there may be some although N workers equal one.
        lines: how near the runs are, and bytes of state per rank.
        expected: names of findings that the training knows of.
    """

    verdicts: dict[int, str]
    findings: list[Finding]
    lines: list[str]
    expected: frozenset[str] = frozenset()

    @property
    def equal(self) -> dict[int, bool]:
        """Return whether N workers equal one process, for each N."""
        return {n: verdict == EQUAL for n, verdict in self.verdicts.items()}

    @property
    def ok(self) -> bool:
        """Say whether all are equal and nothing was found, but for what is expected."""
        known = set(self.names) <= self.expected
        parts = set(self.names) - HARMLESS
        as_known = known and parts and UNJUDGED not in self.verdicts.values()
        return known and (all(self.equal.values()) or bool(as_known))

    @property
    def status(self) -> int:
        """Return the command's status: 0 if ok, 1 for a mistake, 3 if nobody knows."""
        if self.ok:
            return 0
        unknown = set(self.names) <= self.expected
        unknown &= DIFFERS not in self.verdicts.values()
        return 3 if unknown else 1

    @property
    def names(self) -> list[str]:
        """Return the names of the findings."""
        return [finding.name for finding in self.findings]

    def as_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(
            {
                "ok": self.ok,
                "verdicts": self.verdicts,
                "findings": [finding._asdict() for finding in self.findings],
                "lines": self.lines,
            },
            indent=2,
        )

    def __str__(self) -> str:
        found = [
            ("Expected: " if f.name in self.expected else "Looks like: ")
            + f"{f.sentence}\n  Evidence: {f.evidence}"
            for f in self.findings
        ]
        return "\n".join([*self.lines, *found])


def _float32(case: Case) -> tuple[float, float]:
    """Return how far first gradients and last weights are apart in float32."""
    if "float32" not in case.alone:
        return 0.0, 0.0
    one = case.alone["float32"]
    ranks = [runs["float32"] for runs in case.together]
    pairs = [(r.updates[0], one.updates[0]) for r in ranks if r.updates and one.updates]
    first = max((relative(a.gradients, b.gradients) for a, b in pairs), default=0.0)
    steps = [r.steps[-1].parameters for r in ranks if r.steps]
    return first, max((relative(s, one.steps[-1].parameters) for s in steps), default=0)


def _equal_lines(case: Case) -> list[str]:
    """Return how near the runs are, and what is odd all the same."""
    pair, type_of = case.live, "float32" if "shaken" in case.alone else "float64"
    pairs = [
        (rank, ours, theirs)
        for rank, points in zip(pair.ranks, pair.of_ranks)
        for ours, theirs in zip(points, pair.points)
    ]
    gradients = [
        apart(a.gradients, b.gradients)[0]
        for _, ours, theirs in pairs
        for a, b in zip(ours.updates, theirs.updates)
    ]
    weights = [
        apart(rank.steps[a.last].parameters, pair.one.steps[b.last].parameters)[0]
        for rank, a, b in pairs
    ]
    steps, epochs = len(pair.one.steps), len(pair.one.orders)
    what = f"in {steps} steps of {epochs} epochs in {type_of}"
    apart_by = f"weights are at most {max(weights, default=0):.0e} apart"
    if not pair.unlike:
        first = f"gradients are at most {max(gradients, default=0):.0e} apart"
        apart_by = f"{first}, weights {max(weights, default=0):.0e}"
    lines = [f"{case.n} workers train like one process: {what}, {apart_by}."]
    for at in [*pair.unlike.values()][:1]:
        lines.append(
            f"  Gradients differ at {at}, and what the optimizer makes of "
            "them does not: it averages or scales them itself."
        )
    if pair.reordered:
        lines.append(
            f"  Buffer `{pair.reordered}` has the same rows in another order, and no "
            "weight is different for it."
        )
    if "shaken" in case.alone:
        lines.append(
            "  It does not run in float64, so a mistake smaller than the rounding of "
            "float32 would not be seen."
        )
    elif "float32" in case.alone:
        first32, last32 = _float32(case)
        first = "" if pair.unlike else f"the first gradients are {first32:.0e} apart, "
        why = "only rounding" if last32 < LOW else "rounding, which training magnifies"
        lines.append(f"  In float32, {first}the last weights {last32:.0e}: {why}.")
    return lines


def _doubt(case: Case) -> str:
    """Return why ranks may differ although nothing is wrong; "" if there is no reason."""
    size = case.live.differs.size if case.live.differs else 0.0
    if case.rounds and size < (ROUNDED if case.rounds == ["float32"] else LOW):
        return f"it computes in {' and '.join(case.rounds)}, also here"
    if case.loose:
        return (
            "it draws random numbers that belong to no item that is known. Say `PARITY = "
            '{"shared_noise": True}` in its file if all ranks are to draw the same, '
            '`{"items": 1}` if items are the second dimension, or try without'
        )
    if not case.identified and any(r.drew for r in [case.one, *case.ranks]):
        return (
            "its batches are drawn by chance, and are none of one process'. Let each "
            "rank take its share of what one process draws"
        )
    if not case.identified:
        return (
            'nobody can tell which items its batches hold. Say `PARITY = {"items": 1}` in '
            "its file if they are the second dimension"
        )
    return ""


def judge_case(case: Case) -> tuple[str, list[str], list[Finding]]:
    """Return the verdict on one number of workers, lines that say so, and findings."""
    found = diagnose(case)
    workers, at = f"{case.n} workers", case.live.differs
    first32 = _float32(case)[0]
    if not at and not case.live.unlike and first32 > LOW:
        line = f"{workers} train like one process in float64, but not in float32"
        evidence = f"the first gradients are {first32:.0e} apart in float32"
        what = "a branch that depends on the type, or numbers that float32 cannot hold"
        return DIFFERS, [f"{line}."], [*found, Finding("unknown", what, evidence)]
    if not case.live.points:
        return UNJUDGED, [f"{workers} cannot be judged: no step was recorded."], found
    if not at and case.live.tolerance(len(case.live.points) - 1) > LOW:
        line = f"{workers} cannot be judged: float32 alone moves one process as far"
        return UNJUDGED, [f"{line} as a mistake would."], found
    if not at:
        return EQUAL, _equal_lines(case), found
    if not explains(case, found):
        if doubt := _doubt(case):
            line = f"{workers} cannot be judged: they part at {at}, and {doubt}."
            return UNJUDGED, [line], found
        found.append(_unknown(case))
    line = f"{workers} do not train like one process. First at {at}."
    return DIFFERS, [line], found


def _unknown(case: Case) -> Finding:
    """Return what is left to say, and what was ruled out."""
    at = case.still.differs
    updates = [*zip(*(rank.updates for rank in case.ranks))]
    labels = [
        {*labels_of(list(each), level_of(list(each))).values()} for each in updates
    ]
    pairs = [
        (u.rates, one.rates) for us, one in zip(updates, case.one.updates) for u in us
    ]
    out = {
        "other items": case.still.same_items(at.point if at else 0),
        "averaging": bool(labels) and all(each == {"mean"} for each in labels),
        "the learning rate": bool(pairs) and all(a == b for a, b in pairs),
    }
    ruled_out = ", ".join(what for what, is_out in out.items() if is_out) or "nothing"
    sentence = f"it differs, cause unknown. Ruled out: {ruled_out}"
    alone = other_state(case)
    if alone:
        sentence += (
            "; what a rank computes depends on something beside weights and batch"
        )
    return Finding("unknown", sentence, alone or str(case.live.differs))


def failed(failure: Failure, n: int) -> Finding:
    """Return what is said of ranks that ended before their time."""
    if "Expected to have finished reduction" in failure.sentence:
        said = failure.sentence.partition(" in the prior iteration")[0]
        pattern = r"did not receive grad for rank \d+: ([\d ]+)"
        which = re.search(pattern, failure.sentence)
        return Finding(
            "parameter not averaged",
            "DDP waits for the gradient of a parameter that gets none: it is unused, "
            "or was frozen after the wrap. Freeze before you wrap; "
            "`find_unused_parameters=True` if it is unused in some steps",
            said + (f"; numbers {which[1].strip()} of `parameters()`" if which else ""),
        )
    if failure.kind == "hangs":
        sentence = (
            "a rank hangs: do all ranks call the same collectives, equally often?"
        )
        return Finding("hangs", sentence, failure.sentence)
    return Finding("fails", f"with {n} workers a rank fails", failure.sentence)


def bytes_line(sizes: dict[int, Iterable[int]]) -> str:
    """Return the bytes of state per rank, by the number of workers."""
    said = []
    for n, each in sizes.items():
        where = "in one process" if n == 1 else f"on {n}"
        said.append(f"{' and '.join(f'{s:,}' for s in dict.fromkeys(each))} {where}")
    return f"Bytes of state per rank: {', '.join(said)}."


def cut_line(one: Record) -> list[str]:
    """Return how much of each epoch was trained, if it was not all."""
    if one.whole and [*map(len, one.orders)] == [*map(len, one.contents)]:
        return []
    return [
        f"Trained were the first {max(map(len, one.contents))} steps of each epoch."
    ]


def judge(alone: Record, together: Records) -> Report:
    """Make a report of what `record` returned, for what has a launcher of its own.

    Seeds of noise are not judged: `record` takes noise out.

    Args:
        alone: of one process.
        together: of all ranks, by rank.
    """
    case = Case({"float64": alone}, [{"float64": each} for each in together])
    verdict, lines, found = judge_case(case)
    return Report({case.n: verdict}, found, lines, alone.expected)


assert LATER < ROUNDED < LOW
