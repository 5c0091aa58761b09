"""What is used of other packages although they do not document it: is it still there?

The list is tests/private_names.toml.
"""

import importlib.util
import pkgutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.scripts import ROOT
from tests.waiting import TIMEOUT_S

LIST = tomllib.loads((ROOT / "tests" / "private_names.toml").read_text())
USED = [
    pytest.param(package, kind, name, id=f"{package}: {name}")
    for kind in ("names", "words")
    for package, names in LIST[kind].items()
    for name in names
]


def is_there(package: str, kind: str, name: str) -> bool:
    """Return whether the installed package has what an entry of the list names."""
    if kind == "names":
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return False
        return True
    folder = Path(importlib.util.find_spec(package).origin).parent
    kinds = ("*.py", "*.so", "*.dylib", "raylet")
    grep = ["grep", "-rqwF", *(f"--include={kind}" for kind in kinds)]
    return not subprocess.run([*grep, "-e", name, folder], timeout=TIMEOUT_S).returncode


def users(name: str, kind: str) -> list[str]:
    """Return the files of this repository that use it, perhaps with a prefix."""
    word = name.rpartition(".")[2] if kind == "names" else name
    files = ["*.py", "*.ipynb", ":!tests/test_private_names.py"]
    grep = ["git", "grep", "-lF", "--untracked", "-e", word, "--", *files]
    done = subprocess.run(
        grep, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(("package", "kind", "name"), USED)
def test_an_undocumented_name_is_still_there_and_used(package, kind, name):
    used_by = users(name, kind)
    assert is_there(package, kind, name), f"gone, and needed by {used_by}"
    assert used_by, "nothing uses it: take it off the list"


@pytest.mark.parametrize(
    ("package", "kind", "name"),
    [
        ("torch", "names", "torch._C._made_up"),
        ("ray", "names", "ray._made.up"),
        ("ray", "words", "RAY_TRAIN_MADE_UP"),
        ("ray", "words", "etrics_report"),  # half a word
    ],
)
def test_a_name_that_is_gone_is_seen(package, kind, name):
    assert not is_there(package, kind, name)
