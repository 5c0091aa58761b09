"""utils.parity names the mistake, and says nothing of what is right."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.programs import Program, training
from utils import parity

BOTH = ("classifier", "language model")
# What is right, in both families unless its options name one.
RIGHT = {
    "GroupNorm or tied weights": {},
    "averaged by hand": {"averaging": "by hand"},
    "dropout seeded per rank": {"dropout": 0.3},
    "augmentation seeded per rank": {"augment": "torch"},
    "augmentation by NumPy": {"augment": "numpy"},
    "augmentation by random": {"augment": "python", "dropout": 0.1},
    "noise in the step": {"augment": "in the step"},
    "two optimizers": {"optimizer": "two"},
    "frozen backbone": {"parts": "frozen backbone"},
    "uneven last batch dropped": {"items": 26},
    "uneven last batch kept, by one rank each": {"items": 30, "drop_last": False},
    "accumulation": {"accumulate": "right"},
    "accumulation with no_sync": {"accumulate": "no_sync"},
    "schedule per step": {"schedule": "per step", "optimizer": "SGD"},
    "clipped by the norm of all": {"clip": "right"},
    "clipped by hand": {"clip": "by hand"},
    "loss over N, then summed": {"averaging": "sum", "loss": "over N"},
    "frozen BatchNorm": {"norm": "batch, frozen"},
    "an averaged buffer": {"counter": "averaged"},
    "no DataLoader": {"order": "own batches", "set_epoch": False},
    "FSDP2": {"averaging": "FSDP2"},
    "FSDP2, clipped": {"averaging": "FSDP2", "clip": "right"},
    "sharded optimizer": {"optimizer": "sharded"},
    "a loss over all tokens": {"family": "language model", "loss": "of all tokens"},
    "DDP seeds the model differently": {"start": "per rank"},
}
# The names that are to be found, and what makes them.
MISTAKES = {
    "summed": ["summed", {"averaging": "sum"}],
    "no averaging": ["not averaged", {"averaging": "none"}],
    "never synced": ["not averaged", {"accumulate": "never synced"}],
    "divided twice": ["divided twice", {"loss": "over N"}],
    "every rank all": ["items", {"order": "every rank all"}],
    "own seeds": ["items", {"order": "own seeds"}],
    "padded": ["items", {"items": 25, "drop_last": False}],
    "no set_epoch": ["same order", {"set_epoch": False}],
    "batch per rank": ["global batch", {"batch": "per rank"}],
    "blocks": ["other order", {"order": "blocks"}],
    "BatchNorm": ["batch statistics", {"norm": "batch"}],
    "BatchNorm, no statistics": [
        "batch statistics",
        {"norm": "batch, without statistics"},
    ],
    "contrastive": ["batch statistics", {"loss": "contrastive"}],
    "same dropout": ["same noise", {"dropout": 0.3, "noise_seed": "same"}],
    "same augmentation": ["same noise", {"augment": "torch", "noise_seed": "same"}],
    "same by NumPy": ["same noise", {"augment": "numpy", "noise_seed": "same"}],
    "same by random": ["same noise", {"augment": "python", "noise_seed": "same"}],
    "unseeded": ["unseeded noise", {"augment": "python", "noise_seed": "by chance"}],
    "uneven": ["unequal batches", {"order": "uneven"}],
    "unequal steps": ["unequal batches", {"order": "unequal steps", "items": 25}],
    "own tokens": [
        "unequal batches",
        {"family": "language model", "loss": "of own tokens"},
    ],
    "own start": ["start", {"start": "per rank", "averaging": "by hand"}],
    "start by chance": ["start", {"start": "by chance"}],
    "own buffer": ["buffers", {"counter": "own"}],
    "all but one": ["parameter not averaged", {"averaging": "all but one"}],
    "made late": ["parameter not averaged", {"parts": "made late"}],
    "trained late": ["parameter not averaged", {"parts": "trained late"}],
    "schedule per rank": ["schedule", {"schedule": "per rank"}],
    "schedule on rank 0": ["schedule", {"schedule": "only rank 0"}],
    "rate by N": ["schedule", {"schedule": "by world size", "optimizer": "SGD"}],
    "clipped first": ["clipping", {"averaging": "by hand", "clip": "before averaging"}],
    "clipped first by hand": [
        "clipping",
        {"averaging": "by hand", "clip": "by hand before averaging"},
    ],
    "fake shards": ["shards nothing", {"averaging": "fake shards"}],
    "zeroed": ["accumulation", {"accumulate": "zeroed"}],
    "cut": ["accumulation", {"accumulate": "cut"}],
    "update per rank": ["accumulation", {"accumulate": "per rank"}],
}
PAIRS = {
    "summed, no set_epoch": [
        "summed", "same order", {"averaging": "sum", "set_epoch": False},
    ],
    "summed, clipped first": [
        "summed", "clipping", {"averaging": "sum", "clip": "before averaging"},
    ],
    "summed, BatchNorm": [
        "summed", "batch statistics", {"averaging": "sum", "norm": "batch"},
    ],
    "summed, padded": [
        "summed", "items", {"averaging": "sum", "items": 25, "drop_last": False},
    ],
    "no averaging, schedule": [
        "not averaged", "schedule", {"averaging": "none", "schedule": "per rank"},
    ],
    "BatchNorm, no set_epoch": [
        "batch statistics", "same order", {"norm": "batch", "set_epoch": False},
    ],
    "BatchNorm, same dropout": [
        "batch statistics", "same noise",
        {"norm": "batch", "dropout": 0.3, "noise_seed": "same"},
    ],
    "own start, all but one": [
        "start", "parameter not averaged",
        {"start": "per rank", "averaging": "all but one"},
    ],
    "zeroed, schedule": [
        "accumulation", "schedule", {"accumulate": "zeroed", "schedule": "per rank"},
    ],
    "uneven, summed": [
        "unequal batches", "summed", {"order": "uneven", "averaging": "sum"},
    ],
    "made late, same dropout": [
        "parameter not averaged", "same noise",
        {"parts": "made late", "dropout": 0.3, "noise_seed": "same"},
    ],
    "own seeds, no averaging": [
        "items", "not averaged", {"order": "own seeds", "averaging": "none"},
    ],
}  # fmt: skip
