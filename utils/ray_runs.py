"""Runs of Ray Train: Ray keeps their checkpoints, and starts them again."""

import contextlib
import json
import re
import secrets
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import ray
import ray.train
import torch.distributed as dist
from pyarrow import fs
from ray.train import CheckpointConfig, FailureConfig, RunConfig
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError

from utils import failures, runs, settings
from utils.checkpoint_files import explain_writing
from utils.errors import BadInput
from utils.runs import Run, lock

SAVING = ".saving-"  # begins the name of a folder that is written before Ray takes it
# as Ray names what it takes; a folder of somebody else's may be called checkpoint_best
NAME = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")
LIST = "checkpoint_manager_snapshot.json"  # Ray's, of a run's checkpoints


class RayRun(Run):
    """A Run whose checkpoints are reported to Ray Train, which keeps those of rank 0.

    Its folder is that of the run, as of `run_config`: a path, or an address (s3://, gs://).
    """

    def __init__(self, folder: Path | str, name: str, save, load, settings=None):
        stop_file = StopFile(folder)
        super().__init__(Path(folder), name, save, load, settings, stop_file=stop_file)
        # beside what Ray keeps, where that is a path: so it is moved on one disk
        self._beside = None if is_address(folder) else folder

    def _notice(self) -> Callable[[], object]:
        return ray.train.get_preemption_info

    def _find(self) -> None:
        """Ray finds it; the folder is of the program that starts the workers."""

    def resume(self, *parts) -> None:
        """Load what was reported last, after a failure or by an earlier start."""
        checkpoint = ray.train.get_checkpoint()
        with checkpoint.as_directory() if checkpoint else contextlib.nullcontext() as f:
            self.found = f and Path(f)
            super().resume(*parts)

    def _save(self) -> None:
        """Report metrics and a checkpoint: every rank does, and Ray waits for all."""
        self._check_weights()
        with (
            explain_writing("The checkpoint"),
            TemporaryDirectory(dir=self._beside, prefix=SAVING) as folder,
        ):
            self._write(Path(folder))
            checkpoint = None
            if dist.get_rank() == 0:
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            done = {"epoch": self.epoch, "items": self.items, "steps": self.steps}
            ray.train.report(done | self.metrics, checkpoint=checkpoint)


class StopFile:
    """A file in a run's folder that asks its workers to stop, also at an address."""

    def __init__(self, folder: Path | str):
        self.system, root = fs.FileSystem.from_uri(str(folder))
        self.path = f"{root}/stop"
        # a question to a bucket takes as long as a step
        self.every_s = runs.NOTICE_EVERY_S if is_address(folder) else 0.0
        self.looked = time.monotonic()

    def exists(self) -> bool:
        """Return whether it is there; False where it is too early to look again."""
        if time.monotonic() - self.looked < self.every_s:
            return False
        self.looked = time.monotonic()
        return self.system.get_file_info(self.path).type != fs.FileType.NotFound

    def touch(self) -> None:
        """Ask."""
        self.system.open_output_stream(self.path).close()

    def unlink(self) -> None:
        """Ask no more."""
        with contextlib.suppress(FileNotFoundError):
            self.system.delete_file(self.path)


def is_address(folder: Path | str) -> bool:
    """Return whether it is s3://... or the like, and no path."""
    return "://" in str(folder)


def folder_of(name: str, checkpoint_dir: Path | str | None) -> Path | str:
    """Return a run's folder: --checkpoint-dir, or one that no other run has.

    Raises:
        BadInput: it cannot be written to, or another process trains in it (at an address
            nobody knows of the other).
    """
    if checkpoint_dir:
        if isinstance(checkpoint_dir, Path):
            lock(checkpoint_dir)
        clean(checkpoint_dir)
        return checkpoint_dir
    started = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}"
    folder = settings.storage_path() / f"{name}_{started}"
    folder.mkdir()  # raises if somebody has it
    return folder


def run_config(folder: Path | str, keep: int | None = None) -> RunConfig:
    """Return the configuration of a run that goes on in its folder, once after a failure.

    Of its checkpoints the newest `keep` are kept. Bad input ends it at once.
    """
    storage_path, _, name = str(folder).rstrip("/").rpartition("/")
    return RunConfig(
        name=name,
        storage_path=storage_path or "/",
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=keep),
        callbacks=[failures.NoRestartOnBadInput()],
    )


def fit(trainer, folder: Path | str, read_again: Callable | None = None):
    """Call `fit`, and pass on a SIGTERM to the workers of a RayRun; returns its Result.

    Raises:
        BadInput: what a worker or a task said; see `failures.in_a_sentence`.
    """
    with passed_on(StopFile(folder)), failures.in_a_sentence(read_again):
        return trainer.fit()


