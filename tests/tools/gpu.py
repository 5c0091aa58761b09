"""`make gpu`: run scripts and notebooks on the GPUs of this machine, in full mode.

What fails does not end the run. A table in Markdown, to be pasted into a question, is
printed and written to build/gpu.md.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from tests import scripts
from tests.tools import notebooks
from tests.tools.notebooks.execution import execute

FULL = {"WORKSHOP_MODE": "full", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
FSDP = scripts.ROOT / "03-fsdp-deepspeed"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
HEAD = "| on {} | | seconds | last line, or what was proved |\n|---|---|--:|---|\n"


def commands(gpus: int) -> dict[str, tuple]:
    """Return arguments of Python: the scripts under torchrun and Ray, with all GPUs."""
    with_data = scripts.TRAIN_RAY_DDP_WITH_RAY_DATA
    found = {
        "doctor": ("-m", "utils.doctor"),
        "train_ddp.py, torchrun": (*TORCHRUN, gpus, scripts.TRAIN_DDP),
        "train_ray_ddp.py, Ray": (scripts.TRAIN_RAY_DDP,),
        "train_ray_ddp_with_ray_data.py, Ray": (with_data, "--data-size-gb", 0.5),
    }
    for name in ("train_fsdp2.py", "train_deepspeed.py"):
        steps = FSDP / name, "--steps", 50
        found[f"{name}, torchrun"] = (*TORCHRUN, gpus, *steps)
        found[f"{name}, Ray"] = (*steps, "--num-workers", gpus)
    return found


def run_command(*arguments: object) -> str:
    """Run Python in full mode; return the last line that it prints.

    Raises:
        RuntimeError: it ends with another status than 0; says its last line.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=scripts.ROOT,
        env=scripts.environment() | FULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {last}")
    return last


def run_notebook(path: Path) -> str:
    """Execute a copy in full mode; return what it proved."""
    executed = execute(path, FULL, cell_timeout=3600)
    return "; ".join(notebooks.proofs(executed))


def run(steps: dict[str, Callable[[], str]], machine: str, file: Path) -> int:
    """Take the steps in order, write the table after each; 1 if one failed."""
    failed = 0
    table = HEAD.format(machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, step in steps.items():
        start = time.monotonic()
        try:
            state, result = "pass", step()
        except Exception as error:
            state, result, failed = "FAIL", f"{type(error).__name__}: {error}", 1
        seconds = time.monotonic() - start
        print(f"{state}  {seconds:5.0f} s  {name}", flush=True)
        cell = " ".join(result.replace("|", "/").split())
        table += f"| {name} | {state} | {seconds:.0f} | {cell} |\n"
        file.write_text(table)
    print(f"\n{table}")
    return failed


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(
            "There is no GPU that torch can use here: `make doctor` says what it sees."
        )
        return 1
    gpus = torch.cuda.device_count()
    versions = [f"{n} {metadata.version(n)}" for n in ("torch", "ray", "deepspeed")]
    machine = f"{gpus} {torch.cuda.get_device_name()}, {', '.join(versions)}"
    print(
        "Scripts have to end well, and asserts to hold. Recorded outputs are of CPUs,"
    )
    print("and are not compared.")
    steps: dict[str, Callable[[], str]] = {}
    for name, arguments in commands(gpus).items():
        steps[name] = partial(run_command, *arguments)
    for path in notebooks.all_notebooks():
        steps[str(path.relative_to(scripts.ROOT))] = partial(run_notebook, path)
    return run(steps, machine, scripts.ROOT / "build" / "gpu.md")


if __name__ == "__main__":
    sys.exit(main())
