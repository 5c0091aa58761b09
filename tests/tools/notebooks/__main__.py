"""Execute, record and link the notebooks.

python -m tests.tools.notebooks tour [NOTEBOOK ...]   # execute copies, print the proofs
python -m tests.tools.notebooks record [NOTEBOOK ...] # execute in place, save outputs
python -m tests.tools.notebooks link                  # after a new title: links alone
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from tqdm import tqdm

from tests.tools import notebooks
from tests.tools.notebooks.execution import execute, record
from tests.tools.notebooks.navigation import link
from tests.tools.notebooks.outline import report


def tour(paths: list[Path]) -> int:
    """Execute copies of notebooks and print what each one proved; 1 if one failed."""
    root = notebooks.ROOT
    build = root / "build" / "notebooks"
    cells = {p: len(nbformat.read(p, as_version=4).cells) for p in paths}
    rows, failures = [], []
    with tqdm(total=sum(cells.values()), unit="cell") as progress:
        for path in paths:
            progress.set_description(path.stem)
            start, before = time.monotonic(), progress.n
            try:
                copy = execute(path, {}, lambda **_: progress.update())
            except RuntimeError as error:
                failures.append(f"Failed: {error}")
                proved = ["failed"]
            else:
                proved = notebooks.proofs(copy)
                target = build / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(copy, target)
            progress.update(before + cells[path] - progress.n)
            rows.append((path, time.monotonic() - start, proved))
    width = max(len(str(path.relative_to(root))) for path in paths)
    print(f"\n{'notebook':<{width}} {'seconds':>7}  proved")
    for path, seconds, proved in rows:
        name = str(path.relative_to(root))
        for number, line in enumerate(proved or ["-"]):
            first = f"{name:<{width}} {seconds:>7.0f}"
            print(f"{' ' * len(first) if number else first}  {line}")
    print(f"\n{report(paths)}")
    print(
        "\n".join(failures) or f"\nExecuted copies are in {build.relative_to(root)}/."
    )
    return bool(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("tour", "record", "link"))
    parser.add_argument("notebooks", nargs="*", type=Path)
    args = parser.parse_args()
    known = notebooks.all_notebooks() + notebooks.electives()
    route = notebooks.all_notebooks() if args.command == "tour" else known
    paths = [path.resolve() for path in args.notebooks] or route
    unknown = [str(path) for path in paths if path not in known]
    if unknown:
        print(f"Not a notebook of the workshop: {', '.join(unknown)}.", file=sys.stderr)
        return 2
    try:
        return {"tour": tour, "record": record, "link": link}[args.command](paths) or 0
    except RuntimeError as error:
        print(f"Failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
