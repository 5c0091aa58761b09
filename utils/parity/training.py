"""What is judged: the functions of a training, from a file or as they are."""

import contextlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

FUNCTIONS = {
    "build_model": "build_model()",
    "build_optimizer": "build_optimizer(model)",
    "make_loader": "make_loader(rank, world_size, epoch)",
    "train_step": "train_step(model, optimizer, batch)",
    "wrap": "wrap(model)",
    "save": "save(folder, model, optimizer, epoch, step)",
    "load": "load(folder, model, optimizer)",
}
OPTIONAL = ("wrap", "save", "load")


class BadInput(Exception):
    """Say in one sentence why a training cannot be judged, and how to mend that."""


@dataclass(frozen=True)
class Training:
    """What is judged, as functions; `python -m utils.parity` takes them from a file.

    Args:
        build_model: returns a module on the CPU, with equal weights at each call; so it
            seeds the generator itself.
        build_optimizer: gets the wrapped model, and returns what `train_step` needs: an
            optimizer, or several, with their schedulers, and what else has a state (an
            average of the weights, a teacher).
        make_loader: gets rank, world size and epoch, and returns this rank's batches. All
            ranks' batches of an update together are to be those of one process.
        train_step: gets wrapped model, optimizer and batch; takes a step, with all that
            belongs to it, and may return the loss.
        wrap: makes a strategy of a model; None is DistributedDataParallel.
        save: gets a folder, and how many batches of which epoch are done, and saves there
            all that the training needs to go on; called on all ranks.
        load: puts that back in a new process, also of another number of ranks, and returns
            the epoch and the number of its batches that are done.
        shards: whether each rank is to hold a share of the state only. Not needed for
            FSDP2 and ZeroRedundancyOptimizer.
        items: which dimension of the tensors of a batch is that of the items.
        shared_noise: whether all ranks are to draw the same numbers in a step.
        expected: names of findings that are known, and no reason to complain.
    """

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], Any]
    make_loader: Callable[[int, int, int], Iterable]
    train_step: Callable[[nn.Module, Any, Any], Any]
    wrap: Callable[[nn.Module], nn.Module] | None = None
    save: Callable[[str, nn.Module, Any, int, int], Any] | None = None
    load: Callable[[str, nn.Module, Any], tuple[int, int]] | None = None
    shards: bool = False
    items: int = 0
    shared_noise: bool = False
    expected: frozenset[str] = frozenset()


# What a file may say of its training, as `PARITY = {"items": 1}`: names of arguments. It is
# one name, as a program may have an ITEMS of its own.
SAID = ("shards", "items", "shared_noise", "expected")


@dataclass(frozen=True)
class Payload:
    """A training on its way to a rank: the path of a file, or pickled functions."""

    path: str | None = None
    pickled: bytes = b""

    def load(self) -> Training:
        """Return the training; a file is executed anew each time.

        Raises:
            BadInput: the file cannot be imported, or defines no training.
        """
        if not self.path:
            return pickle.loads(self.pickled)
        path = Path(self.path)
        _make_room(path)
        # The name by which its own child processes, as those of a DataLoader, find it.
        name = path.stem if _is_free(path) else f"training_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if not spec or not spec.loader:
            raise BadInput(f"{path} is not a file of Python: its name ends in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.argv = [self.path]  # as if it were started without options
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise BadInput(
                f"{path} cannot be imported: {what}. What a script does at its top "
                'level belongs under `if __name__ == "__main__":`.'
            ) from problem
        return _from_module(module, self.path)


def _make_room(path: Path) -> None:
    """Put the training's folder first, also where it has a package of our own name."""
    folder = str(path.parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    ours = __name__.partition(".")[0]
    theirs = (path.parent / f"{ours}.py", path.parent / ours / "__init__.py")
    here = Path(getattr(sys.modules.get(ours), "__file__", None) or "/").parent
    if any(each.exists() for each in theirs) and here != path.parent / ours:
        # Our modules have each other already, and each stays under its own long name.
        sys.modules.pop(ours, None)


def _is_free(path: Path) -> bool:
    known = sys.modules.get(path.stem)
    return known is None or getattr(known, "__file__", None) == str(path)


def _from_module(module: Any, path: str) -> Training:
    found = {}
    for name, call in FUNCTIONS.items():
        function = getattr(module, name, None)
        if function is None and name in OPTIONAL:
            continue
        if function is None:
            raise BadInput(f"{path} defines no {name}: add `def {call}`.")
        if not callable(function):
            raise BadInput(f"{name} in {path} is not a function: make it `def {call}`.")
        arguments = call[len(name) + 1 : -1].split(", ") if call[-2] != "(" else []
        with contextlib.suppress(ValueError):  # some callables show no signature
            try:
                inspect.signature(function).bind(*arguments)
            except TypeError:
                raise BadInput(
                    f"{name} in {path} takes other arguments: make it `def {call}`."
                ) from None
        found[name] = function
    said = dict(getattr(module, "PARITY", {}))
    if unknown := sorted(said.keys() - set(SAID)):
        raise BadInput(
            f"PARITY in {path} has {', '.join(unknown)}: it may have {', '.join(SAID)}."
        )
    if "expected" in said:
        if isinstance(said["expected"], str):
            said["expected"] = [said["expected"]]
        said["expected"] = frozenset(said["expected"])
    return Training(**found, **said)


def payload(training: Training | str | Path) -> Payload:
    """Return a training in a form that other processes can load.

    Raises:
        BadInput: there is no such file, or the functions cannot be pickled.
    """
    if isinstance(training, Training):
        try:  # cloudpickle also sends functions of a notebook
            from cloudpickle import dumps
        except ImportError:
            from pickle import dumps
        try:
            return Payload(pickled=dumps(training))
        except Exception as problem:
            raise BadInput(
                f"The functions cannot be sent to other processes ({problem}): define "
                "them in a file and give its path, or install cloudpickle."
            ) from problem
    path = Path(training)
    if not path.is_file():
        raise BadInput(f"There is no file {path}: name the file with your training.")
    return Payload(path=str(path.resolve()))
