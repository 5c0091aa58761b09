"""What a line of an old recipe does today; and empty stand-ins for what it imports."""

import re
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ray.util.annotations import RayDeprecationWarning
from ray.util.debug import reset_log_once

# What old pages have above the line.
BEFORE = """
import ray
from ray import train, tune
from ray.air import session
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
def train_func(config): pass
"""
# What Python says of a name or an argument that it does not find.
GONE = (
    r"cannot import name|No module named|no attribute|unexpected keyword|required pos"
)


def today(line: str, here: str | Path) -> tuple[str, str]:
    """Run a line of Ray code; returns what happens, as one word, and what is said of it.

    The word is "works"; "refused", if Ray raises an error; "gone", if Python does not find
    a name or an argument; "ignored", if Ray does nothing, or returns a default, and warns.
    What is said is the first sentence of the message.

    Args:
        line: the code; the names that old pages import are there.
        here: a folder, which the line may use by this name.
    """
    names = {"here": str(here)}
    exec(BEFORE, names)
    reset_log_once()  # else Ray gives a warning once per process
    word, said = "works", ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(line, names)
        except Exception as error:
            said = re.sub(r" \(.*\.py\)", "", str(error))  # where Ray is installed
            said = re.sub(r"<class '(\S+)'>", r"`\1`", said)
            word = "gone" if re.search(GONE, said) else "refused"
    for message in (str(warning.message) for warning in warned):
        if "is meant to only be called" in message:  # by a Tuner or a Trainer
            word, said = "ignored", message.partition("Trainer. ")[2]
    if word == "works" and any(
        issubclass(w.category, RayDeprecationWarning) for w in warned
    ):
        said = "deprecated"
    return word, said.partition("\n")[0].partition(". ")[0].rstrip(".")


class _Class(type):
    """A class that has every attribute: each is a class of this kind."""

    def __getattr__(cls, name: str) -> "_Class":
        return _empty(name)


def _empty(name: str) -> _Class:
    if name.startswith("__"):  # Python itself looks for such names, and does without
        raise AttributeError(name)
    return _Class(name, (), {})


class _Module(ModuleType):
    """A module from which every name can be imported: each is an empty class."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "99"  # newer than any that a library asks for

    def __getattr__(self, name: str) -> _Class:
        return _empty(name)


class _Finder:
    """Find the packages of these names, and all that is in them, before Python does."""

    def __init__(self, packages: Sequence[str]):
        self.packages = packages

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


def stand_in(*packages: str) -> None:
    """Let imports of these packages find stand-ins, also if they are installed.

    For a process of its own: what was imported from a stand-in stays one.
    """
    sys.meta_path.insert(0, _Finder(packages))  # type: ignore[arg-type]
