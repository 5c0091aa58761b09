"""The commands that the READMEs and docs/ print, and which tests run or cover them.

A test marked `runs(command)` types that very command, as `typed` gives it. One marked
`covers(command)` tries what it does in another way: with fewer ranks, or a stub. CI runs
some itself, and tests/test_script_lines.py all those that start a script.
"""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

from tests import workflow
from tests.tools.notebooks import ROOT

PAGES = (
    ROOT / "README.md",
    *sorted(ROOT.glob("0*/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
)
SHELLS = {"", "bash", "sh", "console"}  # what may stand behind ``` above commands
# A network, a name, and what the tests do by naming .venv/bin.
NOT_RUN = {
    "git clone ADDRESS_OF_THIS_PAGE workshop",
    "cd workshop",
    "source .venv/bin/activate",
}
SCRIPT = re.compile(r"\b(train|launch)_\w+\.(py|sh)\b")


def commands(text: str, folder: Path = ROOT) -> list[tuple[str, Path]]:
    """Return the commands of a page in Markdown, and the folder in which each is typed."""
    found, start = [], folder
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language not in SHELLS:
            continue
        folder = start
        for line in block.splitlines():
            for command in re.split(r"&&|;|\|", line.split("  #")[0]):
                if (command := command.strip()) and not command.startswith("#"):
                    found.append((command, folder))
                    if command.startswith("cd ") and command not in NOT_RUN:
                        folder = (folder / command.removeprefix("cd ")).resolve()
    return found


# Once each, where two pages have the same line.
COMMANDS = list(
    dict.fromkeys(each for p in PAGES for each in commands(p.read_text(), p.parent))
)


def typed(command: str) -> list[str]:
    """Return the words of a command that stands in a README.

    Raises:
        LookupError: no README has it.
    """
    if command not in {there for there, _ in COMMANDS}:
        raise LookupError(f"No README has the command {command!r}.")
    return shlex.split(command)


def targets() -> list[str]:
    """Return what `make` can be asked for, in the order of its help."""
    makefile = (ROOT / "Makefile").read_text()
    return re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()


@cache
def marked(mark: str) -> list[tuple[str, str, ast.AST]]:
    """Return (command, test, its code) for all that tests are marked with."""
    found = []
    for path in sorted(ROOT.glob("tests/test_*.py")):
        for test in ast.walk(ast.parse(path.read_text())):
            for each in getattr(test, "decorator_list", []):
                if ast.unparse(each).startswith(f"pytest.mark.{mark}("):
                    for argument in each.args:
                        command = ast.literal_eval(argument)
                        found.append((command, f"{path.name}::{test.name}", test))
    return found


def types(test: ast.AST, command: str) -> bool:
    """Return whether the code of a test calls `typed` with this command."""
    calls = (node for node in ast.walk(test) if isinstance(node, ast.Call))
    return any(
        ast.unparse(call.func) in ("typed", "readme.typed")
        and [ast.literal_eval(a) for a in call.args] == [command]
        for call in calls
    )


def covered() -> dict[str, list[str]]:
    """Return the tests that cover each command without typing it."""
    found = {}
    for command, test, _ in marked("covers"):
        found.setdefault(command, []).append(test)
    return found


def script_lines() -> list[tuple[Path, list[str]]]:
    """Return lines that start a script, with their folder; those of one run together.

    Those that a test only covers are left out: they need machines or data of the reader.
    """
    found: dict[tuple[Path, str], list[str]] = {}
    elsewhere = covered()
    for command, folder in COMMANDS:
        if SCRIPT.search(command) and command not in elsewhere:
            run = re.search(r"--checkpoint-dir (\S+)", command)
            found.setdefault((folder, run[1] if run else command), []).append(command)
    return [(folder, lines) for (folder, _), lines in found.items()]


def only_covered() -> dict[str, list[str]]:
    """Return the commands that neither a test nor CI types, and what covers each."""
    run = workflow.made() | {command for command, *_ in marked("runs")}
    return {c: tests for c, tests in covered().items() if c not in run}
