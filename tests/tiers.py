"""Which tests run when (a plugin of pytest): the rule for notebooks, and `--lf` of them.

`make test` runs what has no mark, `make test-all` also what is `slow` and no `side_trip`,
and `make test-weekly` what is marked `weekly`. `make test PART=02` runs what is marked
`part02`, slow or not, with side trips. This module only marks: what a command runs stands
in the Makefile.
"""

import functools
import re
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import IPyNbCell

from tests.tools import notebooks
from tests.tools.notebooks.outline import going_deeper
from utils.electives import missing

COLLECTED: set[str] = set()  # the names of all tests of this run
ELECTIVES = notebooks.electives()
PART = re.compile(r"(?:^|[/\[])(0\d)-[a-z]")  # a numbered folder, in the name of a test


def is_quick(notebook: Path) -> bool:
    """Return whether `make test` has it: a part's first one (main line), the solutions."""
    return notebook.name.startswith("01_") or notebook.stem == "solutions"


@functools.cache
def in_side_trips(notebook: Path) -> set[int]:
    """Return the numbers of a lesson's cells of code that its main line does not need."""
    cells = nbformat.read(notebook, as_version=4).cells
    aside = {id(cell) for cell in going_deeper(cells)}
    code = (cell for cell in cells if cell.cell_type == "code")
    return {number for number, cell in enumerate(code) if id(cell) in aside}


def pytest_configure(config):
    """Let `pytest --lf` find the cells that failed, too."""
    if config.getoption("lf", False):
        config.option.nbval = True


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    """Mark the notebooks, and whatever names a numbered folder, as a test of its part."""
    for item in items:
        if part := PART.search(item.nodeid):
            item.add_marker(f"part{part[1]}")
        if isinstance(item, IPyNbCell) and item.path in ELECTIVES:
            packages = notebooks.needed(item.path)
            item.add_marker("elective")
            item.add_marker("slow")
            if missing(*packages):
                item.add_marker(
                    pytest.mark.skip(reason="not installed: `make electives`")
                )
        elif isinstance(item, IPyNbCell):
            aside = item.cell_num in in_side_trips(item.path)
            if aside:
                item.add_marker("side_trip")
            if aside or not is_quick(item.path):
                item.add_marker("slow")


def pytest_collection_finish(session):
    COLLECTED.update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids):
    COLLECTED.update(ids)


@pytest.hookimpl(trylast=True)  # once pytest has noted the cells that failed
def pytest_sessionfinish(session):
    """Let `--lf` run the whole notebook of a cell that failed: it needs those above it."""
    if session.config.pluginmanager.has_plugin("cacheprovider"):
        failed = session.config.cache.get("cache/lastfailed", {})
        notebooks = {name.partition("::")[0] for name in failed if ".ipynb::" in name}
        cells = {n for n in COLLECTED if n.partition("::")[0] in notebooks}
        session.config.cache.set(
            "cache/lastfailed", failed | dict.fromkeys(cells, True)
        )
