"""Chromium for tests: Debian's, driven by Playwright in an environment of its own."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S


def python() -> Path:
    """Return a Python that has Playwright; make its environment if it is not there.

    It skips the test where that cannot be had.
    """
    if not shutil.which("chromium"):
        pytest.skip("no Chromium here: `apt-get install chromium`")
    make = ["make", ".venv-weekly/.ready"]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, timeout=TIMEOUT_S)
    if made.returncode:
        pytest.skip("no Playwright here: `make .venv-weekly/.ready`")
    return ROOT / ".venv-weekly" / "bin" / "python"


class Browser:
    """A process of tests/browser/lab.py: a method of its `Lab` is one of this object.

    Args:
        pictures: the folder for its pictures.
        environment: what the process gets.
    """

    def __init__(self, pictures: Path, environment: dict[str, str]):
        script = Path(__file__).with_name("lab.py")
        self.process = subprocess.Popen(
            [python(), script, pictures, str(TIMEOUT_S)],
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
        self.process.wait(timeout=TIMEOUT_S)
