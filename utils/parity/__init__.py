"""Prove that N workers train like one process, or name the mistake that keeps them from it.

    python -m utils.parity my_training.py

`my_training.py` defines the training by these names; run on its own it may do anything:

    def build_model(): ...                            # a module on the CPU; seed it here
    def build_optimizer(model): ...                   # whatever `train_step` needs
    def make_loader(rank, world_size, epoch): ...     # this rank's batches of an epoch
    def train_step(model, optimizer, batch): ...      # one step; may return the loss
    def wrap(model): ...                              # if not DistributedDataParallel

With two functions more the tool also stops it in its middle, and starts it anew:

    def save(folder, model, optimizer, epoch, step): ...  # `step` batches of it are done
    def load(folder, model, optimizer): ...               # returns epoch and step

The file may say in one line what the tool cannot know, as `PARITY = {"items": 1}`:

    "shards": True                     # each rank is to hold a share of the state
    "items": 1                         # which dimension of a batch is that of the items
    "shared_noise": True               # all ranks are to draw the same in a step
    "expected": ["batch statistics"]   # a finding that is known, and no reason to complain

One process and then 2 and 3 train for two epochs on this machine's CPUs, in float64 and
in float32, in processes of their own that talk through gloo. One process is a group of
one, wrapped by the same function. What all of them do is recorded at each update, and
compared: the answer is "equal", or the first tensor at the first step where not, or that it
cannot be judged, and why. A mistake has a name only where what was recorded fits it.

Three things are taken out first, as they can equal one process in no program: dropout,
draws for an item (which are tied to the item instead), and rounding (a step computes in
float64 throughout, also what asks for bfloat16). Noise is judged in a run of its own.
`torch.compile` leaves a model as it is here, so that each operator is seen.

Status of the command: 0 if N workers equal one, 1 if not, or if there is a mistake all the
same, 2 if the file cannot be used, 3 if it cannot be judged.

The package needs torch alone. Modules, from the bottom up: `zero` (DeepSpeed's engine),
`sketches` (numbers that stand for a tensor), `training`, `randomness`, `precision`,
`batches`, `recording` (one rank, one run), `ranks`, `groups` (one process and N),
`comparing`; the mistakes, of `items`, `averaging`, `content`, `noise` and of what is
`held`; their table, `diagnosing`; `reporting`, `restarts`, `checking`, `command`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checking import check, check_all
    from .command import main
    from .comparing import Distances, distances
    from .diagnosing import Finding
    from .recording import Record, Records, Update, record, watch
    from .reporting import Report, judge
    from .training import BadInput, Training

__all__ = [
    "BadInput", "Distances", "Finding", "Record", "Records", "Report", "Training",
    "Update", "check", "check_all", "distances", "judge", "main", "record", "watch",
]  # fmt: skip
_MODULES = ("checking", "command", "comparing", "diagnosing", "recording", "reporting",
            "training")  # fmt: skip


def __getattr__(name: str):
    """Import what is asked for: `ranks` alone, which needs no torch, costs nothing else."""
    if name in __all__:
        for module in map(import_module, (f"{__name__}.{each}" for each in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