def end(result, checkpoint_dir: Path | str | None) -> None:
    """Say how a run ended; where it was stopped, end the program, as `runs.exit_with`.

    Args:
        result: of `fit`, whose function returned `RayRun.summary()`.
        checkpoint_dir: where the same command goes on; None: nowhere.
    """
    summary = result.return_value
    saved = f"he last checkpoint is in {result.checkpoint and result.checkpoint.path}"
    if not summary["stopped"]:
        summary["says"] = f"Trained. T{saved}"
    elif not checkpoint_dir and result.checkpoint:
        summary["says"] = (
            f"{summary['says'].partition(':')[0]}: t{saved}, but the same command starts "
            "anew, as --checkpoint-dir names no folder"
        )
    runs.exit_with(summary)


@contextlib.contextmanager
def passed_on(file: StopFile) -> Iterator[None]:
    """Let SIGTERM to this program make `file`, where its workers look, while inside.

    Once: a second SIGTERM ends it as usual.
    """
    file.unlink()  # of a run that was killed before

    def pass_on(*_):
        signal.signal(signal.SIGTERM, before)
        file.touch()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        file.unlink()


def clean(folder: Path | str) -> None:
    """Remove from a run's folder what killed saves left: all that Ray does not list.

    It is as large as a checkpoint, and Ray never takes it for one. Where a path has no
    list, as after a kill before the first was written, what can be read is listed:
    `torch.save` writes zip archives, and a file that was cut off is none. From Ray's list
    goes what somebody has deleted: it would end every start.
    Call it while nobody trains in it.

    Raises:
        BadInput: the address cannot be used; the list was cut off, or is of another
            version of Ray.
    """
    try:
        system, root = fs.FileSystem.from_uri(str(folder))
        if is_address(folder):
            system.create_dir(root)  # that of a path was made when it was locked
        there = system.get_file_info(fs.FileSelector(root, allow_not_found=True))
    except (OSError, pa.ArrowException) as error:
        first = " ".join(str(error).split()).partition(". ")[0]
        raise BadInput(
            f"--checkpoint-dir {folder} cannot be used ({first}): name another."
        ) from error
    folders = {each.base_name for each in there if each.type == fs.FileType.Directory}
    whole = {name for name in folders if NAME.fullmatch(name)}
    has_list = any(each.base_name == LIST for each in there)
    if not has_list and not is_address(folder):
        files = {name: Path(folder, name, "checkpoint.pt") for name in whole}
        whole = {name for name, file in files.items() if zipfile.is_zipfile(file)}
        if has_list := bool(whole):
            _write_list(system, root, _new_list(sorted(whole)))
    if has_list:
        whole = _listed(system, root, whole)
    for name in folders - whole:
        if NAME.fullmatch(name) or name.startswith(SAVING):
            system.delete_dir(f"{root}/{name}")


def _new_list(names: list[str]) -> dict:
    """Return what Ray would have noted of these checkpoints, the newest last."""
    results = [{"checkpoint_dir_name": name, "metrics": {}} for name in names]
    noted = {"ray_version": ray.__version__, "current_report_index": len(names)}
    noted |= {"checkpoint_results": results, "latest_checkpoint_result": results[-1]}
    noted |= {"checkpoint_report_indices": [*range(len(names))]}
    noted |= {"pending_training_results": [], "pending_validation_specs": []}
    kinds = "validated", "timed_out_validation", "failed_validation"
    return noted | {f"{kind}_checkpoint_dir_names": [] for kind in kinds}


def _write_list(system: fs.FileSystem, root: str, noted: dict) -> None:
    with system.open_output_stream(f"{root}/{LIST}.part") as file:
        file.write(json.dumps(noted).encode())
    system.move(f"{root}/{LIST}.part", f"{root}/{LIST}")


def _listed(system: fs.FileSystem, root: str, there: set[str]) -> set[str]:
    """Return which checkpoints Ray lists; those that are not there leave its list."""
    try:
        with system.open_input_stream(f"{root}/{LIST}") as file:
            noted = json.loads(file.read())
        pairs = zip(noted["checkpoint_results"], noted["checkpoint_report_indices"])
        kept = [(r, i) for r, i in pairs if r["checkpoint_dir_name"] in there]
        if len(kept) < len(noted["checkpoint_results"]):
            results = [result for result, _ in kept]
            noted |= {"checkpoint_results": results, "pending_training_results": []}
            noted |= {"checkpoint_report_indices": [index for _, index in kept]}
            noted |= {"pending_validation_specs": []}
            noted["latest_checkpoint_result"] = results[-1] if results else None
            _write_list(system, root, noted)
        ray.train.Result.from_path(root, system)  # as Ray itself will read it
        return {result["checkpoint_dir_name"] for result, _ in kept}
    except (
        CheckpointManagerInitializationError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        first = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise BadInput(
            f"Ray's list of checkpoints in {root} does not fit ({first}): name another "
            f"folder, or delete {root} to start anew."
        ) from error
