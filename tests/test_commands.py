"""The commands of the READMEs: `make lab` serves, `make tour` prints, none is untested."""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from tests import readme, workflow
from tests.patience import PATIENCE, wait_until
from tests.readme import typed
from tests.tools import notebooks
from tests.tools.notebooks.__main__ import tour
from tests.tools.notebooks.execution import record
from tests.tools.notebooks.navigation import navigation
from utils.processes import free_port

# What CI types on every change or every Monday, a test marked `runs`, or the test of all
# lines that start a script.
RUN = workflow.made() | {command for command, *_ in readme.marked("runs")}
RUN |= {line for _, lines in readme.script_lines() for line in lines}


def is_run_or_covered(command: str, folder: Path) -> bool:
    """Return whether a test or CI runs or covers it, or it enters a folder that exists."""
    if command.startswith("cd ") and (folder / command.removeprefix("cd ")).is_dir():
        return True
    return command in RUN | readme.covered().keys() | readme.NOT_RUN


@pytest.mark.parametrize(
    ("command", "folder"), readme.COMMANDS, ids=[c for c, _ in readme.COMMANDS]
)
def test_every_command_of_a_readme_is_run_or_covered(command, folder):
    assert is_run_or_covered(command, folder), (
        f"Type it in a test that is marked runs({command!r}), or mark what covers it."
    )


@pytest.mark.parametrize(
    "line",
    ["make frobnicate", "make lab && rm -rf .", "cd nowhere", "torchrun train_ddp.py"],
)
def test_a_command_that_nothing_runs_is_seen(line):
    found = readme.commands(f"```bash\n{line}\n```")
    assert not all(is_run_or_covered(*each) for each in found)


@pytest.mark.parametrize(
    ("command", "test", "code"),
    readme.marked("runs"),
    ids=[f"{test}-{command}" for command, test, _ in readme.marked("runs")],
)
def test_what_is_marked_runs_types_it(command, test, code):
    assert readme.types(code, command), f"{test} never calls typed({command!r})"


def test_a_mark_without_its_command_is_seen():
    test = "@pytest.mark.runs('make gpu')\ndef test_a():\n    subprocess.run({})"
    (marked,) = ast.parse(test.format("typed('make gpu')")).body
    assert readme.types(marked, "make gpu")
    for other in ("['make', 'gpu']", "typed('make lab')", ""):
        (marked,) = ast.parse(test.format(other)).body
        assert not readme.types(marked, "make gpu")
    with pytest.raises(LookupError, match="'make frobnicate'"):
        readme.typed("make frobnicate")


@pytest.mark.parametrize("command", readme.covered())
def test_what_a_test_covers_stands_in_a_readme(command):
    assert command in {there for there, _ in readme.COMMANDS}, readme.covered()[command]


def test_what_is_only_covered_is_listed_and_nothing_else():
    only = readme.only_covered().keys()
    assert only >= {"make bench", "make gpu"}
    assert only.isdisjoint(RUN)
    assert {"make", "make lab", "make test-weekly"} <= RUN


@pytest.mark.runs("make lab")
def test_lab_serves_the_first_notebook(tmp_path):
    if Path(sys.prefix) != notebooks.ROOT / ".venv":
        pytest.skip("make lab needs the .venv of this repository")
    port = f"--ServerApp.port={free_port()}"
    command = [*typed("make lab"), f"LAB_ARGS=--no-browser {port}"]
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            command,
            cwd=notebooks.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for(answer: Callable):
        return wait_until(answer, job, log.read_text)

    try:
        printed = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+")
        address = wait_for(lambda: printed.search(log.read_text()))
        page, token = address[0].split("?token=")
        assert page.endswith("/01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb")
        # printed already, it may not listen yet
        assert wait_for(lambda: status(f"{page}?token={token}")) == 200
        server = page.split("/lab")[0]
        assert status(f"{server}/api/kernels") == 403  # the token is on
        assert status(f"{server}/api/kernels?token={token}") == 200
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(job.pid, signal.SIGTERM)
        job.wait(timeout=PATIENCE)


def status(url: str) -> int | None:
    """Return the status of a server's answer; None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


@pytest.fixture
def two_notebooks(tmp_path, monkeypatch) -> list[Path]:
    """Return a workshop of two small notebooks, the second of which fails."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    folder = tmp_path / "01-part"
    folder.mkdir()
    for name, code in (("01_good", "print('Proved: 1 + 1 is 2')"), ("02_bad", "1 / 0")):
        cells = [nbformat.v4.new_markdown_cell(f"# {name}")]
        cells.append(nbformat.v4.new_code_cell(code))
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    return notebooks.all_notebooks()


@pytest.mark.covers("make tour")
def test_tour_prints_what_was_proved(two_notebooks, capsys):
    assert tour(two_notebooks) == 1
    out = capsys.readouterr().out
    assert re.search(r"01-part/01_good\.ipynb +\d+  1 \+ 1 is 2", out)
    assert re.search(r"^01/02_bad +2 +2 +1 ", out, re.MULTILINE)  # tests.tools.sizes
    assert re.search(r"Failed: 01-part/02_bad\.ipynb, cell 1: .*division by zero", out)
    copy = notebooks.ROOT / "build" / "notebooks" / "01-part" / "01_good.ipynb"
    assert notebooks.proofs(nbformat.read(copy, as_version=4)) == ["1 + 1 is 2"]


@pytest.mark.covers("make record")
def test_record_saves_clean_outputs(two_notebooks):
    good, bad = two_notebooks
    record([good])
    recorded = nbformat.read(good, as_version=4)
    assert recorded.cells[1].execution_count == 1
    assert navigation(good) in recorded.cells[-1].source
    before = bad.read_bytes()
    with pytest.raises(RuntimeError, match="02_bad"):
        record([bad])
    assert bad.read_bytes() == before
