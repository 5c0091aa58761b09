"""Two lanes of tests side by side (a plugin of pytest-xdist): what starts Ray is in one.

Much of a test's time goes into waiting for processes, and another test can use it. But two
Rays would take each other's ports, so all that starts one has the mark
`xdist_group("ray")`: one lane runs these, one after another. Each other file is a group of
its own, as its tests share fixtures or a kernel. Rays on machines of their own
(tests/machines.py) do not count.

Not xdist's own `--dist loadgroup`: with pytest 9.2 it ignores the marks (xdist 3.8 writes
the group into `item._nodeid`, which nothing reads any more), and where it works a test is
called `name@group` from then on, in the cache too, so that `--lf` finds none that failed.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from nbval.plugin import IPyNbFile
from xdist.scheduler import LoadScopeScheduling

RAY = "ray"
GROUPS = "groups.json"  # written by each worker
RAYS = pytest.StashKey[set[Path]]()  # those that were there before a test
# Of the notebooks beside part 02; a notebook has no marks of its own.
WITH_RAY = {
    "02_fsdp2.ipynb",
    "03_deepspeed_zero.ipynb",
    "05_choosing_a_strategy.ipynb",
    "06_move_your_own_training.ipynb",
}
SENTENCE = (
    "It starts a Ray outside of the lane for those, where two would take each other's "
    'ports: mark it with `@pytest.mark.xdist_group("ray")`, or name its notebook in '
    "tests/lanes.py."
)


def pytest_configure(config):
    """Give the Rays of this process a folder; nobody else's are noted there.

    Ray's path of a socket has to be short, so it is not pytest's.
    """
    if hasattr(config, "workerinput"):
        folder = os.path.join(os.environ["RAY_TMPDIR"], config.workerinput["workerid"])
        os.makedirs(folder)
    else:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder


def pytest_terminal_summary(terminalreporter, exitstatus):
    """Keep the logs of Ray if something failed, and say where they are."""
    folder = Path(os.environ["RAY_TMPDIR"])
    if exitstatus and any([*folder.glob("ray"), *folder.glob("*/ray")]):
        terminalreporter.write_line(f"Logs of Ray: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def started_rays() -> set[Path]:
    """Return the folders of the Rays that this process and those below it have started."""
    return set(Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*"))


def group(item: pytest.Item) -> str:
    """Return the group of a test or cell: its mark's, or that of its file."""
    if mark := item.get_closest_marker("xdist_group"):
        return mark.args[0]
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cells of notebooks that start Ray."""
    for item in items:
        if isinstance(item.parent, IPyNbFile) and (
            "02-ddp-pytorch-ray" in item.path.parts or item.path.name in WITH_RAY
        ):
            item.add_marker(pytest.mark.xdist_group(RAY))


@pytest.hookimpl(tryfirst=True)  # before xdist lets the scheduler begin
def pytest_collection_finish(session):
    """Let the scheduler, which is in another process and knows names alone, know groups."""
    if hasattr(session.config, "workerinput"):
        groups = {item.nodeid: group(item) for item in session.items}
        Path(os.environ["RAY_TMPDIR"], GROUPS).write_text(json.dumps(groups))


class Lanes(LoadScopeScheduling):
    """Give each group to a lane; the one with most tests comes first."""

    groups: dict[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self.groups is None:  # every worker has written the same
            (first, *_) = Path(os.environ["RAY_TMPDIR"]).glob(f"*/{GROUPS}")
            self.groups = json.loads(first.read_text())
        return self.groups[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[RAYS] = started_rays()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Fail a test that has started a Ray without the mark."""
    result = yield
    if started_rays() - item.stash[RAYS] and group(item) != RAY:
        pytest.fail(SENTENCE, pytrace=False)
    return result
