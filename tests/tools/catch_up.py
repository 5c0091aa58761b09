"""Put a solved copy of a lesson, with outputs, beside the learner's, and never over it.

    python -m tests.tools.catch_up 02-ddp-pytorch-ray/02_ray_train_ddp.ipynb

The lesson is that of this clone's commit, whatever the learner did to theirs. Outputs are
the recorded ones, so this takes a second. "Run All Above" in the copy brings its kernel to
the place where the class is.
"""

import argparse
import copy
import os
import re
import sys
from pathlib import Path

import nbformat

from tests.tools import notebooks
from tests.tools.book.exercises import CHECK
from tests.tools.notebooks import SOLVED
from tests.tools.update import git, text
from utils.errors import BadInput

# A lesson has a Ray already: its solutions start none, and do not end it.
OWN_RAY = re.compile(r"^(?:start_ray\(.*\)|ray\.shutdown\(\))\n?", re.MULTILINE)


def original(path: Path, root: Path) -> nbformat.NotebookNode:
    """Return a notebook as the workshop has it, without what a learner did to it.

    Raises:
        BadInput: this is no clone, or its commit has no such notebook.
    """
    name = path.resolve().relative_to(root.resolve()).as_posix()
    # a seat of a hub is no clone, and says where the lessons are that nobody changes
    lessons = Path(os.environ.get("WORKSHOP_LESSONS", root))
    if not (root / ".git").exists() and (lessons / name).exists() and lessons != root:
        return nbformat.read(lessons / name, as_version=4)
    commit = text(root, "merge-base", "HEAD", "@{upstream}") or "HEAD"
    wrong = f"The lesson as it was written, {name}, is not here"
    content = git(root, "show", f"{commit}:{name}", wrong=wrong)
    return nbformat.reads(content.decode(), as_version=4)


def solutions(notebook: nbformat.NotebookNode) -> tuple[list, dict[str, list]]:
    """Return the cell that imports, and of each exercise the cells that solve it."""
    first, found, group = None, {}, []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if first is None:
            first = cell
            continue
        cell = copy.deepcopy(cell)
        cell.source = OWN_RAY.sub("", cell.source).strip()
        if cell.source:
            group.append(cell)
        if names := CHECK.findall(cell.source):
            found[names[0]], group = group, []
    return [first] if first else [], found


def solved(
    lesson: nbformat.NotebookNode, answers: nbformat.NotebookNode
) -> nbformat.NotebookNode:
    """Return a lesson whose exercises are replaced by their solutions."""
    imports, by_name = solutions(answers)
    cells, number_of_code = [], 0
    for cell in lesson.cells:
        names = CHECK.findall(cell.source) if cell.cell_type == "code" else []
        cells += by_name.get(names[0], [cell]) if names else [cell]
        number_of_code += cell.cell_type == "code"
        if cell.cell_type == "code" and number_of_code == 1:
            cells += imports  # what the solutions use
    result = copy.deepcopy(lesson)
    result.cells = copy.deepcopy(cells)
    for number, cell in enumerate(result.cells):
        cell.id = f"solved-{number}"
    return result


def free_name(path: Path) -> Path:
    """Return a name beside the lesson that no file has."""
    numbers = ["", *(f"-{n}" for n in range(2, 1000))]
    names = (path.with_name(f"{path.stem}{SOLVED}{n}.ipynb") for n in numbers)
    return next(name for name in names if not name.exists())


def catch_up(path: Path) -> Path:
    """Write the solved copy; returns where it is.

    Args:
        path: of a lesson, or its name alone, such as 01_ray_core.

    Raises:
        BadInput: there is no such lesson, or no commit to take it from.
    """
    root = notebooks.ROOT
    known = notebooks.all_notebooks() + notebooks.electives()
    known = [p for p in known if p.stem != "solutions"]
    chosen = [p for p in known if p == path.resolve() or p.stem == str(path)]
    if len(chosen) != 1:
        names = ", ".join(p.relative_to(root).as_posix() for p in known)
        raise BadInput(f"{path} is not a lesson: name one of {names}.")
    lesson = chosen[0]
    answers = original(lesson.with_name("solutions.ipynb"), root)
    target = free_name(lesson)
    nbformat.write(solved(original(lesson, root), answers), target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    try:
        target = catch_up(parser.parse_args().notebook)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target.relative_to(notebooks.ROOT)} is solved; yours is untouched.")
    print('Open it, go to where the class is, and choose "Run > Run All Above".')
    return 0


if __name__ == "__main__":
    sys.exit(main())
