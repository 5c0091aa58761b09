"""Chromium for tests: Debian's, driven by Playwright in an environment of its own."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT


def python() -> Path:
    """Return a Python that has Playwright; make its environment if it is not there.

    It skips the test where that cannot be had, which tests/skips.py forbids in CI.
    """
    if not shutil.which("chromium"):
        pytest.skip("no Chromium here: `apt-get install chromium`")
    make = ["make", ".venv-browser/.ready"]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, timeout=PATIENCE)
    if made.returncode:
        pytest.skip("no Playwright here: `make .venv-browser/.ready`")
    return ROOT / ".venv-browser" / "bin" / "python"


class Browser:
    """A process of tests/browser/lab.py: a method of its `Lab` is one of this object.

    Args:
        python: one that has Playwright.
        pictures: the folder for its pictures.
        environment: what the process gets.
    """

    def __init__(self, python: Path, pictures: Path, environment: dict[str, str]):
        command = [python, Path(__file__).with_name("lab.py"), pictures]
        self.process = subprocess.Popen(
            [*command, str(PATIENCE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, step: str, *arguments: Any) -> Any:
        """Take a step, and return its answer; an error of it stands in standard error."""
        self.process.stdin.write(json.dumps([step, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"{step}{arguments} failed in the browser, as said above"
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()  # then it closes Chromium, and ends
        self.process.wait(timeout=PATIENCE)
