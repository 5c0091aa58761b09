"""Own a run: where it stands, what it saves, when it stops, and how it goes on.

    run = Run(folder, "my_training", save_checkpoint, load_checkpoint)
    run.resume(model, optimizer)  # from the newest checkpoint, if there is one
    for epoch in run.epochs(3):
        for images, labels in run.batches(loader):
            ...
        run.done(loss)

Copy this file beside a script of yours: it needs torch, and nothing else of this workshop.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

try:
    from utils.checkpoint_files import explain_reading, explain_writing
    from utils.errors import BadInput
except ImportError:  # taken along: a full disk or a damaged file is a traceback then
    BadInput = SystemExit  # type: ignore[misc, assignment]

    def explain_reading(path):
        return contextlib.nullcontext()

    explain_writing = explain_reading

# As a shell reports a program that SIGTERM has ended: not 0, so a scheduler that restarts
# failed jobs starts this one again.
EXIT_STATUS = 128 + signal.SIGTERM
NOTHING, SAVE, STOP = range(3)
NOTICE_EVERY_S = 5.0  # Ray Train looks for drained nodes as often
# `train-000050`, or what DeepSpeed's converter makes of it
NAME = re.compile(r"([^.].*)-(\d{6,})(-universal)?")
STATE, RANDOM = "run.json", "random.pt"  # in each checkpoint, beside what `save` writes
LOCK = ".lock"
DIVERGED = (
    "the training has diverged, and this was not saved. Lower the learning rate, and start "
    "anew in another folder."
)


class Run:
    """A training that goes on where it was, after a stop or a kill.

    Every rank makes one, once its process group exists, and calls its methods at the same
    points as the others. A checkpoint is a folder; it gets its name, that of the run and
    the steps done, when all ranks have written. So whatever has that name is whole.

    Args:
        folder: of the checkpoints, which all ranks see; None: nothing is saved.
        name: of the training: a folder may hold checkpoints of several.
        save: `save(checkpoint, *parts)` writes into a folder, on every rank. It may return
            a future: then training goes on meanwhile.
        load: `load(checkpoint, *parts)` reads what `save` has written.
        settings: what defines the training: it does not go on with others.
        keep: how many checkpoints are kept, the newest.
        stop_file: it `exists()` once the run is asked to stop (None: SIGTERM asks).

    Raises:
        BadInput: the folder cannot be written to, or another process trains in it.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        save: Callable,
        load: Callable,
        settings: dict[str, Any] | None = None,
        keep: int = 2,
        stop_file: Any = None,
    ):
        self.folder, self.name, self.keep = folder, name, keep
        self._save_parts, self._load_parts, self._parts = save, load, ()
        as_saved = json.dumps({"script": name} | (settings or {}), default=str)
        self.settings = json.loads(as_saved)
        # done: whole epochs, items (images) of the next one, and steps of all epochs
        self.epoch = self.items = self.steps = 0
        self.metrics: dict[str, float] = {}
        self.interrupted = False  # the epoch has ended early, as ranks were asked
        self._stopped = ""  # where, if it was asked to stop before its end
        self._stop = Stop(stop_file, self._notice())
        self._group = self._stop.group
        self._writing: tuple | None = None  # a checkpoint that has no name yet
        self.found = self._find()

    def resume(self, *parts) -> None:
        """Load the newest checkpoint, if there is one.

        Args:
            parts: what `save` and `load` get: the model, the optimizer.

        Raises:
            BadInput: it is damaged, or of a run with other settings.
        """
        self._parts = parts
        if not self.found:
            return
        with explain_reading(self.found):
            state = json.loads((self.found / STATE).read_text())
            check_same(self.found, state["settings"], self.settings)
            self._load_parts(self.found, *parts)
            set_random_states(torch.load(self.found / RANDOM, weights_only=True))
            self.epoch, self.items = state["epoch"], state["items"]
            self.steps, self.metrics = state["steps"], state["metrics"]

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the number of each epoch that is left, from 0 on; end it with `done`."""
        self._begin("epoch", total)
        while self._goes_on():
            self.interrupted, self._started = False, time.perf_counter()
            yield self.epoch
        self._end()

    def batches(self, loader: Iterable) -> Iterator:
        """Yield an epoch's batches, and after each let ranks agree whether to stop.

        Where the loader's sampler is a ResumableSampler, it begins after the items that
        were trained before a stop. A DataLoader's processes, which augment, get a seed of
        this rank and epoch.
        """
        inner: Any = getattr(loader, "_dataloader", loader)  # Ray Train wraps it
        sampler: Any = getattr(inner, "sampler", None)
        length, first = None, 0
        self._resumable = isinstance(sampler, ResumableSampler)
        if self._resumable:
            sampler.start, global_batch = 0, inner.batch_size * dist.get_world_size()
            length = len(inner)
            # by items, as the number of ranks may be another one now
            first = min(self.items // global_batch, length - 1)
            sampler.start = first * inner.batch_size
        if isinstance(inner, DataLoader):
            inner.generator = inner.generator or torch.Generator()
            mine = f"{torch.initial_seed()} {dist.get_rank()} {self.epoch} {first}"
            inner.generator.manual_seed(random.Random(mine).getrandbits(62))
        for done, batch in enumerate(loader, first + 1):
            yield batch
            self.steps += 1
            if self._resumable:
                self.items = done * global_batch
            asked = self._stop.agreed()
            # a notice has a stream go on: it saves nothing in the middle of an epoch
            if done != length and asked and (self._resumable or asked == STOP):
                self.interrupted = True
                self._after = f" after {done} of {length} steps" if length else ""
                return

    def done(self, loss: float, **metrics: float | None) -> None:
        """End an epoch, or what was trained of it before a stop: save it, and say so.

        Args:
            loss: a mean of all ranks, equal on each.
            metrics: to keep and print; None: not measured.

        Raises:
            BadInput: the loss is no number. Nothing is saved then.
        """
        self.metrics = {"loss": self._finite(loss)}
        self.metrics |= {n: v for n, v in metrics.items() if v is not None}
        if self.interrupted:
            if self._resumable:
                self._save()
            return
        self.epoch, self.items = self.epoch + 1, 0
        self._save()
        self._say(f"{time.perf_counter() - self._started:.1f} s")

    def each_step(
        self, total: int, save_every: int, print_every: int = 20
    ) -> Iterator[int]:
        """Yield the number of each step that is left, from 0 on; end it with `stepped`.

        A loss that is printed costs a GPU a wait for its step; 0: none is.
        """
        self._begin("step", total)
        self._save_every, self._print_every = save_every, print_every
        self._since, self._started = self.steps, time.perf_counter()
        while self._goes_on():
            yield self.steps
        self._end()

    def stepped(self, loss: torch.Tensor, **per_step: float) -> None:
        """End a step; where it is due, or ranks are asked to, save.

        Args:
            loss: of this rank's share of the batch.
            per_step: what to print per second, such as `tokens`, in all ranks' batches.

        Raises:
            BadInput: the loss, when it is looked at, is no number. Nothing is saved then.
        """
        self.steps += 1
        prints = self._print_every and self.steps % self._print_every == 0
        asked = self._stop.agreed()
        is_due = (
            asked or self.steps % self._save_every == 0 or self.steps == self._total
        )
        if is_due or prints:
            mean = torch.tensor(float(loss), dtype=torch.float64)
            mean /= dist.get_world_size()
            dist.all_reduce(mean, group=self._group)
            self.metrics = {"loss": self._finite(mean.item())}
        if prints:
            took = time.perf_counter() - self._started
            took /= self.steps - self._since
            self._since, self._started = self.steps, time.perf_counter()
            each = [f"{n / took:,.0f} {name}/s" for name, n in per_step.items()]
            self._say(f"{1000 * took:.0f} ms per step", *each)
        if is_due:
            self._save()
        elif self._writing and self._all(self._writing[1].done()):
            self._name_it()

    # What a variant may do in another way, as `utils.ray_runs` does:

    def _find(self) -> Path | None:
        """Return the checkpoint to go on from, on every rank what rank 0 finds."""
        folder = self.folder
        if not folder:
            return None

        def look() -> Path | None:
            lock(folder)
            for left in folder.glob(f".{self.name}-*"):  # by a save that was killed
                shutil.rmtree(left, ignore_errors=True)
            return newest(folder, self.name)

        found = self._from_rank_0(look)
        deadline = time.monotonic() + 10  # a network disk may show it late
        while not (folder / LOCK).exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        if not self._all((folder / LOCK).exists()):
            raise BadInput(
                f"The folder {folder} is not seen by all ranks: name one that all nodes "
                "share."
            )
        return found

    def _save(self) -> None:
        if not self.folder:
            return
        self._check_weights()
        self._name_it()  # the one before: one at a time
        checkpoint = self.folder / f"{self.name}-{self.steps:06d}"
        part = checkpoint.with_name(f".{checkpoint.name}.part")
        with explain_writing(checkpoint):
            if dist.get_rank() == 0:
                # a network disk may keep one that was deleted
                part.mkdir(exist_ok=True)
            dist.barrier(self._group)
            self._writing = part, self._write(part), checkpoint
        if not self._writing[1]:
            self._name_it()

    def _notice(self) -> Callable[[], object] | None:
        """Return what says that a node will be gone soon, if Ray Train started this."""
        if "ray" not in sys.modules or "TORCHELASTIC_RUN_ID" in os.environ:
            return None  # under torchrun SIGTERM says it
        import ray.train

        return ray.train.get_preemption_info if ray.is_initialized() else None

    # Shared:

    def _write(self, part: Path):
        """Write a checkpoint's files; returns a future if that goes on meanwhile."""
        states = random_states(self._group)  # of all ranks
        if dist.get_rank() == 0:
            names = "epoch", "items", "steps", "metrics", "settings"
            state = {name: getattr(self, name) for name in names}
            (part / STATE).write_text(json.dumps(state, indent=1))
            torch.save(states, part / RANDOM)
        return self._save_parts(part, *self._parts)

    def _name_it(self) -> None:
        """Give what was written its name, once all ranks have; then keep the newest."""
        if not self._writing:
            return
        (part, future, checkpoint), self._writing = self._writing, None
        with explain_writing(checkpoint):
            if future:
                future.result()
            dist.barrier(self._group)  # all have written
            if dist.get_rank() == 0:
                on_the_disk(part)
                if checkpoint.exists():
                    _delete(checkpoint)
                part.rename(checkpoint)
                for old in checkpoints(checkpoint.parent, self.name)[: -self.keep]:
                    _delete(old)
            dist.barrier(self._group)

    def _begin(self, unit: str, total: int) -> None:
        self._unit, self._total = unit, total
        if dist.get_rank() or not self.folder:
            return
        done = f"{unit} {self._done()} of {self.folder.name!r}"
        line = f"goes on after {done}"
        if not self.found:
            line = f"starts anew: {self.folder.name!r} holds no checkpoint yet"
        elif not self._goes_on():
            line = f"nothing is left to train after {done}: ask for more"
        elif self.items:
            line += f", and {self.items} items of the next"
        print(line, flush=True)

    def _done(self) -> int:
        return self.epoch if self._unit == "epoch" else self.steps

    def _goes_on(self) -> bool:
        return self._done() < self._total and self._stop.asked != STOP

    def _end(self) -> None:
        """Wait for what is being saved; say that the run was stopped, if it was."""
        self._name_it()
        done, total = self._done(), self._total
        if done >= total:
            return
        where = f"after {self._unit} {done} of {total}"
        if self.interrupted:
            where = f"in {self._unit} {done + 1} of {total}{self._after}"
        then = "saved, and the same command goes on from there"
        if self.interrupted and not self._resumable:
            then = f"the same command begins that {self._unit} anew"
        if not self.folder:
            then = "nothing was saved, as --checkpoint-dir names no folder"
        self._stopped = f"stopped {where}: {then}"

    @property
    def stopped(self) -> bool:
        """Whether ranks were asked to stop before the end, and have."""
        return bool(self._stopped)

    def summary(self, **metrics) -> dict[str, Any]:
        """Return where the run stands, what it has measured, and the line for `exit_with`.

        Args:
            metrics: measured after the last step.
        """
        where = {"epoch": self.epoch, "items": self.items, "steps": self.steps}
        measured = self.metrics | metrics
        says = f"{self._unit} {self._done()}: {in_words(measured)}" if metrics else ""
        ended = {"stopped": self.stopped, "says": self._stopped or says}
        return where | measured | ended

    def _say(self, *more: str) -> None:
        """Print on rank 0 what was measured."""
        if dist.get_rank() == 0:
            what = f"{self._unit} {self._done()}/{self._total}"
            print(f"{what}: {', '.join([in_words(self.metrics), *more])}", flush=True)

    def _finite(self, loss: float) -> float:
        if math.isfinite(loss):
            return loss
        self._name_it()  # what is still being written was whole
        raise BadInput(f"The loss is {loss} in step {self.steps}: {DIVERGED}")

    def _check_weights(self) -> None:
        """Check that all ranks' weights are numbers: the loss is of before the update."""
        models = [part for part in self._parts if isinstance(part, torch.nn.Module)]
        # of what is sharded, this rank's part
        mine: list[Any] = [
            getattr(p, "_local_tensor", p) for m in models for p in m.parameters()
        ]
        if not self._all(all(bool(p.isfinite().all()) for p in mine)):
            self._name_it()
            raise BadInput(f"A weight is no number after step {self.steps}: {DIVERGED}")

    def _from_rank_0(self, function: Callable[[], Any]) -> Any:
        """Return on every rank what it returns on rank 0, or raise what it says there."""
        found: list = [None]
        if dist.get_rank() == 0:
            try:
                found = [function()]
            except BadInput as problem:
                found = [problem]
        dist.broadcast_object_list(found, group=self._group)
        if isinstance(found[0], BadInput):
            raise found[0]
        return found[0]

    def _all(self, true: bool) -> bool:
        """Return whether it is true on all ranks."""
        counted = torch.tensor(int(true))
        dist.all_reduce(counted, dist.ReduceOp.MIN, group=self._group)
        return bool(counted)


