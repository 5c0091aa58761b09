"""`make gpu`: everything on the GPUs of this machine, and a table of what it did.

A step that fails does not end the run. The table is Markdown, to be pasted into a question;
it is also written to build/gpu.md.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tests import scripts
from tests.tools import notebooks

FULL = {"WORKSHOP_MODE": "full", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
FSDP = scripts.ROOT / "03-fsdp-deepspeed"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
# What the formulas leave out on a GPU: buffers that its allocator rounds up.
ROUNDED = 0.02


class Skip(Exception):
    """What a step needs is not on this machine; says what."""


class Step(NamedTuple):
    """A name, and what does it: returns what it measured, in a line."""

    name: str
    run: Callable[[], str]


class Result(NamedTuple):
    """state: "pass", "FAIL" or "skip"."""

    name: str
    state: str
    seconds: float
    measured: str


def take(step: Step) -> Result:
    """Run a step to its end, whatever happens in it."""
    start = time.monotonic()
    try:
        state, said = "pass", step.run()
    except Skip as reason:
        state, said = "skip", str(reason)
    except Exception as error:
        state = "FAIL"
        said = f"{type(error).__name__}: {error}"
    return Result(step.name, state, time.monotonic() - start, said)


def table(results: Iterable[Result], machine: dict[str, str]) -> str:
    """Return Markdown: on what it ran, and a row for each step."""

    def cell(text: str) -> str:
        return " ".join(text.replace("|", "/").split())

    lines = ["| on | |", "|---|---|"]
    lines += [f"| {name} | {cell(value)} |" for name, value in machine.items()]
    lines += ["", "| step | | seconds | what it measured |", "|---|---|--:|---|"]
    lines += [f"| {r[0]} | {r[1]} | {r[2]:.0f} | {cell(r[3])} |" for r in results]
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """Return GPUs, driver and versions."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    try:
        query += ["--format=csv,noheader"]
        said = subprocess.check_output(query, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        count = torch.cuda.device_count()
        said = "\n".join(torch.cuda.get_device_name(i) for i in range(count))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    names = ("torch", "ray", "deepspeed")
    versions = [f"{name} {metadata.version(name)}" for name in names]
    versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    return {"GPUs, memory, driver": "; ".join(said.splitlines())} | {
        "versions": ", ".join([*versions, f"Python {sys.version.split()[0]}"])
    }


def command(*arguments) -> str:
    """Run Python on them in full mode; return the last line that it prints.

    Raises:
        RuntimeError: it ends with another status than 0; says its last line of errors.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=scripts.ROOT,
        env=scripts.environment() | FULL,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"status {done.returncode}: {(lines or ['no output'])[-1]}")
    return (done.stdout.strip().splitlines() or ["no output"])[-1]


def notebook(path: Path) -> str:
    """Execute a copy in full mode; return what it proved."""
    from tests.tools.notebooks.execution import execute

    proved = notebooks.proofs(execute(path, FULL))
    return f"{len(proved)} proofs: {'; '.join(proved)}" if proved else "no proofs"


def alone(function: Callable[[], str]) -> str:
    """Call it in a process of its own, which gives its memory on the GPU back."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(function).result()


def speed() -> str:
    """Compare naive with tuned, and say what share of the GPU's arithmetic tuned uses."""
    from tests.tools.benchmarks.steps import gpt2_on_gpu

    rows = gpt2_on_gpu()
    said = [
        f"{r.what}: {r.value} ({r.interval}), bar {r.bar} {r.verdict}" for r in rows
    ]
    return (
        "; ".join(said) if len(rows) > 1 else f"{said[0]}; the GPU's peak is not known"
    )


def memory(device: str = "cuda", shape=None, texts: int = 1) -> str:
    """Measure a step's state on a device beside the formula, and the step's peak.

    Raises:
        AssertionError: the allocator counts other bytes than the formula.
    """
    import torch
    from torch.nn import functional as F

    from utils import memory
    from utils.models import GPT, GPT2_124M

    shape, place = shape or GPT2_124M, torch.device(device)
    tokens = torch.zeros(texts, shape.block_size, dtype=torch.long, device=place)
    with memory.follow_memory(place) as followed:
        model = GPT(shape).to(place)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
        del loss
        held = followed.live
    parameters = sum(p.numel() for p in model.parameters())
    formula = memory.predict(parameters, 1, 0).total
    said = f"{held / 1e9:.3f} GB held, {formula / 1e9:.3f} by the formula"
    assert abs(held / formula - 1) < ROUNDED, said
    return f"{said}, {followed.peak / 1e9:.3f} at the peak of a step"


def script_steps(gpus: int) -> list[Step]:
    """Return the scripts to take away, under torchrun and Ray, with all GPUs."""
    with_data = scripts.TRAIN_RAY_DDP_WITH_RAY_DATA
    commands = {
        "train_ddp.py, torchrun": (*TORCHRUN, gpus, scripts.TRAIN_DDP),
        "train_ray_ddp.py, Ray": (scripts.TRAIN_RAY_DDP,),
        "train_ray_ddp_with_ray_data.py, Ray": (with_data, "--data-size-gb", 0.5),
    }
    for name in ("train_fsdp2.py", "train_deepspeed.py"):
        steps = FSDP / name, "--steps", 50
        commands[f"{name}, torchrun"] = (*TORCHRUN, gpus, *steps)
        commands[f"{name}, Ray"] = (*steps, "--num-workers", gpus)
    return [Step(name, partial(command, *each)) for name, each in commands.items()]


def steps(gpus: int) -> list[Step]:
    """Return all steps, the shortest first."""
    books = [
        Step(str(path.relative_to(scripts.ROOT)), partial(notebook, path))
        for path in notebooks.all_notebooks()
    ]
    return [
        Step("doctor", lambda: command("-m", "utils.doctor")),
        Step("memory beside the formula", lambda: alone(memory)),
        Step("naive against tuned", lambda: alone(speed)),
        *script_steps(gpus),
        *books,
    ]


def run(chosen: list[Step], on: dict[str, str], file: Path) -> int:
    """Take the steps in order, write the table after each; 1 if one failed."""
    results = []
    for step in chosen:
        results.append(take(step))
        print(
            f"{results[-1].state}  {results[-1].seconds:5.0f} s  {step.name}",
            flush=True,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            table(results, on) + "\n"
        )  # nothing is lost if the run is ended
    print(f"\n{file.read_text()}")
    return int(any(result.state == "FAIL" for result in results))


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(
            "There is no GPU that torch can use here: `make doctor` says what it sees."
        )
        return 1
    os.environ.update(FULL)
    found = steps(torch.cuda.device_count())
    return run(found, machine(), scripts.ROOT / "build" / "gpu.md")


if __name__ == "__main__":
    sys.exit(main())
