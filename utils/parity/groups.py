"""Groups of ranks that train: one process and N, a deadline, and how they failed."""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import re
import signal
import sysconfig
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from .ranks import Died, Late, Ranks
from .recording import Record, Run, Trainer
from .training import BadInput, Payload

SHAKE = 1e-7  # about the epsilon of float32
HERE = str(Path(__file__).parent)


class Failure(NamedTuple):
    """How a group of ranks ended before its time."""

    kind: str  # "bad", "raised", "died" or "hangs"
    sentence: str


Runs = dict[str, Record]  # of one rank


@dataclass(frozen=True)
class Job:
    """What each rank of a group does.

    Attributes:
        payloads: trainings, one after another.
        run: of what all runs are made: epochs, limit, device.
        runs: those to make, by name; None are those that a verdict needs.
    """

    payloads: list[Payload]
    run: Run
    runs: dict[str, Run] | None = None

    def noisy(self, payload: Payload) -> Run:
        """Return the run whose noise is as the program draws it."""
        by_chance = bool(payload.path)
        return replace(self.run, dtype=torch.float32, pin=False, by_chance=by_chance)

    def runs_of(self, payload: Payload, say: "Say") -> Runs:
        """Make all runs of one training on this rank; the first shows which are needed."""

        def train(name: str, run: Run) -> Record:
            say.name = name
            return Trainer(payload.load, run, say).train()

        if self.runs:
            return {name: train(name, run) for name, run in self.runs.items()}
        runs = {"float64": train(str(self.run.dtype)[len("torch.") :], self.run)}
        if self.run.dtype != torch.float64 and dist.get_world_size() == 1:
            # what rounding does to it: weights that begin an epsilon away
            runs["shaken"] = train("float32, shaken", replace(self.run, shake=SHAKE))
        if runs["float64"].batch_norms:
            frozen = replace(self.run, freeze=True)
            runs["frozen"] = train("float64, BatchNorm frozen", frozen)
        runs["float32"] = train("float32", replace(self.run, dtype=torch.float32))
        drew = torch.tensor([float(runs["float64"].drew)], device=self.run.device)
        dist.all_reduce(drew, dist.ReduceOp.MAX)
        if drew:
            noisy = self.noisy(payload)
            runs["noise"] = train("float32 with noise", noisy)
            if dist.get_world_size() == 1:
                runs["noise again"] = train("float32 with noise", noisy)
        return runs


class Say:
    """Tell the process that started this rank where it stands."""

    def __init__(self, pipe):
        self.pipe, self.name = pipe, ""

    def __call__(self, where: str) -> None:
        self.pipe.send_bytes(pickle.dumps(("at", f"{where} ({self.name})")))


def _be_rank(rank: int, size: int, folder: str, job: Job, timeout: float, pipe) -> None:
    """Do what a process does: join the group, train, and send the records."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile leaves modules as they are
    if job.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    # What N ranks print several times over; the last line says why one ended.
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(f"{folder}/stacks{rank}", "w")  # noqa: SIM115  # as long as it lives
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    # A server of its own would not know the training's file, nor its group.
    mp.set_start_method("fork", force=True)
    say = Say(pipe)
    run = job.run
    try:
        if run.device == "cuda":
            torch.cuda.set_device(rank)
            job = replace(job, run=replace(run, device=f"cuda:{rank}"))
        dist.init_process_group(
            "gloo" if run.device == "cpu" else "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout + 60),  # the deadline comes first
        )
        found = [job.runs_of(payload, say) for payload in job.payloads]
        answer: tuple = ("done", found)
    except BadInput as problem:
        answer = ("bad", str(problem))
    except (Exception, SystemExit) as problem:
        what = " ".join(f"{type(problem).__name__}: {problem}".split())
        answer = ("raised", f"{what}{_line_of(problem)}")
    pipe.send_bytes(pickle.dumps(answer))
    pipe.recv_bytes()  # stays, so that no other rank sees it go; it is ended from outside


def _is_foreign(filename: str) -> bool:
    """Return whether a file is of Python, of an installed package, or of this one."""
    library = sysconfig.get_paths()["stdlib"]
    return filename.startswith((library, HERE, "<")) or "site-packages" in filename


def _line_of(problem: BaseException) -> str:
    """Return the last line of the training's own code that led to an exception."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not _is_foreign(frame.filename):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _where(process, folder: str, rank: int) -> str:
    """Return the line of the training's code in which a rank waits."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    stack = _read(f"{folder}/stacks{rank}")
    for name, line in re.findall(r'File "([^"]+)", line (\d+)', stack):
        if not _is_foreign(name):
            return f", in {Path(name).name}, line {line}"
    return ""


def _read(file: str) -> str:
    """Return what a rank wrote; nothing of one that ended before it began to."""
    return Path(file).read_text(errors="replace") if Path(file).exists() else ""


def _last_line(folder: str, rank: int) -> str:
    lines = _read(f"{folder}/log{rank}").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f"; it printed last: {said[-1][:200]}" if said else ""


def train_group(job: Job, size: int, timeout: float) -> list[list[Runs]] | Failure:
    """Train in `size` processes: by rank, the runs of each training.

    A rank that raises or dies ends them all, and so do `timeout` seconds in which none
    begins a step.
    """
    places, results = ["at its start"] * size, {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, size, folder, job, timeout) for rank in range(size)]
        with Ranks(_be_rank, arguments, daemon=False) as ranks:
            try:
                for rank, message in ranks.messages(timeout, of_each=True):
                    kind, what = pickle.loads(message)
                    of = f"rank {rank} of {size}"
                    if kind == "at":
                        places[rank] = what
                    elif kind == "done":
                        results[rank] = what
                        ranks.done.add(rank)
                    elif kind == "bad":
                        return Failure("bad", what + _of_log(what, folder, rank))
                    else:
                        return _why(ranks, rank, f"{places[rank]}: {what}", places)
            except Died as died:
                of = f"rank {died.rank} of {size}"
                said = f"{of} died with exit code {died.code} {places[died.rank]}"
                return Failure("died", said + _last_line(folder, died.rank))
            except Late as late:
                where = "; ".join(
                    f"rank {rank} of {size} is {places[rank]}"
                    + _where(ranks.processes[rank], folder, rank)
                    for rank in late.ranks
                )
                said = f"no rank has moved for {timeout:g} seconds: {where}"
                return Failure("hangs", said)
    return [results[rank] for rank in range(size)]


def _of_log(sentence: str, folder: str, rank: int) -> str:
    """Return what a program printed that ended by itself, as argparse does."""
    return _last_line(folder, rank) if "SystemExit" in sentence else ""


def _why(ranks: Ranks, rank: int, what: str, places: list[str]) -> Failure:
    """Return how a rank failed, or which one died, which others notice as an error."""
    size = len(places)
    for other, process in enumerate(ranks.processes):
        process.join(timeout=0.2)
        if process.exitcode is not None:
            died = f"rank {other} of {size} died with exit code {process.exitcode}"
            return Failure("died", f"{died} {places[other]}")
    return Failure("raised", f"rank {rank} of {size} raised {what}")
