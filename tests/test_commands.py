"""The commands of the README: `make lab` serves, `make tour` prints, none is untested."""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from tests.tools import notebooks
from tests.tools.notebooks.__main__ import tour
from tests.tools.notebooks.execution import record
from tests.tools.notebooks.navigation import navigation
from utils.processes import free_port

README = notebooks.ROOT / "README.md"
RUNS = "pytest.mark.runs"
# A network, a name, and what the tests do by naming .venv/bin.
NOT_RUN = {
    "git clone <this repository>",
    "cd <its folder>",
    "source .venv/bin/activate",
}


def commands(text: str) -> list[tuple[str, Path]]:
    """The commands of a page in Markdown, and the folder in which each is typed."""
    found = []
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL):
        folder = README.parent
        for line in block.splitlines():
            for command in re.split(r"&&|;|\|", line.split("  #")[0]):
                if (command := command.strip()) and not command.startswith("#"):
                    found.append((command, folder))
                    if command.startswith("cd ") and command not in NOT_RUN:
                        folder = (folder / command.removeprefix("cd ")).resolve()
    return found


def run_by() -> dict[str, str]:
    """What runs a command besides the reader: CI, or a test that is marked with it."""
    gate = (notebooks.ROOT / ".ci" / "run").read_text().splitlines()
    found = {line: ".ci/run" for line in gate if line.startswith("make ")}
    for path in sorted(notebooks.ROOT.glob("tests/test_*.py")):
        for test in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(test, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == RUNS:
                    names = [ast.literal_eval(argument) for argument in mark.args]
                    found |= dict.fromkeys(names, f"{path.name}::{test.name}")
    return found


RUN_BY = run_by()


def is_run(command: str, folder: Path) -> bool:
    """Whether a test or CI runs this very command, or it enters a folder that exists."""
    command = re.sub(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )+", "", command)
    if command.startswith("make "):
        command = re.sub(r"( [A-Z_]+=\S+)+$", "", command)
    if command.startswith("cd ") and (folder / command.removeprefix("cd ")).is_dir():
        return True
    return command in RUN_BY or command in NOT_RUN


COMMANDS = commands(README.read_text())


def test_the_readme_has_commands():
    assert {"make lab", "make test"} <= {command for command, _ in COMMANDS}


@pytest.mark.parametrize(("command", "folder"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_every_command_of_the_readme_is_run(command, folder):
    assert is_run(command, folder), f"mark the test that runs it: @{RUNS}({command!r})"


@pytest.mark.parametrize(
    "line",
    ["make frobnicate", "make lab && rm -rf .", "cd nowhere", "torchrun train_ddp.py"],
)
def test_a_command_that_nothing_runs_is_seen(line):
    assert not all(is_run(*each) for each in commands(f"```bash\n{line}\n```"))


@pytest.mark.parametrize("command", RUN_BY)
def test_what_a_test_says_to_run_is_there(command):
    makefile = (notebooks.ROOT / "Makefile").read_text()
    if command.startswith("make "):
        assert f"\n{command.removeprefix('make ')}: " in makefile, RUN_BY[command]
    else:
        assert command in {c for c, _ in COMMANDS} | {"make"}, RUN_BY[command]


@pytest.mark.runs("make lab")
def test_lab_serves_the_first_notebook(tmp_path):
    if Path(sys.prefix) != notebooks.ROOT / ".venv":
        pytest.skip("make lab needs the .venv of this repository")
    port = f"--ServerApp.port={free_port()}"
    command = ["make", "lab", f"LAB_ARGS=--no-browser {port}"]
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
        deadline = time.monotonic() + 120
        while (found := answer()) is None:
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return found

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
        job.wait(timeout=30)


def status(url: str) -> int | None:
    """The status of a server's answer; None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


@pytest.fixture
def two_notebooks(tmp_path, monkeypatch) -> list[Path]:
    """A workshop of two small notebooks, the second of which fails."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    folder = tmp_path / "01-part"
    folder.mkdir()
    for name, code in (("01_good", "print('Proved: 1 + 1 is 2')"), ("02_bad", "1 / 0")):
        cells = [nbformat.v4.new_markdown_cell(f"# {name}")]
        cells.append(nbformat.v4.new_code_cell(code))
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    return notebooks.all_notebooks()


@pytest.mark.runs("make tour")
def test_tour_prints_what_was_proved(two_notebooks, capsys):
    assert tour(two_notebooks) == 1
    out = capsys.readouterr().out
    assert re.search(r"01-part/01_good\.ipynb +\d+  1 \+ 1 is 2", out)
    assert re.search(r"Failed: 01-part/02_bad\.ipynb, cell 1: .*division by zero", out)
    copy = notebooks.ROOT / "build" / "notebooks" / "01-part" / "01_good.ipynb"
    assert notebooks.proofs(nbformat.read(copy, as_version=4)) == ["1 + 1 is 2"]


@pytest.mark.runs("make record")
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
