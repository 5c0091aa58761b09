"""Run a notebook from a fresh kernel, end what it leaves behind, and record its outputs."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

from tests.tools import notebooks
from tests.tools.notebooks.navigation import with_navigation
from tests.tools.notebooks.outline import report

CELL_TIMEOUT_S = 900
# What a recorded notebook and its comparison have in common: CPU, one thread, own Ray.
RECORDING_ENVIRONMENT = {
    "WORKSHOP_MODE": "smoke",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": "local",
}


def execute(
    path: Path,
    environment: dict[str, str],
    on_cell: Callable[..., None] | None = None,
    cell_timeout: float = CELL_TIMEOUT_S,
) -> nbformat.NotebookNode:
    """Run a notebook from a fresh kernel in its own folder, and return the executed copy.

    Raises:
        RuntimeError: a cell failed; says which notebook and cell.
    """
    notebook = nbformat.read(path, as_version=4)
    running: list[int] = []
    client = NotebookClient(
        notebook,
        timeout=cell_timeout,
        startup_timeout=CELL_TIMEOUT_S,
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
            f"{path.relative_to(notebooks.ROOT)}, cell {running[-1]}: {reason}"
        ) from error
    finally:
        end_left_over(marker)
    return notebook


def end_left_over(marker: dict[str, str]) -> None:
    """End the processes that were started with `marker` and left behind.

    `marker` is an environment variable that a kernel, and so all its children, have:
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


def without_widgets(notebook: nbformat.NotebookNode) -> None:
    """Drop sliders, which are alive in JupyterLab only: a recording holds no state."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = (output.get("data", {}) for output in cell.outputs)
            alive = [any("widget-view" in kind for kind in data) for data in shown]
            cell.outputs = [o for o, a in zip(cell.outputs, alive) if not a]


def record(paths: list[Path]) -> None:
    """Execute notebooks in smoke mode and save them with clean outputs."""
    for path in tqdm(paths, desc="record", unit="notebook"):
        notebook = execute(path, RECORDING_ENVIRONMENT)
        without_traceback(notebook)
        without_widgets(notebook)
        for cell in notebook.cells:  # when JupyterLab last ran it (docs/lab)
            cell.metadata.pop("execution", None)
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
    print(report(paths))
