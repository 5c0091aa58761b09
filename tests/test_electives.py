"""The electives: what they need is pinned and named, and changes nothing else."""

import re
import shutil
import subprocess
from importlib import metadata

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import test_environment
from tests.patience import PATIENCE
from tests.readme import typed
from tests.skips import lacks_electives
from tests.test_environment import imported, needed
from tests.tools import notebooks
from utils import doctor, electives

ROOT = notebooks.ROOT
KERAS = "02-ddp-pytorch-ray/electives/keras/train_keras.py"
CONSTRAINTS = electives.REQUIREMENTS.with_name("constraints.txt")


def names(text: str) -> set[str]:
    """Return the packages that lines of requirements pin."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    pins = [Requirement(line) for line in lines if re.match(r"\w", line)]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    return {canonicalize_name(pin.name) for pin in pins}


def test_what_all_lessons_need_is_pinned_in_one_place():
    """So `make electives` cannot change a pin: it installs under both constraints."""
    lines = electives.REQUIREMENTS.read_text().splitlines()
    assert "-c ../../constraints.txt" in lines and "-c constraints.txt" in lines
    shared = names(test_environment.CONSTRAINTS.read_text())
    own = names(CONSTRAINTS.read_text())
    assert not shared & own
    assert names(electives.REQUIREMENTS.read_text()) <= own
    assert not re.search(r"://|^-|@", CONSTRAINTS.read_text(), re.MULTILINE)


@pytest.mark.skipif(lacks_electives(), reason="not installed: `make electives`")
@pytest.mark.elective
def test_electives_are_installed_as_pinned():
    assert electives.wrong_versions() == []
    pins = electives.pins()
    installed = {}
    for name in pins:
        needed(name, seen=installed)
    both = test_environment.constrained()
    lines = CONSTRAINTS.read_text().splitlines()[1:]
    for pin in (Requirement(line) for line in lines):
        both[canonicalize_name(pin.name)] = str(pin.specifier)[2:]
    assert installed.keys() > {canonicalize_name(name) for name in pins}
    for name in installed:
        version = metadata.version(name).partition("+")[0]
        assert both.get(name) == version, f"{name} is {version}: see CONTRIBUTING.md"


def test_a_lesson_names_what_it_imports():
    """In its first cell of code, where whoever lacks it reads what to type."""
    shared = {canonicalize_name(each.name) for each in test_environment.packages()}
    pinned = names(electives.REQUIREMENTS.read_text())  # on any platform
    known = metadata.packages_distributions()
    seen = set()
    for path in notebooks.electives():
        named = {canonicalize_name(name) for name in notebooks.needed(path)}
        assert named <= pinned, path
        named |= {electives.OTHER_NAMES.get(name, name) for name in named}
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                source = TransformerManager().transform_cell(cell.source)
                for module in {*imported(source)} & known.keys() - {"utils"}:
                    package = {canonicalize_name(each) for each in known[module]}
                    assert package & (shared | named), f"{path} imports {module}"
                    seen.add(module)
    assert "ray" in seen


def test_whoever_lacks_a_package_reads_what_to_type():
    electives.needs("torch", "ray")
    sentence = r"^This lesson needs gone, lost: run `make electives` in the folder of"
    with pytest.raises(ModuleNotFoundError, match=sentence):
        electives.needs("torch", "gone", "lost")


@pytest.mark.parametrize("there", ["xgboost", "xgboost-cpu"])
def test_a_package_that_goes_by_two_names_is_there_under_either(there, monkeypatch):
    monkeypatch.setattr(electives, "_version", {there: "3.2.0"}.get)
    electives.needs("xgboost")
    assert electives.missing("xgboost", "gone") == ["gone"]
    monkeypatch.setattr(electives, "_version", {}.get)
    assert electives.missing("xgboost") == ["xgboost"]


@pytest.mark.parametrize(
    ("there", "state", "found"),
    [
        ({}, "ok", "not installed; `make electives` installs them"),
        ({"wandb": "0.1"}, "warn", "wandb is 0.1, not "),
        ({"optuna": None}, "warn", " missing"),
    ],
)
def test_doctor_knows_the_electives(there, state, found, monkeypatch):
    pins = electives.pins()
    versions = {name: version or pins[name] for name, version in there.items()}
    monkeypatch.setattr(electives, "_version", versions.get)
    result = doctor.electives()
    assert result.state == state and found in result.found
    monkeypatch.setattr(electives, "_version", pins.get)
    assert doctor.electives() == doctor.Result("ok", f"all {len(pins)} as pinned")


def test_pins_are_those_of_the_platform(monkeypatch):
    assert ("xgboost-cpu" in electives.pins()) == (electives.sys.platform == "linux")
    monkeypatch.setattr(electives.sys, "platform", "darwin")
    assert "xgboost" in electives.pins() and "xgboost-cpu" not in electives.pins()


@pytest.mark.weekly
@pytest.mark.xdist_group("ray")
@pytest.mark.runs("make keras")
def test_two_workers_of_keras_equal_one(tmp_path):
    command = typed("make keras")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Proved: 2 workers end with the weights of one" in done.stdout
    # With OFF every worker takes every image, without an error; the count tells.
    script = (ROOT / KERAS).read_text().replace("Policy.DATA", "Policy.OFF")
    wrong = tmp_path / "a" / "b" / "c" / "train_keras.py"
    wrong.parent.mkdir(parents=True)
    wrong.write_text(script)
    shutil.copytree(ROOT / "utils" / "data", tmp_path / "utils" / "data")
    (tmp_path / "a space").symlink_to(ROOT / ".venv-keras")
    python = tmp_path / "a space" / "bin" / "python"
    done = subprocess.run(
        [python, wrong], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert 'many["images per epoch"] == TRAINING //' in done.stderr
