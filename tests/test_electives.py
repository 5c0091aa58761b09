"""The electives: their packages move no pin of the others, and their calls still fit.

Executing them needs their packages: `pytest --nbval 02-ddp-pytorch-ray/electives`.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module, metadata

import nbformat
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file

from tests.tools import notebooks
from tests.waiting import TIMEOUT_S
from utils.electives import missing, needs
from utils.models import GPT, SMOKE

ROOT = notebooks.ROOT
FOLDER = ROOT / "02-ddp-pytorch-ray" / "electives"
REQUIREMENTS = FOLDER / "requirements.txt"
PINNED = [ROOT / "constraints.txt", FOLDER / "constraints.txt"]
KERAS = ROOT / ".venv-keras"


def pins(path, here_only: bool = False) -> dict[str, str]:
    """Return the versions that a file pins, by package, on any platform or on this one."""
    lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
    named = [Requirement(line) for line in lines if re.match(r"\w", line)]
    chosen = [p for p in named if not (here_only and p.marker) or p.marker.evaluate()]
    assert all(str(p.specifier).startswith("==") for p in chosen)
    return {canonicalize_name(p.name): str(p.specifier)[2:] for p in chosen}


def test_electives_cannot_move_the_pin_of_another_lesson():
    """They are installed under both files, and no package is in both."""
    lines = REQUIREMENTS.read_text().splitlines()
    assert "-c ../../constraints.txt" in lines and "-c constraints.txt" in lines
    shared, own = map(pins, PINNED)
    assert shared and not shared.keys() & own.keys()
    assert pins(REQUIREMENTS).items() <= own.items()


@pytest.mark.weekly
@pytest.mark.skipif(bool(missing("optuna")), reason="not installed: `make electives`")
@pytest.mark.parametrize(
    ("framework", "option", "says"),
    [
        ("accelerate", "--prepare-schedule", "scheduler counts per rank"),
        ("lightning", "--own-sampler", "every rank sees every item"),
        ("transformers", "--keep-batch", "the global batch grows"),
    ],
)
def test_the_parity_tool_watches_a_framework(framework, option, says):
    program = ROOT / "docs" / "frameworks" / f"with_{framework}.py"
    right, wrong = (
        subprocess.check_output(
            [sys.executable, program, *options], cwd=ROOT, text=True, timeout=TIMEOUT_S
        )
        for options in ([], [option])
    )
    assert "2 workers train like one process" in right and "Looks like" not in right
    assert "Looks like" in wrong and says in wrong, wrong


@pytest.mark.weekly
@pytest.mark.skipif(bool(missing("optuna")), reason="not installed: `make electives`")
def test_what_is_installed_is_what_is_pinned():
    here = pins(PINNED[0], here_only=True) | pins(PINNED[1], here_only=True)
    found = {
        canonicalize_name(each.name): each.version.partition("+")[0]  # torch's build
        for each in metadata.distributions()
    }
    assert pins(REQUIREMENTS, here_only=True).keys() <= found.keys()
    both = here.keys() & found.keys()
    assert {n: found[n] for n in both} == {n: here[n] for n in both}


def test_packages_that_an_elective_asks_for_are_pinned():
    for path in notebooks.electives():
        asked = {canonicalize_name(name) for name in notebooks.needed(path)}
        assert asked <= pins(REQUIREMENTS).keys(), path


def test_a_reader_without_the_packages_is_told_what_to_type():
    needs("torch", "ray")
    sentence = r"^This lesson needs gone, lost: run `make electives` in the folder of"
    with pytest.raises(ModuleNotFoundError, match=sentence):
        needs("torch", "gone", "lost")


@pytest.mark.weekly
@pytest.mark.ray
def test_two_workers_of_keras_equal_one(tmp_path):
    """In an environment of its own, as the README of the electives says."""
    python, script = KERAS / "bin" / "python", FOLDER / "keras" / "train_keras.py"
    install = [python, "-m", "pip", "install", "--quiet", "-r"]
    for command in (
        [sys.executable, "-m", "venv", KERAS],
        [*install, script.with_name("requirements.txt")],
    ):
        subprocess.run(command, check=True, timeout=TIMEOUT_S)

    def run(path) -> subprocess.CompletedProcess:
        command = [python, path]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    right = run(script)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "Proved: 2 workers end with the weights of one" in right.stdout
    # With OFF every worker takes every image, without an error; the count tells.
    wrong = tmp_path / "a" / "b" / "c" / script.name
    wrong.parent.mkdir(parents=True)
    wrong.write_text(script.read_text().replace("Policy.DATA", "Policy.OFF"))
    shutil.copytree(ROOT / "utils" / "data", tmp_path / "utils" / "data")
    assert 'many["images per epoch"] == TRAINING //' in run(wrong).stderr


@pytest.mark.weekly
@pytest.mark.skipif(
    bool(missing("transformers")), reason="not installed: `make electives`"
)
def test_transformers_loads_the_export_of_part_03(tmp_path, monkeypatch):
    """The cell of 03/02 writes it; every logit is ours, to 1e-5."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lesson = nbformat.read(ROOT / "03-fsdp-deepspeed" / "02_fsdp2.ipynb", as_version=4)
    [source] = [cell.source for cell in lesson.cells if cell.id == "hf-export"]
    names = {"json": json, "save_file": save_file}
    exec(source.partition("\n\n\nexport_to_transformers(")[0], names)
    torch.manual_seed(0)
    model = GPT(SMOKE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    names["export_to_transformers"](model.state_dict(), SMOKE, tmp_path / "gpt2")
    load = import_module("transformers").GPT2LMHeadModel.from_pretrained
    theirs, found = load(tmp_path / "gpt2", output_loading_info=True)
    assert not any(found.values())
    tokens = torch.randint(SMOKE.vocab_size, (2, SMOKE.block_size))
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(tokens).logits, model(tokens), atol=1e-5)
