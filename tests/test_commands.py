"""The commands of the README: `make lab` serves, `make tour` prints, none is untested."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from tests import notebooks

README = notebooks.ROOT / "README.md"
# Where each command of the README runs, besides the reader's terminal.
RUN_BY = {
    "git clone": "needs a network; CI starts from a fresh clone",
    "make lab": "test_lab_serves_the_first_notebook",
    "make test": "CI",
    "make lint": "CI",
    "make setup": "CI, and tests/test_setup.py",
    "make tour": "test_tour_prints_what_was_proved",
    "make record": "test_record_saves_clean_outputs",
    "make bench": "tests/test_benchmarks.py, in part: all of it takes 20 minutes",
    "make doctor": "tests/test_doctor.py",
    "make clean": "tests/test_setup.py",
    "python -m utils.doctor": "tests/test_doctor.py",
    "pytest --nbval": "CI",
    "torchrun --nproc_per_node=4 train_ddp.py --epochs 3": "tests/test_scripts.py",
    "python train_ray_ddp.py --num-workers 4 --epochs 3": "tests/test_scripts.py",
    "./launch_multinode_ddp.sh": "tests/test_scripts.py",
    "pip install -r requirements.txt": "CI, through make setup",
    "cd": "not a program",
    "make": "tests/test_environment.py",
}


def commands() -> list[str]:
    blocks = re.findall(
        r"```(?:bash|sh|console)\n(.*?)```", README.read_text(), re.DOTALL
    )
    lines = [line.split("  #")[0].strip() for b in blocks for line in b.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_has_commands():
    assert {"make lab", "make test"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_is_run(command):
    bare = re.sub(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )+", "", command)
    assert any(bare == known or bare.startswith(f"{known} ") for known in RUN_BY), (
        command
    )


def test_lab_serves_the_first_notebook():
    if Path(sys.prefix) != notebooks.ROOT / ".venv":
        pytest.skip("make lab needs the .venv of this repository")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["make", "lab", f"LAB_ARGS=--no-browser --ServerApp.port={port}"]
    job = subprocess.Popen(
        command,
        cwd=notebooks.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        address = None
        while not address:
            line = job.stdout.readline()
            assert line, "JupyterLab ended"
            address = re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", line)
        page, token = address[0].split("?token=")
        assert page.endswith("/01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb")
        assert status(f"{page}?token={token}") == 200
        server = page.split("/lab")[0]
        assert status(f"{server}/api/kernels") == 403  # the token is on
        assert status(f"{server}/api/kernels?token={token}") == 200
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(timeout=30)
        job.stdout.close()


def status(url: str) -> int:
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:  # printed already, and not listening yet
            time.sleep(0.1)
    raise TimeoutError(url)


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


def test_tour_prints_what_was_proved(two_notebooks, capsys):
    assert notebooks.tour(two_notebooks) == 1
    out = capsys.readouterr().out
    assert re.search(r"01-part/01_good\.ipynb +\d+  1 \+ 1 is 2", out)
    assert re.search(r"Failed: 01-part/02_bad\.ipynb, cell 1: .*division by zero", out)
    copy = notebooks.ROOT / "build" / "notebooks" / "01-part" / "01_good.ipynb"
    assert notebooks.proofs(nbformat.read(copy, as_version=4)) == ["1 + 1 is 2"]


def test_record_saves_clean_outputs(two_notebooks):
    good, bad = two_notebooks
    notebooks.record([good])
    recorded = nbformat.read(good, as_version=4)
    assert recorded.cells[1].execution_count == 1
    assert notebooks.navigation(good) in recorded.cells[-1].source
    before = bad.read_bytes()
    with pytest.raises(RuntimeError, match="02_bad"):
        notebooks.record([bad])
    assert bad.read_bytes() == before
