"""What is installed is what requirements.txt says, and `make` says what there is."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.notebooks import ROOT
from utils import doctor

LINES = (ROOT / "requirements.txt").read_text().splitlines()


def requirement(line):
    return Requirement(line.partition("#")[0].strip())


def packages():
    """(requirement, reason) per package; the reason ends the line, or stands above."""
    above = []
    for line in LINES:
        text, _, comment = line.partition("#")
        if text.startswith("-e"):
            continue
        if text.strip():
            yield requirement(line), comment.strip() or " ".join(above)
            above = []
        else:
            above.append(comment.strip())


def test_every_package_is_pinned_and_has_a_reason():
    found = list(packages())
    assert len(found) > 10
    for package, reason in found:
        operators = [specifier.operator for specifier in package.specifier]
        assert operators == ["<" if package.name == "jsonschema" else "=="], package
        assert len(reason.split()) >= 2, f"{package}: why is it there?"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_gets_one_version_of_each_package(python):
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    names = [p.name for p, _ in packages() if not p.marker or p.marker.evaluate(here)]
    assert len(names) == len(set(names))
    assert set(names) == {p.name for p, _ in packages()}


def test_last_line_is_this_package_importable_from_everywhere(tmp_path):
    assert LINES[-1] == "-e ."
    code = "import utils; print(utils.__file__)"
    command = [sys.executable, "-c", code]
    answer = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert Path(answer.strip()) == ROOT / "utils" / "__init__.py"


def test_installed_versions_are_the_pinned_ones():
    wanted = [p for p, _ in packages() if p.marker is None or p.marker.evaluate()]
    for package in wanted:
        version = metadata.version(package.name).partition("+")[0]
        assert package.specifier.contains(version), f"{package}, but {version} is here"
    # The doctor reads the same file without any package.
    assert doctor.requirements() == [
        (p.name, s.operator, s.version) for p in wanted for s in p.specifier
    ]


def test_import_ray_parses_no_grammar():
    """jsonschema from 4.25 on would load it, and make every Ray process 1 s slower."""
    code = "import sys, ray; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "ray" in modules
    assert "rfc3987_syntax" not in modules


def test_programs_of_this_environment_are_found():
    """As a notebook's `!torchrun` and DeepSpeed's ninja, also where it is not activated."""
    for program in ("torchrun", "ninja", "jupyter"):
        assert Path(shutil.which(program)).parent == Path(sysconfig.get_path("scripts"))


def test_make_alone_prints_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()
    # Under `make test` it would also print which folder it enters.
    command = ["make", "--no-print-directory"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert [line.split()[:2] for line in lines] == [["make", t] for t in targets]
    assert all(len(line.split()) > 4 for line in lines)  # and what each one does


def test_kernel_is_registered():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tests run outside .venv, where `make setup` has no say")
    folder = ROOT / ".venv" / "share" / "jupyter" / "kernels" / "python3"
    kernel = json.loads((folder / "kernel.json").read_text())
    assert kernel["display_name"] == "Python (Ray Train)"
    assert Path(kernel["argv"][0]) == ROOT / ".venv" / "bin" / "python"
