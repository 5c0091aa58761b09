"""A cell that takes long says so while it runs, and leaves nothing of that behind."""

import nbclient
import nbformat
import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT
from utils import clock

CELLS = [
    "from utils import clock; clock.AFTER = 0.2",
    "import time; time.sleep(5); print('done')",
    "clock.AFTER = 600",  # else a slow host shows the seconds of the next two as well
    "1 / 0",
    "print('quick')",
]


class Listening(nbclient.NotebookClient):
    """Keeps the messages in which outputs come."""

    def process_message(self, msg, cell, cell_index):
        self.heard = [*getattr(self, "heard", []), (cell_index, msg)]
        return super().process_message(msg, cell, cell_index)


def executed(monkeypatch, **environment):
    monkeypatch.delenv("WORKSHOP_PROGRESS")  # the tests' own
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    client = Listening(
        nbformat.v4.new_notebook(cells=cells),
        timeout=PATIENCE,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    shown = [
        msg["content"]["data"]
        for index, msg in client.heard
        if index == 1 and msg["msg_type"].endswith("display_data")
    ]
    return client.nb.cells, shown


@pytest.mark.slow
def test_a_long_cell_shows_its_seconds_until_it_ends(monkeypatch):
    cells, shown = executed(monkeypatch)
    assert len(shown) > 2 and all(
        "<progress>" in each["text/html"] for each in shown[:-1]
    )
    assert shown[-1] == {}
    first, last = cells[1].outputs
    assert {**first.get("data", {}), **last.get("data", {})} == {}
    assert "done\n" in (first.get("text"), last.get("text"))
    assert [output.output_type for output in cells[3].outputs] == ["error"]
    assert [output.output_type for output in cells[4].outputs] == ["stream"]


def test_it_is_shown_after_five_seconds():
    assert clock.AFTER == 5


@pytest.mark.weekly
def test_where_outputs_are_compared_nothing_is_shown(monkeypatch):
    cells, shown = executed(monkeypatch, WORKSHOP_PROGRESS="off")
    assert shown == [] and [o.output_type for o in cells[1].outputs] == ["stream"]
