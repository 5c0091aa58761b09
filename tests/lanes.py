"""Two lanes of tests side by side (a plugin of pytest-xdist): what starts Ray is in one.

Much of a test's time goes into waiting for processes, and another test can use it. But two
Rays would take each other's ports, so one lane has all of them, one after another.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Too much rather than too little: a file that only names one of these waits for its turn.
STARTS_RAY = re.compile(
    r"start_ray\(|nodes\.start\(|Cluster\(|TRAIN_RAY|train_ray_ddp|--num-workers|doctor"
)
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


@cache
def starts_ray(path: Path) -> bool:
    """Whether a file of tests, or a notebook, may start one on this machine."""
    if path.name in ELSEWHERE | STARTS_NONE:
        return False
    return bool(STARTS_RAY.search(path.read_text()))


class Lanes(LoadScopeScheduling):
    """A lane for Ray, and for each other file one; the longest comes first."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "Ray" if starts_ray(self.config.rootpath / path) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Lanes(config, log)
