"""`make lab` serves the first notebook; `tour` and `record` execute notebooks.

The first lines of the README can be pasted, and `make slides` needs no network.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from tests.tools import notebooks, slides
from tests.tools.notebooks.__main__ import tour
from tests.tools.notebooks.execution import record
from tests.tools.notebooks.navigation import navigation
from tests.waiting import TIMEOUT_S, wait_until
from utils.processes import free_port


def test_lab_serves_the_first_notebook(tmp_path):
    if Path(sys.prefix) != notebooks.ROOT / ".venv":
        pytest.skip("make lab needs the .venv of this repository")
    port = f"--ServerApp.port={free_port()}"
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS=--no-browser {port}"],
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
        job.wait(timeout=TIMEOUT_S)


def status(url: str) -> int | None:
    """Return the status of a server's answer; None if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


@pytest.mark.parametrize("filled_in", [True, False])
def test_the_first_lines_can_be_pasted(filled_in, tmp_path):
    """As they stand they say what is missing, and neither clone nor make anything."""
    readme = (notebooks.ROOT / "README.md").read_text()
    lines = re.search(r"^```bash\n(ADDRESS=.*?)^```", readme, re.M | re.S)[1]
    (tmp_path / "make").write_text('#!/bin/sh\necho "make $* in $(basename "$PWD")"\n')
    (tmp_path / "make").chmod(0o755)
    subprocess.check_call(["git", "init", "-q", tmp_path / "theirs"])
    if filled_in:
        lines = lines.replace("ADDRESS=", f"ADDRESS={tmp_path}/theirs", 1)
    done = subprocess.run(
        ["bash", "-c", lines],
        cwd=tmp_path,
        env=os.environ
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ADDRESS": "/old"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode == 0) == filled_in, done.stderr
    assert done.stdout == "make lab in workshop\n" * filled_in
    assert (tmp_path / "workshop" / ".git").exists() == filled_in
    assert (
        "put the address of this repository after ADDRESS=" in done.stderr
    ) != filled_in


class Loaded(HTMLParser):
    """What a page loads from elsewhere: scripts, styles, pictures and frames."""

    def __init__(self, page: str):
        super().__init__()
        self.found = re.findall(r"@import.*|url\([^)]*\)", page)
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        for name, value in attributes:
            loads = name in ("src", "srcset", "data") or (name == "href" and tag != "a")
            if loads and not value.startswith("data:"):
                self.found.append(value)


def test_slides_are_whole_and_need_nothing_else():
    path = notebooks.ROOT / "01-ddp-pytorch-only" / "01_data_parallelism_by_hand.ipynb"
    page = slides.page(path)
    assert Loaded(page).found == []
    question, *others = page.split("<section>")[1:]
    assert f"<h1>{notebooks.title(path)}</h1>" in question
    assert 'href="' not in page and "<!-- navigation -->" not in page  # no dead links
    assert sum("<strong>Predict first" in slide for slide in others) >= 3
    assert any('src="data:image/png;base64,' in slide for slide in others)
    (proof, *_) = notebooks.proofs(nbformat.read(path, as_version=4))
    (shown,) = [slide for slide in others if f"{notebooks.PROOF}{proof}" in slide]
    assert "assert" in shown


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://cdn.org/a.js">',
        '<link rel="x" href="a.css">',
        "url(b.png)",
    ],
)
def test_what_slides_would_load_is_seen(loads):
    assert len(Loaded(f"<p><a href='#'>{loads}").found) == 1


def test_every_lesson_has_slides():
    lessons = [p for p in notebooks.all_notebooks() if p.stem != "solutions"]
    for path in lessons:
        page = slides.page(path)
        assert Loaded(page).found == [] and notebooks.PROOF in page, path


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


def test_tour_prints_what_was_proved(two_notebooks, capsys):
    assert tour(two_notebooks) == 1
    out = capsys.readouterr().out
    assert re.search(r"01-part/01_good\.ipynb +\d+  1 \+ 1 is 2", out)
    assert re.search(r"Failed: 01-part/02_bad\.ipynb, cell 1: .*division by zero", out)
    copy = notebooks.ROOT / "build" / "notebooks" / "01-part" / "01_good.ipynb"
    assert notebooks.proofs(nbformat.read(copy, as_version=4)) == ["1 + 1 is 2"]


def test_record_saves_outputs_and_leaves_a_notebook_that_fails_as_it_was(two_notebooks):
    good, bad = two_notebooks
    edited = nbformat.read(good, as_version=4)
    edited.cells[1].metadata["execution"] = {"iopub.execute_input": "2026-01-01"}
    nbformat.write(edited, good)
    record([good])
    recorded = nbformat.read(good, as_version=4)
    assert "execution" not in recorded.cells[1].metadata
    assert recorded.cells[1].execution_count == 1
    assert navigation(good) in recorded.cells[-1].source
    before = bad.read_bytes()
    with pytest.raises(RuntimeError, match="02_bad"):
        record([bad])
    assert bad.read_bytes() == before
