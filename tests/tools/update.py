"""Bring a correction of the lessons here, and keep what the learner has done.

    python -m tests.tools.update

Fetches the branch that this clone follows. A notebook is merged cell by cell: a corrected
cell is taken where the learner has not edited it, with its recorded output; every other
cell stays as it is, with the learner's outputs. Where both changed a cell, the corrected
one is put below the learner's. Whatever is changed is copied to build/before-update first.
Needs git and Python, and no package.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from utils.errors import BadInput

ROOT = Path(__file__).parents[2]
CORRECTED = "**Corrected since you edited the cell above.** This is how it is now:"
# What git says of a merge or rebase that has not ended.
UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge")
MOST_SECONDS = 300  # of one command of git; a slow network needs some of them


def git(root: Path, *arguments: str, wrong: str = "") -> bytes:
    """Return what a command of git prints.

    Raises:
        BadInput: it fails; says `wrong`, and git's last line.
    """
    # Asks for no password: nobody may be there to answer.
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=root,
            env=environment,
            capture_output=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"{wrong or 'Nothing was changed'}; git did not end in {MOST_SECONDS} s: "
            "look whether the network is there, and try again."
        ) from None
    except FileNotFoundError:
        raise BadInput("git is not installed: ask who runs this machine.") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
        raise BadInput(f"{wrong or 'Nothing was changed'}; git says: {lines[-1]}")
    return done.stdout


def text(root: Path, *arguments: str) -> str:
    """Return the line that a command of git prints, or "" where it fails."""
    try:
        return git(root, *arguments).decode().strip()
    except BadInput:
        return ""


def followed(root: Path) -> str:
    """Return the branch of a remote that this clone follows, such as origin/main.

    A clone that stands on a commit follows the remote's own first branch.

    Raises:
        BadInput: this is no clone, or it follows nothing.
    """
    git(root, "--version")
    there = text(root, "rev-parse", "--show-toplevel")
    if not there or Path(there).resolve() != root.resolve():
        raise BadInput(
            f"{root} is not a clone of git, so no correction can be fetched: clone the "
            "repository into another folder, and copy your notebooks beside its own."
        )
    for name in UNFINISHED:
        if Path(root, text(root, "rev-parse", "--git-path", name)).exists():
            raise BadInput(
                "A merge or rebase is not finished here: end it, or take it back with "
                "`git merge --abort` or `git rebase --abort`, then run this again."
            )
    branch = text(root, "rev-parse", "--abbrev-ref", "@{upstream}")
    branch = branch or text(root, "rev-parse", "--abbrev-ref", "origin/HEAD")
    if "/" not in branch:
        raise BadInput(
            "This clone follows no branch: name one, as in "
            "`git branch --set-upstream-to=origin/main`, then run this again."
        )
    return branch


def at(root: Path, commit: str, path: str) -> bytes | None:
    """Return a file as it is in a commit; None where that has none."""
    if not git(root, "ls-tree", "-z", "--name-only", commit, "--", path):
        return None
    return git(root, "cat-file", "blob", f"{commit}:{path}")


def cells_by_id(notebook: dict) -> dict[str, dict]:
    """Return a notebook's cells by their ids.

    Raises:
        ValueError: a cell has none, or two have the same.
    """
    ids = [cell.get("id") for cell in notebook["cells"]]
    if None in ids or max(Counter(ids).values(), default=0) > 1:
        raise ValueError("cells without an id of their own cannot be told apart")
    return dict(zip(ids, notebook["cells"]))


def said(cell: dict | None) -> tuple | None:
    """Return what a person writes into a cell: its kind and source."""
    return (cell["cell_type"], "".join(cell["source"])) if cell else None


def free_name(name: str, taken: set[str]) -> str:
    """Return the name, or if it is taken the first of NAME-2, NAME-3, ... that is not."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(n for n in itertools.chain([name], numbered) if n not in taken)


