"""What CI runs: .github/workflows/ci.yml, whatever the order of a job's steps."""

import re

import yaml

from tests.tools.notebooks import ROOT

FILE = ROOT / ".github" / "workflows" / "ci.yml"


def workflow() -> dict:
    """Return the whole file; its events stand under True, as YAML reads `on`."""
    return yaml.safe_load(FILE.read_text())


def steps(job: str) -> list[dict]:
    """Return the steps of a job, such as "gate"."""
    return workflow()["jobs"][job]["steps"]


def gate_command() -> str:
    """Return the command by which the job "gate" runs `.ci/run`."""
    (command,) = [s["run"] for s in steps("gate") if ".ci/run" in s.get("run", "")]
    return command


def gate_python() -> str:
    """Return the Python of the job "gate", such as "3.11"."""
    (python,) = [
        step["with"]["python-version"]
        for step in steps("gate")
        if "actions/setup-python" in step.get("uses", "")
    ]
    return python


def weekly() -> list[dict]:
    """Return what runs every Monday, a dictionary per run."""
    return workflow()["jobs"]["weekly"]["strategy"]["matrix"]["include"]


def made() -> set[str]:
    """Return the `make` commands that CI runs, on every change or every Monday."""
    commands = "\n".join(run["command"] for run in weekly())
    found = set(re.findall(r"\bmake [\w-]+", commands))
    found |= {f"make {t}" for t in re.findall(r"\.ci/run ([\w-]+)", commands)}
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return found | {line for line in lines if line.startswith("make ")}
