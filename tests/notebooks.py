"""Find, execute, record and link the notebooks.

python -m tests.notebooks tour                     # execute copies, print what was proved
python -m tests.notebooks record [NOTEBOOK ...]    # execute in place, save outputs
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
CELL_TIMEOUT_S = 300
PROOF = "Proved: "
SECONDS = ROOT / "build" / "seconds_per_cell.json"  # of runs under nbval
NAVIGATION = re.compile(r"^.*<!-- navigation -->.*\n*", re.MULTILINE)
# What a recorded notebook and its comparison have in common: CPU, one thread, own Ray.
RECORDING_ENVIRONMENT = {
    "WORKSHOP_MODE": "smoke",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": "local",
}


def all_notebooks() -> list[Path]:
    """The notebooks in reading order; a part's solutions come last."""
    return sorted(ROOT.glob("0[123]-*/*.ipynb"))


def note_seconds(by_test: dict[str, float]) -> None:
    """Keep the seconds per cell of all notebooks that a run under nbval has executed whole.

    Of the others stays what an earlier run noted; `noted_seconds` drops what is stale.
    """
    noted = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    for path in all_notebooks():
        sources = _code(path)
        name = path.relative_to(ROOT).as_posix()
        cells = [f"{name}::Cell {number}" for number in range(len(sources))]
        if all(cell in by_test for cell in cells):
            seconds = [by_test[cell] for cell in cells]
            noted[name] = {"sources": _digest(sources), "seconds": seconds}
            SECONDS.parent.mkdir(exist_ok=True)
            SECONDS.write_text(json.dumps(noted, indent=1))


def noted_seconds() -> dict[str, list[tuple[str, float]]]:
    """Source and seconds of every cell, by notebook, where it has not changed since."""
    noted = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    found = {}
    for path in all_notebooks():
        name, sources = path.relative_to(ROOT).as_posix(), _code(path)
        if noted.get(name, {}).get("sources") == _digest(sources):
            found[name] = list(zip(sources, noted[name]["seconds"]))
    return found


def _code(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def _digest(sources: list[str]) -> str:
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def proofs(notebook: nbformat.NotebookNode) -> list[str]:
    """What the notebook printed in lines that begin with "Proved: "."""
    outputs = (o for c in notebook.cells for o in c.get("outputs", []))
    lines = (line for o in outputs for line in o.get("text", "").splitlines())
    return [line.removeprefix(PROOF) for line in lines if line.startswith(PROOF)]


def title(path: Path) -> str:
    """The first heading of a notebook."""
    for cell in nbformat.read(path, as_version=4).cells:
        heading = re.search(r"^# (.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return heading[1]
    raise ValueError(f"{path} has no heading: give its first cell a line '# Title'.")


def navigation(path: Path) -> str:
    """The line that links a notebook to its neighbours."""
    notebooks = all_notebooks()
    here = notebooks.index(path)
    links = ["[Contents](../README.md)"]
    if here > 0:
        links.insert(
            0, f"[← {title(notebooks[here - 1])}]({_link(notebooks[here - 1])})"
        )
    if here + 1 < len(notebooks):
        links.append(f"[{title(notebooks[here + 1])} →]({_link(notebooks[here + 1])})")
    # Not in front: Markdown takes a line that begins with a comment as HTML, links and all.
    return " | ".join(links) + " <!-- navigation -->"


def with_navigation(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Put the navigation line on top of the first cell and at the end of the last."""
    line = navigation(path)
    if notebook.cells[-1].cell_type != "markdown":
        notebook.cells.append(nbformat.v4.new_markdown_cell(id="navigation"))
    first, last = notebook.cells[0], notebook.cells[-1]
    first.source = line + "\n\n" + NAVIGATION.sub("", first.source).strip()
    last.source = (NAVIGATION.sub("", last.source).strip() + "\n\n" + line).strip()


def execute(
    path: Path, environment: dict[str, str], on_cell: Callable[..., None] | None = None
) -> nbformat.NotebookNode:
    """Run a notebook from a fresh kernel in its own folder, and return the executed copy.

    Raises:
        RuntimeError: a cell failed; says which notebook and cell.
    """
    notebook = nbformat.read(path, as_version=4)
    running: list[int] = []
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        # else each kernel warns that it talks to us unencrypted, on this machine
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        on_cell_start=lambda cell, cell_index: running.append(cell_index),
        on_cell_complete=on_cell,
    )
    marker = {"WORKSHOP_KERNEL": uuid.uuid4().hex}
    try:
        client.execute(env=os.environ | environment | marker)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(
            f"{path.relative_to(ROOT)}, cell {running[-1]}: {reason}"
        ) from error
    finally:
        end_left_over(marker)
    return notebook


def end_left_over(marker: dict[str, str]) -> None:
    """End the processes that a notebook started and left behind.

    `marker` is an environment variable that its kernel, and so all its children, have:
    Ray's processes lead sessions of their own and outlive a kernel that is killed.
    """
    for process in psutil.process_iter():
        try:
            if marker.items() <= process.environ().items():
                process.kill()
        except psutil.Error:  # ended meanwhile, or of another user
            pass


def without_traceback(notebook: nbformat.NotebookNode) -> None:
    """Keep the last line of each traceback: the others name the recording machine."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}"]


def record(paths: list[Path]) -> None:
    """Execute notebooks in smoke mode and save them with clean outputs."""
    for path in tqdm(paths, desc="record", unit="notebook"):
        notebook = execute(path, RECORDING_ENVIRONMENT)
        without_traceback(notebook)
        with_navigation(path, notebook)
        notebook.metadata = nbformat.from_dict(
            {
                "kernelspec": {
                    "display_name": "Python (Ray Train)",
                    "language": "python",
                    "name": "python3",
                },
                "language_info": {"name": "python"},
            }
        )
        temporary = path.with_suffix(".tmp")
        nbformat.write(notebook, temporary)
        temporary.replace(path)


def link(paths: list[Path]) -> None:
    """Write the navigation of notebooks anew, without executing them."""
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        with_navigation(path, notebook)
        nbformat.write(notebook, path)


def tour(paths: list[Path]) -> int:
    """Execute copies of all notebooks and print what each one proved; 1 if one failed."""
    build = ROOT / "build" / "notebooks"
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
                proved = proofs(copy)
                target = build / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(copy, target)
            progress.update(before + cells[path] - progress.n)
            rows.append((path, time.monotonic() - start, proved))
    width = max(len(str(path.relative_to(ROOT))) for path in paths)
    print(f"\n{'notebook':<{width}} {'seconds':>7}  proved")
    for path, seconds, proved in rows:
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(proved or ["-"]):
            start = (
                f"{name:<{width}} {seconds:>7.0f}" if number == 0 else " " * (width + 8)
            )
            print(f"{start}  {line}")
    print(
        "\n".join(failures) or f"\nExecuted copies are in {build.relative_to(ROOT)}/."
    )
    return bool(failures)


def _link(path: Path) -> str:
    return f"../{path.parent.name}/{path.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("tour", "record", "link"))
    parser.add_argument("notebooks", nargs="*", type=Path)
    args = parser.parse_args()
    paths = [path.resolve() for path in args.notebooks] or all_notebooks()
    unknown = [str(path) for path in paths if path not in all_notebooks()]
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
