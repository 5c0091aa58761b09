"""What is nobody's lesson: pins for other machines, GitHub's files, warnings as errors."""

import json
import re
import subprocess
import tomllib
import warnings

import pytest
import yaml

from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S
from utils.launch import run_ranks

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = ROOT / ".venv-weekly" / "bin" / "uv"


def test_the_version_heads_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert released[1] == PROJECT["version"]


def test_the_devcontainer_has_what_ray_needs_and_the_python_of_the_recordings():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    shared = [arg for arg in container["runArgs"] if arg.startswith("--shm-size=")]
    assert int(re.fullmatch(r"--shm-size=(\d+)g", shared[0])[1]) >= 4
    needs = container["hostRequirements"]
    assert needs["cpus"] >= 2 and int(needs["memory"].removesuffix("gb")) >= 8
    gate = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"][
        "gate"
    ]
    (python,) = [
        s["with"]["python-version"] for s in gate["steps"] if "python" in str(s)
    ]
    assert python in container["image"]


def warn() -> None:
    warnings.warn("ours", stacklevel=1)


def test_a_warning_of_our_own_code_is_an_error_also_on_a_rank():
    with pytest.raises(UserWarning, match="ours"):
        warn()
    with pytest.raises(Exception, match="ours"):
        run_ranks(warn, 1)
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "file", 1, module="ray.data")


@pytest.fixture
def uv(tmp_path):
    """Return a command of uv, run in a folder with a copy of what it reads."""
    if not UV.exists():
        pytest.skip("no uv here: `make test-weekly` installs it")
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "utils").mkdir()

    def run(command: str) -> subprocess.CompletedProcess:
        command = re.sub(r"\buv pip", f"'{UV}' pip", command)
        options = {"cwd": tmp_path, "capture_output": True, "text": True}
        return subprocess.run(command, shell=True, timeout=TIMEOUT_S, **options)

    return run


@pytest.mark.weekly
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_pin_has_a_wheel_for_other_pythons(uv, python, machine):
    """But not for 3.10, which shows that wheels are looked for; nothing is downloaded."""
    done = uv(
        "grep -v '^-' requirements.txt | uv pip compile --quiet "
        "--constraint constraints.txt --no-annotate --no-header "
        "--only-binary :all: --no-binary deepspeed "  # it has none
        f"--python-version {python} --python-platform {machine}-manylinux_2_28 -"
    )
    if python == "3.10":
        assert done.returncode == 1 and "no wheels with a matching" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = {pin.partition(" ;")[0] for pin in pins}
    assert set(done.stdout.split()) <= wanted


@pytest.mark.weekly
def test_constraints_are_what_uv_resolves(uv, tmp_path):
    """By the command of CONTRIBUTING.md: nothing is missing or left over, for no Python."""
    (command,) = re.findall(r"^grep .+ uv pip compile .+$", CONTRIBUTING, re.MULTILINE)
    done = uv(command)
    assert done.returncode == 0, done.stderr
    resolved = (tmp_path / "constraints.txt").read_text()
    assert resolved == (ROOT / "constraints.txt").read_text()
