"""One-line mistakes that people make: for each, the test that is named for it fails.

They are listed in mistakes.toml. Each is made in a copy of this repository.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

import pytest

from tests import scripts
from tests.tools.notebooks.execution import end_left_over
from tests.waiting import TIMEOUT_S

LIST = Path(__file__).with_name("mistakes.toml")
MISTAKES = [
    pytest.param(mistake, id=mistake["name"])
    for mistake in tomllib.loads(LIST.read_text())["mistake"]
]


def with_mistake(mistake: dict[str, str], root: Path) -> str:
    """Return the text of the file with the mistake in it, of a notebook as JSON."""
    text = (root / mistake["file"]).read_text()
    count = text.count(mistake["line"])
    assert count == 1, f"it stands there {count} times: correct `line` in {LIST.name}"
    return text.replace(mistake["line"], mistake["instead"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_list_names_lines_and_tests_that_exist(mistake):
    assert with_mistake(mistake, scripts.ROOT)
    file, _, test = mistake["test"].partition("::")
    text = (scripts.ROOT / file).read_text()
    assert file.endswith(".ipynb") or f"def {test.partition('[')[0]}(" in text


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Copy what git tracks, or would track."""
    folder = tmp_path_factory.mktemp("workshop")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=scripts.ROOT, text=True)
    for name in names.rstrip("\0").split("\0"):
        if (scripts.ROOT / name).exists():  # it may be deleted and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(scripts.ROOT / name, folder / name)
    return folder


@pytest.mark.weekly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_test_named_for_it(mistake, copy):
    marker = {"WORKSHOP_MISTAKE": uuid.uuid4().hex}
    # no .pyc: it would be taken for fresh where an edit keeps the second and the size
    ours = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"} | marker
    command = [sys.executable, "-m", "pytest", "-x", "--nbval", "--color=no"]
    path = copy / mistake["file"]
    right = path.read_text()
    path.write_text(with_mistake(mistake, copy))
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", mistake["test"]],
            cwd=copy,
            env=scripts.environment() | ours,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        path.write_text(right)
        end_left_over(marker)
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)  # a notebook's colours
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, output
    assert re.search(mistake["error"], output), output
