"""The first notebook in JupyterLab, as a reader meets it: `make lab`, and a browser.

The server is started by that very command, on a free port, with a home of its own. It
serves a copy of the workshop without outputs, so whatever is to be seen was made here.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

from tests import scripts
from tests.browser import Browser
from tests.tools import notebooks
from tests.tools.notebooks import ROOT
from tests.tools.notebooks.execution import end_left_over
from tests.waiting import TIMEOUT_S, wait_until
from utils.processes import free_port

FIRST, SECOND, *_ = (p.relative_to(ROOT) for p in notebooks.all_notebooks())
CELLS = nbformat.read(ROOT / FIRST, as_version=4).cells  # as recorded
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab/tree/(\S+)\?token=\w+")
# As sitecustomize.py it notes whom each Python asks: the server, kernels and their ranks.
# Names, and addresses over TCP (a socket of UDP is how one asks for one's own address).
NOTES = """
import os, socket, sys

def note(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and arguments[0].type == socket.SOCK_STREAM:
        host = arguments[1][0] if isinstance(arguments[1], tuple) else ""
    else:
        return
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{host} {' '.join(sys.argv)}\\n")

sys.addaudithook(note)
"""
STAND_STILL = """\
from pathlib import Path

def stand_still(folder):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(100_000)

run_ranks(stand_still, 2, {folder!r})"""
SHARE = """\
def share(batch, rank, world_size):
    return {answer}

check("split a batch", share)"""


class Lab:
    """A server that `make lab` has started, and a browser that shows its first page."""

    def __init__(self, folder: Path):
        self.asked = folder / "asked"
        self.asked.touch()
        (folder / "audit").mkdir()
        (folder / "audit" / "sitecustomize.py").write_text(NOTES)
        # A cell that is not in sight is on the page all the same.
        settings = folder / "settings/@jupyterlab/notebook-extension"
        settings.mkdir(parents=True)
        tracker = settings / "tracker.jupyterlab-settings"
        tracker.write_text('{"windowingMode": "none"}')
        self.marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
        theirs = ("JUPYTER", "IPYTHON", "XDG_")  # name folders of the user
        kept = scripts.environment().items()
        reader = {name: value for name, value in kept if not name.startswith(theirs)}
        paths = [str(folder / "audit"), os.environ.get("PYTHONPATH")]
        reader |= self.marker | {
            "HOME": str(folder / "home"),
            "ASKED": str(self.asked),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        self.browser = Browser(ROOT / "build" / "screenshots" / "lab", reader)
        copy_workshop(folder / "workshop")
        options = f"--no-browser --ServerApp.port={free_port()}"
        options += f" --ServerApp.root_dir={folder / 'workshop'}"
        options += " --LabApp.expose_app_in_browser=True"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.server = subprocess.Popen(
                ["make", "lab", f"LAB_ARGS={options}", f"LAB_STATE={folder / 'state'}"],
                cwd=ROOT,
                env=reader,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def open(self) -> dict:
        """Open the address that the server has printed: that of the first notebook."""
        text = self.log.read_text
        address = wait_until(lambda: ADDRESS.search(text()), self.server, text)
        assert address[1] == FIRST.as_posix()
        wait_until(lambda: "is running at" in text(), self.server, text)
        return self.browser("open", address[0])

    def processes(self) -> set[psutil.Process]:
        """Return what the kernel has started, and what those have."""
        started = set()
        for process in psutil.Process(self.server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "ipykernel_launcher" in process.cmdline():
                    started |= {*process.children(recursive=True)}
        return started

    def elsewhere(self) -> list[str]:
        """Return whom the server, its kernels and their processes asked outside."""
        here = {"", "None", "localhost", "0.0.0.0", "::", "::1", socket.gethostname()}
        here |= {a.address for each in psutil.net_if_addrs().values() for a in each}
        lines = self.asked.read_text().splitlines()
        return [line for line in lines if line.split(" ", 1)[0] not in here]

    def close(self) -> None:
        try:
            self.browser.close()
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(timeout=TIMEOUT_S)
        finally:
            end_left_over(self.marker)


def copy_workshop(folder: Path) -> None:
    """Copy what a reader sees of the workshop; the first notebook loses its outputs."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "checkpoints")
    for part in (*ROOT.glob("0[123]-*"), ROOT / "docs"):
        shutil.copytree(part, folder / part.name, ignore=ignored)
    shutil.copy(ROOT / "README.md", folder)
    notebook = nbformat.read(folder / FIRST, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, folder / FIRST)


def cell_with(source: str) -> int:
    """Return the index of the cell of the first notebook that has this line."""
    (index,) = [i for i, cell in enumerate(CELLS) if source in cell.source]
    return index


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    """Yield the first notebook, open and run to its end."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("make lab needs the .venv of this repository")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.opened = lab.open()
        lab.ran = lab.browser("run_all")
        yield lab
    finally:
        lab.close()


@pytest.mark.weekly
def test_it_opens_with_its_contents_in_sight_and_runs_to_its_end(lab):
    assert lab.opened["kernel"] == "Python (Ray Train)"
    assert notebooks.title(ROOT / FIRST) in lab.opened["contents"]
    code = [cell for cell in CELLS if cell.cell_type == "code"]
    assert lab.ran["prompts"] == [f"[{n}]:" for n in range(1, len(code) + 1)]
    fails = ["raises-exception" in cell.metadata.get("tags", []) for cell in code]
    assert lab.ran["errors"] == fails
    outputs = [output for cell in code for output in cell.outputs]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    diagrams = sum(cell.source.count("```mermaid") for cell in CELLS)
    assert len(lab.ran["figures"]) == figures and all(lab.ran["figures"])
    assert len(lab.ran["diagrams"]) == diagrams and all(lab.ran["diagrams"])


@pytest.mark.weekly
def test_an_exercise_tells_a_wrong_answer_and_a_right_one(lab):
    index = cell_with('check("split a batch"')
    lab.browser("start", index, SHARE.format(answer="batch"))
    lab.browser("shows", index, "Not yet. Every worker gets the whole batch")
    lab.browser("start", index, SHARE.format(answer="batch[rank::world_size]"))
    lab.browser("shows", index, "Right!")


@pytest.mark.weekly
def test_stop_leaves_no_process_of_the_ranks(lab, tmp_path):
    index = cell_with('check("bytes per step"')
    before = lab.processes()  # the server that ranks are forked from stays
    lab.browser("start", index, STAND_STILL.format(folder=str(tmp_path)))
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    assert len(lab.processes() - before) == 2
    lab.browser("stop")
    lab.browser("shows", index, "KeyboardInterrupt")
    wait_until(lambda: lab.processes() <= before)
    lab.browser("start", index, "'ranks:', len(run_ranks(who_am_i, 2))")
    lab.browser("shows", index, "('ranks:', 2)")


@pytest.mark.weekly
def test_its_link_leads_to_the_next_notebook_and_nothing_left_the_machine(lab):
    """After all that the tests above did."""
    lab.browser("follow", notebooks.title(ROOT / SECOND))
    nothing = {"elsewhere": [], "console": [], "questions": []}
    assert lab.browser("complaints") == nothing
    assert "jupyter" in lab.asked.read_text()  # what is asked here is noted
    assert lab.elsewhere() == []
