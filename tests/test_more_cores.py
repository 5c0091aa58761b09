"""Lessons that start a Ray of their own, on a machine with more cores than workers need."""

import re

import pytest

from tests.tools import notebooks
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, execute

CORES = 16
LESSONS = [
    path
    for path in notebooks.all_notebooks()
    if path.parent.name.startswith("02")  # in part 03 Ray only starts the workers
    and re.search(r"start_ray\((\W|\\n)*num_workers", path.read_text())
]


@pytest.mark.weekly
@pytest.mark.ray
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_where_there_are_more_cores(path, tmp_path):
    """Ray gets a CPU for each core: what a lesson says has to wait must wait there, too."""
    code = f"import os\nos.sched_getaffinity = lambda pid: set(range({CORES}))\n"
    (tmp_path / "sitecustomize.py").write_text(code)  # for the kernel and Ray's workers
    execute(path, RECORDING_ENVIRONMENT | {"PYTHONPATH": str(tmp_path)})