def merged_notebook(base: bytes, mine: bytes, new: bytes) -> bytes:
    """Return a notebook with the learner's cells, and the corrections since `base`.

    Raises:
        ValueError: one of them cannot be read as a notebook whose cells have ids.
    """
    try:
        notebooks = [json.loads(each) for each in (base, mine, new)]
        before, ours, after = map(cells_by_id, notebooks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    # Each cell of the lesson, and below it what goes with it; at the top, what comes first.
    blocks: dict[str | None, list[dict]] = {None: []}
    outdated: set[str] = set()  # what an earlier correction put here, as it was
    for name, corrected in after.items():
        own, old = ours.get(name), before.get(name)
        block = blocks[name] = []
        put = f"{name[:50]}-note", f"{name[:50]}-corrected"
        if said(old) != said(corrected):
            as_put = ("markdown", CORRECTED), said(old)
            was_put = zip(put, as_put, strict=True)
            outdated |= {each for each, was in was_put if said(ours.get(each)) == was}
        if own is None:
            # deleted on purpose, unless it is new or was corrected
            if old is None or said(old) != said(corrected):
                block.append(corrected)
        elif said(own) == said(corrected) or said(corrected) == said(old):
            block.append(own)
        elif said(own) == said(old):
            block.append(corrected)
        else:
            taken = (ours.keys() - outdated) | after.keys()
            of_note, of_cell = (free_name(each, taken) for each in put)
            note: dict[str, Any] = {"cell_type": "markdown", "id": of_note}
            note |= {"metadata": {}, "source": [CORRECTED]}
            block += [own, note, corrected | {"id": of_cell}]
    # What only the learner has goes below the lesson's cell that it followed.
    above = None
    for name, own in ours.items():
        if name in after:
            above = name
        elif name not in outdated and (
            # the lesson dropped it: it goes, if the learner had not touched it
            name not in before or said(own) != said(before[name])
        ):
            blocks[above].append(own)
    found = [cell for block in blocks.values() for cell in block]
    result = notebooks[1] | {"cells": found}
    return (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode()


def merged_text(root: Path, base: bytes, mine: bytes, new: bytes) -> bytes:
    """Return a text with the changes of both.

    Raises:
        ValueError: both changed the same lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("mine", "base", "new")]
        for file, content in zip(files, (mine, base, new)):
            file.write_bytes(content)
        try:
            return git(root, "merge-file", "-p", *map(str, files))
        except BadInput as error:
            raise ValueError("both changed the same lines") from error


def beside(path: Path) -> Path:
    """Return a free name beside a file for the learner's own version of it."""
    numbers = ["", *(f"-{n}" for n in range(2, 1000))]
    names = (path.with_name(f"{path.stem}-mine{n}{path.suffix}") for n in numbers)
    return next(name for name in names if not name.exists())


def update(root: Path = ROOT) -> list[str]:
    """Bring the branch that a clone follows here; returns what was done, in lines.

    Raises:
        BadInput: it cannot be done. Then nothing was changed.
    """
    branch = followed(root)
    remote = branch.partition("/")[0]
    git(root, "fetch", "--quiet", remote, wrong="The correction cannot be fetched")
    tip = text(root, "rev-parse", branch)
    here = text(root, "rev-parse", "HEAD")
    base = text(root, "merge-base", "HEAD", branch) or here
    if base == tip:
        return ["Nothing to update: this is the newest version."]
    changed = git(root, "diff", "--name-only", "--no-renames", "-z", base, tip)
    plan, lines = {}, []
    for path in filter(None, changed.decode().split("\0")):
        old, new = at(root, base, path), at(root, tip, path)
        file = root / path
        mine = file.read_bytes() if file.is_file() else None
        plan[path] = decide(root, path, old, mine, new)
    for path, (action, _) in plan.items():
        if action != "take":
            lines.append(f"{path}: {DONE[action]}")
    kept = root / "build" / "before-update" / time.strftime("%Y-%m-%d_%H-%M-%S")
    back_up(root, kept, plan)
    own_commits = text(root, "merge-base", "HEAD", branch) != here
    if own_commits:
        name = f"mine-{here[:10]}"
        git(root, "branch", "--force", name, here)
        lines.append(f"Your own commits are kept in the branch {name}.")
    for path, (action, content) in plan.items():
        carry_out(root, tip, path, action, content)
    git(root, "reset", "--quiet", "--mixed", tip)
    if {"requirements.txt", "constraints.txt"} & plan.keys():
        lines.append("The packages have changed: run `make setup`.")
    number = f"{len(plan)} file{'s' * (len(plan) != 1)}"
    lines.append(f"Updated {number}. What was there before is in {kept}.")
    return lines


DONE = {
    "merge": "corrected, and your cells and lines are kept",
    "aside": "corrected; yours did not fit in, and is beside it, with -mine in its name",
    "keep": "is no longer part of the workshop; you changed it, so yours stays",
    "take": "corrected",
    "drop": "is gone",
}


def decide(
    root: Path, path: str, old: bytes | None, mine: bytes | None, new: bytes | None
) -> tuple[str, bytes | None]:
    """Say what becomes of a file, and with which content if it is merged."""
    if new is None:
        return ("drop" if mine == old or mine is None else "keep"), None
    if mine is None or mine in (old, new):
        return "take", None
    if old is None:
        return "aside", None
    try:
        if path.endswith(".ipynb"):
            return "merge", merged_notebook(old, mine, new)
        return "merge", merged_text(root, old, mine, new)
    except ValueError:
        return "aside", None


def back_up(root: Path, kept: Path, plan: dict) -> None:
    """Copy every file that the plan touches, before anything is changed."""
    for path in plan:
        if (root / path).is_file():
            (kept / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, kept / path)


def carry_out(
    root: Path, tip: str, path: str, action: str, content: bytes | None
) -> None:
    """Change one file as decided."""
    file = root / path
    if action == "drop":
        file.unlink(missing_ok=True)
    elif action == "merge" and content is not None:
        temporary = file.with_name(f"{file.name}.tmp")
        temporary.write_bytes(content)
        shutil.copymode(file, temporary)
        temporary.replace(file)
    elif action in ("take", "aside"):
        if action == "aside":
            shutil.copy2(file, beside(file))
        git(root, "checkout", "--quiet", tip, "--", path)


def main() -> int:
    try:
        print("\n".join(update()))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 1
    print("Close open notebooks without saving, and open them again.")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
