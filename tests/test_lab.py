"""The first notebooks in JupyterLab, as a reader meets them: `make lab`, and a browser.

The server is started by that very command, on a free port, with a home of its own. It
serves a copy of the workshop without outputs, so whatever is to be seen was made here.
"""

import contextlib
import http.client
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
from tests.browser import python as browser_python
from tests.patience import PATIENCE, wait_until
from tests.readme import typed
from tests.tools import notebooks
from tests.tools.notebooks import ROOT
from tests.tools.notebooks.execution import end_left_over
from utils.processes import free_port

FIRST, SECOND, *_ = (p.relative_to(ROOT) for p in notebooks.all_notebooks())
OTHERS = [
    pytest.param(
        "02-ddp-pytorch-ray/01_ray_core.ipynb", marks=pytest.mark.xdist_group("ray")
    ),
    "03-fsdp-deepspeed/01_where_memory_goes.ipynb",
]
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/(\S+)(\?token=\w+)")
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

# Tests run without the bar; at the end no cell shows one any more.
LONG = """import os, pathlib, time
from utils import clock

os.environ.pop("WORKSHOP_PROGRESS", None)
clock.AFTER = 1
clock.show_in_notebook()
while not pathlib.Path({seen!r}).exists():
    time.sleep(0.1)
clock.AFTER = 1e6"""

# Ray's dashboard asks the machine that hosts this one whether it is a cloud's, also where
# it reports no usage (ray/_common/usage/usage_lib.py, `get_cloud_from_metadata_requests`).
CLOUD = {"169.254.169.254", "metadata.google.internal"}


