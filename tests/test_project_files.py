"""Files that others read: the workflow, the devcontainer, the issue form, the changelog."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.patience import PATIENCE
from tests.readme import targets
from tests.tools.notebooks import ROOT
from tests.workflow import FILE as WORKFLOW
from tests.workflow import gate_command, gate_python, weekly, workflow

FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TOOLS = ("check-jsonschema==0.39.0", "uv==0.13.9")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_change_is_gated_by_the_command_that_anybody_can_run():
    assert gate_command().split()[-1] == ".ci/run"  # all that it makes
    assert "continue-on-error" not in workflow()["jobs"]["gate"]
    events = workflow()[True]  # YAML takes the word `on` for it
    assert {"push", "pull_request", "schedule"} <= events.keys()


def test_jobs_may_only_read_and_end_by_themselves():
    assert workflow()["permissions"] == {"contents": "read"}
    for job in workflow()["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            if "uses" in step:  # a tag may be moved, a commit may not
                assert re.search(r"@[0-9a-f]{40}$", step["uses"])
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ([], ["lint", "test-all", "test-electives"]),
        (
            ["test-weekly"],
            [".venv-browser/.ready", "hub", "electives", "test-weekly"],
        ),
        (["coverage"], ["coverage"]),
    ],
)
def test_the_gate_makes_its_targets_and_the_weekly_job_its_own(
    arguments, made, tmp_path
):
    for program in ("bash", "dirname", "id", "realpath"):  # no dpkg: nothing to install
        (tmp_path / program).symlink_to(shutil.which(program))
    (tmp_path / "make").write_text("#!/bin/bash\necho $@\n")
    (tmp_path / "make").chmod(0o755)
    printed = subprocess.check_output(
        ["bash", ROOT / ".ci" / "run", *arguments],
        env={"PATH": str(tmp_path)},
        text=True,
        timeout=PATIENCE,
    )
    assert printed.split() == made


def test_every_week_the_long_tests_run_and_every_python():
    commands = [run["command"] for run in weekly()]
    # As root, as the gate: several long tests make network namespaces.
    assert f"{gate_command()} test-weekly" in commands
    assert f"{gate_command()} coverage" in commands
    pythons = {run["python"] for run in weekly()}
    assert pythons == {"3.11", "3.12", "3.13"}
    for version in ("3.10", "3.14", *pythons):
        fits = SpecifierSet(PROJECT["requires-python"]).contains(version)
        assert fits == (version in pythons)
    for target in re.findall(r"\bmake ([\w-]+)", " ".join(commands)):
        assert target in targets(), f"make {target}"


def test_the_newest_versions_are_tried_without_pins(tmp_path):
    (newest,) = [run for run in weekly() if run.get("may-fail")]
    (without_pins,) = [line for line in newest["command"].splitlines() if "sed" in line]
    requirements = (ROOT / "requirements.txt").read_text()
    (tmp_path / "requirements.txt").write_text(requirements)
    subprocess.run(without_pins, shell=True, cwd=tmp_path, check=True, timeout=PATIENCE)
    left = (tmp_path / "requirements.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in left]
    packages = [Requirement(line) for line in lines if line and line != "-e ."]
    assert len(packages) == requirements.count("==") + 1
    assert [p.name for p in packages if p.specifier] == ["jsonschema"]


def test_the_first_screen_has_what_a_reader_looks_for():
    first = (ROOT / "README.md").read_text().partition("\n## Your path")[0]
    looked_for = ["git clone", "make lab", "**Which way?**", "proof.svg", "memory.svg"]
    looked_for.append("## What is in it")
    assert [each for each in looked_for if each not in first] == []


def test_the_devcontainer_has_what_ray_needs():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    shared = [arg for arg in container["runArgs"] if arg.startswith("--shm-size=")]
    assert int(re.fullmatch(r"--shm-size=(\d+)g", shared[0])[1]) >= 4
    needs = container["hostRequirements"]
    assert needs["cpus"] >= 2 and int(needs["memory"].removesuffix("gb")) >= 8
    assert int(needs["storage"].removesuffix("gb")) >= 20
    command, target = container["postCreateCommand"].split()
    assert command == "make"
    assert target in targets()
    assert gate_python() in container["image"]  # the Python that the outputs are from


def test_whoever_reports_a_problem_is_asked_for_the_doctor():
    fields = yaml.safe_load(FORM.read_text())["body"]
    (doctor,) = [field for field in fields if field["id"] == "doctor"]
    assert "`make doctor`" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"] is True
    assert "doctor" in targets()


def test_the_version_heads_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert released[1] == PROJECT["version"]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    + [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))],
)
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:utils|tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"`make ([\w-]+)", text):
        assert target in targets(), f"make {target}"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Return the folder of programs that no reader needs, installed from the registry."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=PATIENCE)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *TOOLS]
    subprocess.run(install, check=True, timeout=PATIENCE)
    return folder / "bin"


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", WORKFLOW),
        ("github-workflows", WORKFLOW.with_name("book.yml")),
        ("github-workflows", WORKFLOW.with_name("kind.yml")),
        ("github-issue-forms", FORM),
    ],
)
def test_github_understands_it(tools, schema, path, tmp_path):
    check = [tools / "check-jsonschema", "--builtin-schema", f"vendor.{schema}"]
    subprocess.run([*check, path], check=True, timeout=PATIENCE)
    wrong = tmp_path / path.name
    wrong.write_text(
        re.sub(r"^(jobs|body):", "surprise:", path.read_text(), flags=re.M)
    )
    assert subprocess.run([*check, wrong], timeout=PATIENCE).returncode == 1


@pytest.mark.weekly
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.10", "3.12", "3.13"])
def test_every_pin_has_a_wheel_for_other_pythons(tools, python, machine, tmp_path):
    """But not for 3.10, which shows that wheels are looked for; nothing is downloaded."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("-")]
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    command = [tools / "uv", "pip", "compile", "--quiet", "wanted.txt"]
    command += [
        "--constraint",
        ROOT / "constraints.txt",
        "--no-annotate",
        "--no-header",
    ]
    command += ["--only-binary", ":all:", "--no-binary", "deepspeed"]  # it has none
    command += ["--python-version", python]
    command += ["--python-platform", f"{machine}-manylinux_2_28"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    if python == "3.10":
        assert done.returncode == 1 and "no wheels with a matching" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    pins = (ROOT / "constraints.txt").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+)$", done.stdout, re.MULTILINE)
    assert found
    for name, version in found:
        assert re.search(rf"^{name}=={version}\b", pins, re.MULTILINE), name


@pytest.mark.weekly
def test_constraints_are_what_uv_resolves(tools, tmp_path):
    """By the command of CONTRIBUTING.md: nothing is missing or left over, for no Python."""
    (command,) = re.findall(r"^grep .+ uv pip compile .+$", CONTRIBUTING, re.MULTILINE)
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "utils" / "datasets").mkdir(parents=True)
    command = command.replace("| uv ", f"| {tools / 'uv'} ")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=PATIENCE)
    resolved = (tmp_path / "constraints.txt").read_text()
    assert resolved == (ROOT / "constraints.txt").read_text()
