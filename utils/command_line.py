"""What the scripts share around the training: checks of arguments, finding a run."""

import time
from pathlib import Path

from utils.settings import check_writable, storage_path


def check_counts(**counts: int | None) -> None:
    """Check that numbers of the command line, such as `epochs`, are at least 1 if given.

    Raises:
        ValueError: one of them is not.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {count}, but has to be at least 1.")


def find_run(name: str, folder: Path | None, resume: bool) -> tuple[str, Path]:
    """Name and folder of a run: Ray resumes a run that has both in common with it.

    Without a `folder` it is a new run in `storage_path()`.

    Raises:
        ValueError: there is nothing to resume from, or a run that is not to be resumed.
        OSError: the run to resume is not there, or `folder` cannot be written to.
    """
    if not folder:
        if resume:
            raise ValueError(
                "--resume needs --checkpoint-dir: say where to resume from."
            )
        return f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}", storage_path()
    exists = (folder / name).exists()
    if resume and not exists:
        raise OSError(f"There is no run in {folder} to resume: leave out --resume.")
    if exists and not resume:
        raise ValueError(
            f"{folder} holds an earlier run: add --resume to go on from it, or name "
            "another folder."
        )
    check_writable(folder)
    return name, folder