class Lab:
    """A server that `make lab` has started, and a browser that shows one notebook."""

    def __init__(self, folder: Path, notebook: Path):
        if Path(sys.prefix) != ROOT / ".venv":
            pytest.skip("make lab needs the .venv of this repository")
        python = browser_python()
        self.notebook = notebook
        self.asked = folder / "asked"
        self.asked.touch()
        (folder / "audit").mkdir()
        (folder / "audit" / "sitecustomize.py").write_text(NOTES)
        self.marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
        theirs = ("JUPYTER", "IPYTHON", "XDG_")  # name folders of the user
        kept = scripts.environment().items()
        reader = {name: value for name, value in kept if not name.startswith(theirs)}
        paths = [str(folder / "audit"), os.environ.get("PYTHONPATH")]
        reader |= self.marker | {
            "HOME": str(folder / "home"),
            "ASKED": str(self.asked),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        workshop = folder / "workshop"
        copied(workshop, notebook)
        options = f"--no-browser --ServerApp.port={free_port()}"
        options += f" --ServerApp.root_dir={workshop}"
        options += " --LabApp.expose_app_in_browser=True"
        state = f"LAB_STATE={folder / 'state'}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.server = subprocess.Popen(
                [*typed("make lab"), f"LAB_ARGS={options}", state],
                cwd=ROOT,
                env=reader,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pictures = ROOT / "build" / "screenshots" / "lab" / notebook.stem
        self.browser = Browser(python, pictures, reader)

    def open(self) -> dict:
        """Open the notebook, at the address that the server has printed."""
        said = self.log.read_text
        address = wait_until(lambda: ADDRESS.search(said()), self.server, said)
        server, first, token = address.groups()
        assert first == FIRST.as_posix()
        port = int(server.rpartition(":")[2])
        # printed already, it may not listen yet
        wait_until(lambda: listens(port), self.server, said)
        stranger = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        stranger.request("GET", "/api/contents")  # without the token
        assert stranger.getresponse().status == 403
        path = self.notebook.as_posix()
        return self.browser("open", f"{server}/lab/tree/{path}{token}", path)

    def cells(self) -> list[nbformat.NotebookNode]:
        """Return the cells as they are recorded in the repository."""
        return nbformat.read(ROOT / self.notebook, as_version=4).cells

    def cell(self, source: str) -> int:
        """Return the index of the cell that has this line."""
        (index,) = [i for i, c in enumerate(self.cells()) if source in c.source]
        return index

    def processes(self) -> set[psutil.Process]:
        """Return what the kernel has started, and what those have."""
        found = set()
        for process in psutil.Process(self.server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "ipykernel_launcher" in process.cmdline():
                    found |= {*process.children(recursive=True)}
        return found

    def elsewhere(self) -> list[str]:
        """Return whom the server, its kernels and their processes asked outside."""
        here = {"", "None", "localhost", "0.0.0.0", "::", "::1", socket.gethostname()}
        here |= {a.address for each in psutil.net_if_addrs().values() for a in each}
        lines = self.asked.read_text().splitlines()
        found = [line.split(" ", 1) for line in lines]
        return [
            f"{whom} {who}"
            for whom, who in found
            if whom not in here and not (whom in CLOUD and "ray/dashboard/" in who)
        ]

    def close(self) -> None:
        try:
            self.browser.close()
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(timeout=PATIENCE)
        finally:
            end_left_over(self.marker)


def listens(port: int) -> bool:
    """Return whether somebody on this machine takes connections at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


def copied(workshop: Path, notebook: Path) -> None:
    """Copy what a reader sees of the workshop; one notebook loses its outputs."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "checkpoints")
    for part in (*ROOT.glob("0[123]-*"), ROOT / "docs"):
        shutil.copytree(part, workshop / part.name, ignore=ignored)
    shutil.copy(ROOT / "README.md", workshop)
    copy = nbformat.read(workshop / notebook, as_version=4)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(copy, workshop / notebook)


@contextlib.contextmanager
def opened(folder: Path, notebook: Path) -> Iterator[tuple[Lab, dict]]:
    """Yield a notebook in JupyterLab, and what its first sight shows."""
    lab = Lab(folder, notebook)
    try:
        yield lab, lab.open()
    finally:
        lab.close()


def runs_to_its_end(lab: Lab) -> None:
    """Run all cells, and compare their errors, figures and diagrams with the recording."""
    recorded = lab.cells()
    ran = lab.browser("run_all")
    assert [each["index"] for each in ran] == [
        i for i, cell in enumerate(recorded) if cell.cell_type == "code"
    ]
    for each in ran:
        errors = [o for o in each["outputs"] if o["output_type"] == "error"]
        assert bool(errors) == each["may_fail"], errors
        assert each["count"]
    for index, cell in enumerate(recorded):
        shown = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        looks = {"jp-RenderedImage": len(shown)}
        if cell.cell_type == "markdown":
            looks["jp-RenderedMermaid"] = cell.source.count("```mermaid")
        for kind, count in looks.items():
            if count:
                drawn = lab.browser("drawn", index, kind, count)
                assert len(drawn) == count and min(drawn) > 0.01, (index, kind, drawn)


def kept_to_itself(lab: Lab) -> None:
    """Check that nothing was asked of a network or the reader, and nothing went wrong."""
    nothing = {"elsewhere": [], "console": [], "questions": []}
    assert lab.browser("complaints") == nothing
    assert "jupyter" in lab.asked.read_text()  # what is asked here is noted
    assert lab.elsewhere() == []


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Iterator[tuple[Lab, dict]]:
    with opened(tmp_path_factory.mktemp("lab"), FIRST) as there:
        yield there


@pytest.fixture(scope="module")
def lab(first) -> Lab:
    """Run the first notebook to its end, and return it."""
    runs_to_its_end(first[0])
    return first[0]


@pytest.mark.weekly
def test_it_opens_with_its_kernel_and_its_contents_in_sight(first):
    _, seen = first
    assert seen["kernel"] == "Python (Ray Train)"
    assert notebooks.title(ROOT / FIRST) in seen["contents"]
    assert len(seen["contents"]) > 10


@pytest.mark.weekly
def test_an_exercise_says_what_is_wrong_and_what_is_right(lab):
    index = lab.cell('check("split a batch"')
    answer = "def share(batch, rank, world_size):\n    return {}\n\n"
    answer += 'check("split a batch", share)'
    lab.browser("send", index, answer.format("batch"))
    wrong = lab.browser("answered", index)
    assert wrong.startswith("Not yet. Every worker gets the whole batch")
    lab.browser("send", index, answer.format("batch[rank::world_size]"))
    assert lab.browser("answered", index) == "Right!"


@pytest.mark.weekly
def test_stop_leaves_no_process_of_the_ranks(lab, tmp_path):
    index = lab.cell('check("bytes per step"')
    before = lab.processes()  # the server that ranks are forked from stays
    lab.browser("send", index, STAND_STILL.format(folder=str(tmp_path)))
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    assert len(lab.processes() - before) == 2
    lab.browser("stop")
    assert "KeyboardInterrupt" in lab.browser("answered", index)
    wait_until(lambda: lab.processes() <= before)
    lab.browser("send", index, "len(run_ranks(who_am_i, 2))")
    assert lab.browser("answered", index) == "2"


@pytest.mark.weekly
def test_a_long_cell_shows_that_it_is_at_work(lab, tmp_path):
    index, seen = lab.cell('check("mean loss"'), str(tmp_path / "seen")
    lab.browser("send", index, LONG.format(seen=seen))
    lab.browser("bar", index, seen)


@pytest.mark.weekly
def test_the_link_at_its_top_leads_to_the_next_notebook(lab):
    title = notebooks.title(ROOT / SECOND)
    assert lab.browser("follow", title, SECOND.as_posix()).startswith(title)


@pytest.mark.weekly
def test_nothing_left_the_machine_and_nothing_complained(lab):
    """After all that the tests above did."""
    kept_to_itself(lab)


@pytest.mark.weekly
@pytest.mark.parametrize("notebook", OTHERS)
def test_the_first_notebook_of_each_other_part_runs_to_its_end(notebook, tmp_path):
    with opened(tmp_path, Path(notebook)) as (lab, seen):
        assert notebooks.title(ROOT / notebook) in seen["contents"]
        runs_to_its_end(lab)
        kept_to_itself(lab)


def test_all_packages_that_drive_the_browser_are_pinned():
    lines = (ROOT / "tests" / "browser" / "requirements.txt").read_text().splitlines()
    for line in lines:
        assert re.match(r"# |[\w-]+==[\d.]+(  # |$)", line), line


def test_the_notebooks_that_run_here_are_the_first_of_each_part():
    listed = [getattr(each, "values", (each,))[0] for each in OTHERS]
    firsts = [
        p.relative_to(ROOT) for p in notebooks.all_notebooks() if p.name[:3] == "01_"
    ]
    assert [FIRST, *map(Path, listed)] == firsts
