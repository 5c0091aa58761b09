"""The take-away scripts of the numbered folders, as paths and as modules."""

import contextlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import psutil

ROOT = Path(__file__).parent.parent
TRAIN_DDP = ROOT / "01-ddp-pytorch-only" / "train_ddp.py"
LAUNCH_MULTINODE = ROOT / "01-ddp-pytorch-only" / "launch_multinode_ddp.sh"
TRAIN_RAY_DDP = ROOT / "02-ddp-pytorch-ray" / "train_ray_ddp.py"
TRAIN_RAY_DDP_WITH_RAY_DATA = TRAIN_RAY_DDP.with_name("train_ray_ddp_with_ray_data.py")


def environment() -> dict[str, str]:
    """Return a reader's: without the settings of Ray that utils.cluster has made here.

    What stays is where Ray keeps its files (tests/lanes.py).
    """
    ours = {n for n in os.environ if n.startswith("RAY_")} - {"RAY_TMPDIR"}
    return {n: value for n, value in os.environ.items() if n not in ours}


def load(path: Path) -> ModuleType:
    """Import a script without running it: its folder's name is no package name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workers_of_ray(driver: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a driver's training workers.

    Not what they start, which has their title until it is another program: killed, none of
    the workers is gone.
    """

    def is_worker(process: psutil.Process) -> bool:
        return "RayTrainWorker" in " ".join(process.cmdline())

    found = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_worker(process) and not is_worker(process.parent()):
                found.append(process)
    return found
