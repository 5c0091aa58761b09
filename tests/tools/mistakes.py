"""One-line mistakes that people make, each with the test that rejects it.

python -m tests.tools.mistakes            # try all of mistakes.toml, and write MISTAKES.md
python -m tests.tools.mistakes sampler    # try those whose name contains "sampler"
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from tqdm import tqdm

from tests import scripts
from tests.tools.notebooks.execution import RECORDING_ENVIRONMENT, end_left_over

ROOT = scripts.ROOT
LIST = ROOT / "tests" / "tools" / "mistakes.toml"
TABLE = ROOT / "tests" / "tools" / "MISTAKES.md"
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mistake:
    """A line of `file` that holds `was` once, and would hold `becomes`.

    test: the node id of the test that rejects it, or a notebook, compared by nbval.
    says: a regular expression for what that test says, so that it fails for this reason.
    """

    name: str
    file: str
    was: str
    becomes: str
    test: str
    says: str


@dataclass(frozen=True)
class Run:
    """One run of a test. said: what failed in it, "" if it passed or never came so far."""

    status: int
    passed: int
    said: str
    seconds: float
    output: str


def all_mistakes() -> list[Mistake]:
    return [Mistake(**entry) for entry in tomllib.loads(LIST.read_text())["mistake"]]


def with_mistake(mistake: Mistake, root: Path = ROOT) -> str:
    """Return a file's text with the mistake in it; of a notebook, in one of its cells.

    Raises:
        ValueError: what it changes does not stand there exactly once.
    """
    path = root / mistake.file
    if path.suffix != ".ipynb":
        text = path.read_text()
        _check_once(mistake, text.count(mistake.was))
        return text.replace(mistake.was, mistake.becomes)
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    _check_once(mistake, sum(cell.source.count(mistake.was) for cell in code))
    for cell in code:
        cell.source = cell.source.replace(mistake.was, mistake.becomes)
    return nbformat.writes(notebook) + "\n"


def _check_once(mistake: Mistake, count: int) -> None:
    if count != 1:
        raise ValueError(
            f"{mistake.name}: {mistake.was!r} stands {count} times in {mistake.file}, and "
            f"has to stand there once: correct the entry in {LIST.name}."
        )


def copy_workshop(target: Path) -> None:
    """Copy all files that git tracks, or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60).split(
        "\0"
    )
    for name in filter(None, names):
        if (ROOT / name).exists():  # deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


@contextlib.contextmanager
def made(mistake: Mistake, copy: Path) -> Iterator[None]:
    """Keep the mistake in the copy while inside."""
    path = copy / mistake.file
    before = path.read_bytes()
    path.write_text(with_mistake(mistake, copy))
    try:
        yield
    finally:
        path.write_bytes(before)


def run(copy: Path, *tests: str, timeout: float = TIMEOUT_S) -> Run:
    """Run tests of the copy, with the copy's `utils`, up to the first that fails."""
    marker = {"WORKSHOP_MISTAKE": uuid.uuid4().hex}
    # no .pyc: it would be taken for fresh where an edit keeps the second and the size
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"} | marker
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "--nbval", "--color=no"]
    start = time.monotonic()
    job = subprocess.Popen(
        [*command, f"--junitxml={report}", *tests],
        cwd=copy,
        env=scripts.environment() | RECORDING_ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.kill()
        output = f"{', '.join(tests)} took more than {timeout} s"
    finally:
        end_left_over(marker)
        job.wait(timeout=30)
    seconds = time.monotonic() - start
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures = [failure for case in cases for failure in case.findall("failure")]
    said = "\n".join(f"{each.get('message')}\n{each.text}" for each in failures)
    said = re.sub(r"#x1B\[[\d;]*m", "", said)  # colours of a notebook's traceback
    passed = sum(len(case) == 0 for case in cases)
    return Run(job.returncode, passed, said, seconds, output)


def rejects(found: Run, mistake: Mistake) -> bool:
    """Return whether the test failed, for the reason that the mistake gives it."""
    return found.status == 1 and bool(re.search(mistake.says, found.said))


def reason(found: Run, mistake: Mistake) -> str:
    """Return the line of what the test said that shows the mistake."""
    lines = [line.strip(" >|") for line in found.said.splitlines()]
    line = next((line for line in lines if re.search(mistake.says, line)), lines[0])
    line = re.sub(r"/\S+/", "", line.removeprefix("E").strip())
    return line if len(line) <= 70 else line[:67] + "..."


def table(rows: list[tuple[Mistake, Run]], together: float) -> str:
    """Return the table that is published, in Markdown."""
    lines = [
        "# Mistakes, and the test that rejects each",
        "",
        "Each is one line, changed in a copy of this workshop. "
        "`python -m tests.tools.mistakes` makes them,",
        "one after the other, runs the test of each, and writes this table.",
        "Seconds are those of the whole command, with pytest's start.",
        "",
        f"Measured on {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}: {together / 60:.1f} minutes together, with one run "
        "of all these tests without a mistake.",
        "",
        "| mistake | made in | rejected by | seconds | it said |",
        "|---|---|---|---:|---|",
    ]
    for mistake, found in rows:
        said = reason(found, mistake).replace("|", r"\|")
        lines.append(f"{row_start(mistake)} {found.seconds:.0f} | `{said}` |")
    return "\n".join(lines) + "\n"


def row_start(mistake: Mistake) -> str:
    return f"| {mistake.name} | `{mistake.file}` | `{mistake.test}` |"


def main(words: list[str]) -> int:
    chosen = [m for m in all_mistakes() if all(word in m.name for word in words)]
    rows, missed, start = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        copy = Path(folder).resolve()
        copy_workshop(copy)
        tests = dict.fromkeys(mistake.test for mistake in chosen)
        control = run(copy, *tests, timeout=len(tests) * TIMEOUT_S)
        if control.status:
            print(control.output)
            print("Failed: a test does not pass without any mistake.")
            return 1
        print(f"{control.seconds:6.1f}  all tests, without a mistake")
        for mistake in tqdm(chosen, unit="mistake"):
            with made(mistake, copy):
                found = run(copy, mistake.test)
            if rejects(found, mistake):
                rows.append((mistake, found))
                tqdm.write(
                    f"{found.seconds:6.1f}  {mistake.name}: {reason(found, mistake)}"
                )
            else:
                missed.append(mistake)
                tqdm.write(found.output)
                tqdm.write(f"Failed: {mistake.test} does not reject: {mistake.name}.")
    print(f"{len(rows)} of {len(chosen)} mistakes were rejected.")
    if not words and not missed:
        _, heading, section = TABLE.read_text().partition("\n## ")  # of mutants.py
        text = table(rows, time.monotonic() - start)
        TABLE.write_text(text + heading + section)
        print(f"Written: {TABLE.relative_to(ROOT)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
