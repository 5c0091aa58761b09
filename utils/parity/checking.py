"""Train with one process and with several, and say whether they are equal."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from .comparing import Case
from .content import needs_a_share_alone
from .diagnosing import HARMLESS, TABLE
from .groups import Failure, Job, train_group
from .recording import Run
from .reporting import (
    DIFFERS,
    Report,
    bytes_line,
    cut_line,
    failed,
    judge_case,
)
from .restarts import restart
from .training import BadInput, Payload, Training, payload

HINTS = {  # by a pattern of what torch says of a training that the tool cannot run
    "SyncBatchNorm": "It needs GPUs, and this tool trains on CPUs: leave it out here.",
    r"NVIDIA driver|CUDA (GPU|is not|error)|not compiled with CUDA": "This tool trains on "
    "CPUs: take the device from the model, `next(model.parameters()).device`.",
    r"(?i)\bfloat\b.*\bdouble\b|\bdouble\b.*\bfloat\b": "The tool also trains in float64: "
    "take the type from the batch, or from the model.",
    "init_process_group": "The tool has made the process group already: leave it out here.",
}


def _fails_alone(failure: Failure) -> BadInput:
    hints = (hint for said, hint in HINTS.items() if re.search(said, failure.sentence))
    return BadInput(
        f"One process alone cannot train here: {failure.sentence}. "
        + next(hints, "Mend that first.")
    )


def _judge(
    place: int,
    job: Job,
    groups: dict[int, Any],
    world_sizes: Iterable[int],
    limit: float,
) -> Report:
    """Make a report of one of the trainings of a job: by number of workers, and rank."""
    alone = groups[1][0][place]
    report = Report({}, [], [], alone["float64"].expected)
    sizes: dict[int, Iterable[int]] = {1: [alone["float64"].state_bytes]}
    for n in world_sizes:
        if n not in groups:
            report.lines.append(f"{n} workers were not tried, as fewer of them hang.")
            continue
        if isinstance(groups[n], Failure):
            report.verdicts[n] = DIFFERS
            report.lines.append(
                f"{n} workers do not train like one process: they fail."
            )
            found = [failed(groups[n], n)]
        else:
            together = [runs[place] for runs in groups[n]]
            case = Case(alone, together)
            if steps := needs_a_share_alone(case):
                case = _with_shares(case, job, place, steps[0], limit)
            report.verdicts[n], lines, found = judge_case(case)
            report.lines += lines
            sizes[n] = [runs["float64"].state_bytes for runs in together]
        known = set(report.names)
        report.findings += [each for each in found if each.name not in known]
    report.lines.append(bytes_line(sizes))
    report.lines += cut_line(alone["float64"])
    if set(report.names) - HARMLESS - {"unknown"} - report.expected:
        # known with other numbers of workers
        report.findings = [f for f in report.findings if f.name != "unknown"]
    return report


def _with_shares(case: Case, job: Job, place: int, step: int, limit: float) -> Case:
    """Return the same case with what one process makes of each rank's batch."""
    run = replace(job.run, freeze="frozen" in case.alone)
    swaps = {
        f"the batch of rank {rank}": replace(run, swap=(rank, case.n, step))
        for rank in range(case.n)
    }
    found = train_group(Job([job.payloads[place]], run, swaps), 1, limit)
    if isinstance(found, Failure):
        return case
    return Case(case.alone, case.together, [*found[0][0].values()])


def _train_alone(payloads: list[Payload], run: Run, timeout: float):
    """Train in one process: in float64, or in float32 where there is no other way."""
    first = None
    for dtype in (torch.float64, torch.float32):
        job = Job(payloads, replace(run, dtype=dtype))
        group = train_group(job, 1, timeout)
        if not isinstance(group, Failure) or group.kind != "raised":
            return job, group
        if "(float64)" not in group.sentence:
            return job, first or group
        first = first or group
    return job, first


def check_all(
    trainings: dict[str, Training | str | Path],
    world_sizes: Iterable[int] = (2, 3),
    epochs: int = 2,
    steps: int = 20,
    timeout: float = 300,
    device: str = "cpu",
) -> dict[str, Report]:
    """Judge several trainings in one start of processes per world size; as `check`.

    A training that fails fails the others: give those that may to `check`.
    """
    world_sizes = tuple(world_sizes)
    payloads = [payload(training) for training in trainings.values()]
    run = Run(epochs=epochs, limit=steps, device=device)
    job, alone = _train_alone(payloads, run, timeout)
    if isinstance(alone, Failure):
        if alone.kind == "bad":
            raise BadInput(alone.sentence)
        if failed(alone, 1).name == "parameter not averaged":
            line = "One process alone fails: so would any number."
            report = Report({1: DIFFERS}, [failed(alone, 1)], [line])
            return dict.fromkeys(trainings, report)
        raise _fails_alone(alone)
    known = {row.name for row in TABLE} | {"unknown", "not saved", "fails", "hangs"}
    for runs in alone[0]:
        if unknown := sorted(runs["float64"].expected - known):
            raise BadInput(
                f"Nothing is called {', '.join(unknown)}, which is expected."
            )
    groups: dict[int, Any] = {1: alone}
    for n in world_sizes:
        groups[n] = train_group(job, n, timeout)
        if isinstance(groups[n], Failure):
            if groups[n].kind == "bad":
                raise BadInput(groups[n].sentence)
            if groups[n].kind == "hangs":  # it would again
                break
    reports = {
        name: _judge(place, job, groups, world_sizes, timeout)
        for place, name in enumerate(trainings)
    }
    for place, report in enumerate(reports.values()):
        if not groups[1][0][place]["float64"].restarts:
            continue
        if not all(report.equal.values()):
            report.lines.append("No restart was tried, as not all N equal one process.")
        else:
            one = Job([job.payloads[place]], job.run)
            these = {
                n: [[runs[place]] for runs in group] for n, group in groups.items()
            }
            lines, found = restart(one, these, timeout)
            report.lines += lines
            report.findings += found
    return reports


def check(
    training: Training | str | Path,
    world_sizes: Iterable[int] = (2, 3),
    epochs: int = 2,
    steps: int = 20,
    timeout: float = 300,
    device: str = "cpu",
) -> Report:
    """Train with one process and with several, and say whether they are equal.

    Args:
        training: the functions, or the path of a file that defines them.
        world_sizes: numbers of workers, each from 2 on.
        epochs: how many are trained; two show whether the order of items changes.
        steps: the most updates that are trained in an epoch.
        timeout: seconds after which ranks of which none begins a step are said to hang.
        device: "cpu", with gloo, or "cuda", with NCCL and a GPU for each worker.

    Raises:
        BadInput: the training cannot be used, or fails in one process already.
    """
    world_sizes = tuple(world_sizes)
    if epochs < 1 or steps < 1 or min(world_sizes, default=1) < 2:
        raise BadInput("World sizes begin at 2, and epochs and steps at 1.")
    if device == "cuda" and torch.cuda.device_count() < max(world_sizes):
        raise BadInput(
            f"{max(world_sizes)} workers on GPUs need as many of them, and torch sees "
            f"{torch.cuda.device_count()}: choose other world sizes, or the CPU."
        )
    return check_all({"": training}, world_sizes, epochs, steps, timeout, device)[""]