def in_words(metrics: dict[str, float]) -> str:
    """Return metrics as they are printed."""
    return ", ".join(
        f"{name.replace('_', ' ')} {n:.3f}" if isinstance(n, float) else f"{name} {n}"
        for name, n in metrics.items()
    )


def exit_with(summary: dict) -> None:
    """Say on rank 0 how a run has ended; where it was stopped, end the program.

    Raises:
        SystemExit: it was stopped; its status tells a scheduler to start it again.
    """
    if summary["says"] and os.environ.get("RANK", "0") == "0":
        print(summary["says"])
    if summary["stopped"]:
        sys.exit(EXIT_STATUS)


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in the middle of an epoch.

    Source: torch/utils/data/distributed.py
    """

    start = 0  # of this rank's examples, how many to skip: they are not loaded

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.start, None)

    def __len__(self) -> int:
        return super().__len__() - self.start


class Stop:
    """What the ranks of this process group have been asked to do. Every rank makes one.

    Slurm, Kubernetes and clouds send SIGTERM some seconds before they kill; torchrun passes
    it on to its workers. Under Ray the program that called `fit` gets it, and tells its
    workers by a file in the storage that all of them see: see `passed_on`.

    Args:
        file: it `exists()` once they are asked to stop (None: SIGTERM asks, of torchrun).
        notice: `ray.train.get_preemption_info`, which says that a node will be gone soon.

    Source: https://docs.ray.io/en/latest/train/api/doc/ray.train.get_preemption_info.html
    """

    def __init__(self, file: Any = None, notice: Callable[[], object] | None = None):
        self.file, self.notice = file, notice
        self.told = False  # by SIGTERM, perhaps while ranks are agreeing
        self.asked, self.noticed, self.last_look = NOTHING, False, time.monotonic()
        # Ranks agree on CPUs: a GPU would first have to finish its step.
        self.group: Any = dist.new_group(backend="gloo")
        if file is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)

    def _sigterm(self, *_) -> None:
        self.told = True

    def agreed(self) -> int:
        """Return what all ranks are to do now: NOTHING, SAVE, or save and STOP.

        Every rank calls it after each step, and gets the same answer. SAVE comes once,
        when Ray says that it will lose a node; the run then starts again without it. Costs
        an all-reduce of two bytes over gloo, and every five seconds a question to Ray.
        """
        look = False
        if dist.get_rank() == 0:
            if self.file and self.file.exists():
                self.told = True
            is_due = time.monotonic() - self.last_look > NOTICE_EVERY_S
            look = bool(self.notice) and is_due
        asked = STOP if self.told else NOTHING
        said = torch.tensor([asked, look], dtype=torch.uint8)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        self.asked, look = said.tolist()
        if look and self.notice:  # all ranks have to ask together
            self.last_look = time.monotonic()
            if self.notice() and not self.noticed:
                self.noticed = True
                return max(self.asked, SAVE)
        return self.asked


def seed_rank(seed: int) -> None:
    """Seed what this rank draws from while it trains, each rank's differently.

    Call it after the model is built, whose weights have to be the same on all ranks.
    """
    seed = seed * 100_003 + dist.get_rank() + 1
    torch.manual_seed(seed)  # of a GPU, too
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_states(group=None) -> list[dict]:
    """Return where the random numbers of each rank stand; every rank calls it."""
    mine: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # else this would do it, also for a run on CPUs
        mine["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, numbers, *rest = sys.modules["numpy"].random.get_state()
        mine["numpy"] = [kind, numbers.tolist(), *rest]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group)
    return found


def set_random_states(by_rank: list[dict]) -> None:
    """Go on with this rank's random numbers where they were.

    On another number of ranks there is nothing to go on with: they stay as seeded.
    """
    if len(by_rank) != dist.get_world_size():
        return
    mine = by_rank[dist.get_rank()]
    torch.set_rng_state(mine["cpu"])
    random.setstate(mine["python"])
    if "cuda" in mine and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(mine["cuda"])
    if "numpy" in mine and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(mine["numpy"]))


def newest(folder: Path, name: str | None = None) -> Path | None:
    """Return the checkpoint with the most steps in `folder`; None if there is none."""
    found = checkpoints(folder, name)
    return found[-1] if found else None


def checkpoints(folder: Path, name: str | None = None) -> list[Path]:
    """Return a folder's checkpoints, of all trainings or of one, by their steps.

    By number: as text, 999950 would come after 1000000.
    """
    found = ((path, NAME.fullmatch(path.name)) for path in folder.glob("*/"))
    ours = [path for path, named in found if named and name in (None, named[1])]
    return sorted(ours, key=lambda path: (steps(path), path.name))


def steps(checkpoint: Path) -> int:
    """Return the number of steps in the name of a checkpoint."""
    return int(NAME.fullmatch(checkpoint.name)[2])  # type: ignore[index]


def check_same(checkpoint: Path, saved: dict, now: dict) -> None:
    """Check that a checkpoint is of this very run: what defines the training is equal.

    Raises:
        BadInput: some settings are different; says which.
    """
    names = sorted(saved.keys() | now.keys())
    different = [n for n in names if saved.get(n) != now.get(n)]
    if different:
        was = ", ".join(f"{name} {saved.get(name)}" for name in different)
        wanted = ", ".join(f"{name} {now.get(name)}" for name in different)
        raise BadInput(
            f"{checkpoint} is of a run with {was}, and this one has {wanted}: use the same "
            "settings to go on from it, or name another folder. Nothing was changed."
        )


_locked: dict[Path, int] = {}  # open files: closing one would give up its lock


def lock(folder: Path, wait_s: float = 10.0) -> None:
    """Create `folder` if needed, and keep it for this process, until that ends.

    The system gives up the lock of a process that is gone; one that is being killed has
    some seconds, and a machine that is gone has two minutes, as network disks take. Where
    the disk knows no locks there is none.

    Raises:
        BadInput: another process has it, or it cannot be written to.
    """
    path = folder.absolute() / LOCK
    if path in _locked and _is_at(path, _locked[path]):
        return  # else somebody has deleted the folder since
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BadInput(
            f"The folder {folder} cannot be written to ({error.strerror}): name another."
        ) from error
    began, host = time.monotonic(), socket.gethostname()
    while True:
        try:
            # of a process, not of its children, which would keep it alive
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                break
            by = path.read_text() or "another process"
            patience = wait_s if f" on host {host} " in by else 12 * wait_s
            if time.monotonic() - began > patience:
                os.close(file)
                raise BadInput(
                    f"The folder {folder} is in use by {by}: wait for its end, or name "
                    "another folder. Nothing was changed."
                ) from error
            time.sleep(0.2)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # of a full disk: it says no more than who
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on host {host} since {since}".encode())
    _locked[path] = file


def _is_at(path: Path, file: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file))


def on_the_disk(folder: Path) -> None:
    """Return when a folder is on the disk: else its name may come before its data."""
    for path in [*folder.rglob("*"), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint, which first loses its name: nobody sees half of it."""
    with contextlib.suppress(OSError):
        gone = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.gone"))
        shutil.rmtree(gone, ignore_errors=True)
