"""The folder of a run: which checkpoint is the newest, who saves there, what is kept.

A checkpoint is a file or a folder named after the steps done, as in `step-000050.pt`.
"""

import contextlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from utils.checkpoint_files import check_writable, write_whole
from utils.errors import BadInput

NAME = re.compile(r"step-\d+")
OWNER = ".script"  # a file in a run's folder: the name of the script that saves there
SAVING = ".saving-"  # begins the name of a folder that is written before Ray takes it


def steps(checkpoint: Path) -> int:
    """Return the number of steps in the name of a checkpoint."""
    return int(re.findall(r"\d+", checkpoint.name)[0])


def defining(args, *names: str) -> dict[str, object]:
    """Return the settings that define a training: the script, and options of `args`."""
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    for name, value in options.items():
        if isinstance(value, Path):
            options[name] = str(value)  # torch.load reads no other class by default
    return {"script": Path(sys.argv[0]).name} | options


def newest(
    folder: Path, is_whole: Callable[[Path], bool] = lambda path: True
) -> Path | None:
    """Return the whole checkpoint with the most steps in `folder`; None if there is none.

    By number: as text, step-999950 would beat step-1000000.
    """
    return max(filter(is_whole, _all(folder)), key=steps, default=None)


def prepare(folder: Path, fresh: bool, script: str | None = None) -> None:
    """Create the folder of a run if needed, and check that it can be written to.

    Args:
        folder: of the run's checkpoints.
        fresh: whether it may not hold anything yet.
        script: its name, if it saves in this very folder, and calls `claim`. With Ray
            Train each script has a folder of its own in there: None.

    Raises:
        BadInput: it holds something and should not, it is another script's, or it cannot
            be written to.
    """
    if fresh and folder.is_dir() and {path.name for path in folder.iterdir()} - {OWNER}:
        raise BadInput(
            f"{folder} is not empty, and --fresh starts in an empty folder: name another "
            "one, or leave out --fresh to go on from what is there."
        )
    check_writable(folder)
    if script and _all(folder) and (of := _owner(folder)) not in (None, script):
        raise BadInput(
            f"{folder} holds checkpoints of {of}, and this is {script}: name another "
            "folder. Nothing was changed."
        )


def claim(folder: Path, script: str, loaded: Path | None) -> None:
    """Note that the checkpoints in a folder are of `script`. Call it on one rank.

    Another script would take them for what a killed save has left, and delete them.

    Args:
        folder: of the run's checkpoints.
        script: its name.
        loaded: the checkpoint from which it goes on, if there is one.

    Raises:
        BadInput: nobody has claimed what is there, and none of it could be loaded.
    """
    of = _owner(folder)
    if of is None and not loaded and (there := _all(folder)):
        raise BadInput(
            f"{folder} holds {max(there, key=steps).name}, and no whole checkpoint of "
            f"{script}: name another folder, or delete that. Nothing was changed."
        )
    if of != script:
        with write_whole(folder / OWNER) as file:
            file.write(script.encode())


def begin(
    folder: Path, done: str | None, is_finished: bool = False, images: int | None = 0
) -> str:
    """Return the line that says where a run begins.

    Args:
        folder: of its checkpoints.
        done: what the newest one has, as in "epoch 3"; None if there is none.
        is_finished: whether nothing is left to train.
        images: how many of the next epoch it has, too.
    """
    if not done:
        return f"starts anew: {folder.name} holds no checkpoint yet"
    if is_finished:
        return f"nothing is left to train after {done} of {folder.name}: ask for more"
    more = f", and {images} images of the next" if images else ""
    return f"goes on after {done} of {folder.name}{more}"


def check_same(checkpoint: Path, saved: dict | None, now: dict | None) -> None:
    """Check that a checkpoint is of this very run: what defines the training is equal.

    Args:
        checkpoint: it is named in the sentence.
        saved: the settings in it, by name.
        now: those of the command line.

    Raises:
        BadInput: some are different; says which.
    """
    saved, now = saved or {}, now or {}
    names = sorted(saved.keys() | now.keys())
    different = [n for n in names if saved.get(n) != now.get(n)]
    if different:
        was = ", ".join(f"{name} {saved.get(name)}" for name in different)
        wanted = ", ".join(f"{name} {now.get(name)}" for name in different)
        raise BadInput(
            f"{checkpoint} is of a run with {was}, and this one has {wanted}: use the same "
            "settings to go on from it, or name another folder. Nothing was changed."
        )


def keep_newest(
    folder: Path, number: int, is_whole: Callable[[Path], bool] = lambda path: True
) -> None:
    """Delete all whole checkpoints but the newest `number`, and what is cut off.

    Call it on one rank, while no rank saves.
    """
    remove_cut_off(folder, is_whole)
    for path in sorted(filter(is_whole, _all(folder)), key=steps)[:-number]:
        _delete(path)


def remove_cut_off(folder: Path, is_whole: Callable[[Path], bool]) -> None:
    """Delete what a killed save has left: as large as a checkpoint, and of no use.

    Call it on one rank, while no rank saves. It prints which checkpoints it deletes.
    """
    for path in folder.glob(".step-*.tmp"):
        _delete(path)
    for path in _all(folder):
        if not is_whole(path):
            print(f"{path} does not count as whole: deleting it")
            _delete(path)


def _owner(folder: Path) -> str | None:
    """Return the name of the script that has claimed a folder, if one has."""
    try:
        return (folder / OWNER).read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(
            f"{folder / OWNER} cannot be read ({error.strerror}): name another folder."
        ) from error


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if NAME.match(path.name)]


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
