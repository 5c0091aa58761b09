"""Two lanes of tests side by side (a plugin of pytest-xdist): what starts Ray is in one.

Much of a test's time goes into waiting for processes, and another test can use it. But two
Rays would take each other's ports, so one lane has all of them, one after another.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# A file that only names one of these waits for its turn, too: no two Rays at once.
STARTS_RAY = re.compile(
    r"start_ray\(|nodes\.start\(|Cluster\(|TRAIN_RAY|train_ray_ddp|--num-workers|doctor"
)
NAMES_RAY = re.compile(r"(?<![a-z])ray(?![a-z])", re.IGNORECASE)
ELSEWHERE = {"test_nodes.py"}  # its Rays are on machines of their own
STARTS_NONE = {  # the pattern is in them, as a text or a name
    *("test_benchmarks.py", "test_environment.py", "test_gpu.py", "test_manifests.py"),
    *(
        "test_mistakes.py",
        "test_notebooks.py",
        "test_project_files.py",
        "test_setup.py",
    ),
    *("test_scripts_agree.py", "test_scripts_bad_input.py", "test_tiers.py"),
    "test_training_scripts.py",
}
SOME_START_RAY = {  # those tests of them that have it in their names
    *("test_full_disk.py", "test_processes.py", "test_sharding_checkpoints.py"),
}


@cache
def starts_ray(path: Path) -> bool:
    """Whether a file of tests, or a notebook, may start one on this machine."""
    if path.name in ELSEWHERE | STARTS_NONE:
        return False
    return bool(STARTS_RAY.search(path.read_text()))


class Lanes(LoadScopeScheduling):
    """A lane for Ray, and for each other file one; the longest comes first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        path = self.config.rootpath / file
        waits = (
            NAMES_RAY.search(test) if path.name in SOME_START_RAY else starts_ray(path)
        )
        return "Ray" if waits else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Lanes(config, log)
