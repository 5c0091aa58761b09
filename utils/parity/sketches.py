"""Sixty-four numbers that stand for a tensor, and how far such sketches are apart."""

import functools
import itertools
import math
from collections.abc import Iterable

import torch
from . import zero
from torch.distributed.tensor import DTensor

WIDTH = 64  # numbers that stand for a tensor
Sketches = dict[str, list[float]]  # by the name of the tensor


@functools.lru_cache(maxsize=100)
def _signs(length: int) -> torch.Tensor:
    """Return [length] numbers 1 and -1 that look random and are the same everywhere."""
    mixed = torch.arange(length) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * 2545247474239171083
    return (1 - 2 * ((mixed >> 40) & 1)).to(torch.int8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which is all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> list[float]:
    """Return at most WIDTH numbers that stand for a tensor, sharded or not.

    They are sums of its numbers with signs that look random: a linear map that keeps
    lengths nearly (a count sketch), so differences and ratios of sketches are those of
    the tensors, and no mistake can hide in it.

    Source: https://doi.org/10.1016/S0304-3975(03)00400-6
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = zero.weight(whole) if hasattr(whole, "ds_id") else whole  # of stage 3
    whole = whole.to_dense() if whole.is_sparse else whole
    flat = whole.detach().to("cpu", torch.float64).flatten()
    if len(flat) <= WIDTH:
        return flat.tolist()
    flat = flat * _signs(len(flat))
    rest = flat[len(flat) // WIDTH * WIDTH :]
    sums = flat[: len(flat) - len(rest)].view(-1, WIDTH).sum(0)
    sums[: len(rest)] += rest
    return sums.tolist()


@torch.no_grad()
def sketch_as_set(tensor: torch.Tensor) -> list[float]:
    """Return numbers that stand for the rows of a tensor, whatever their order.

    Of a queue, say, that ranks fill in another order. They are sums over the rows of their
    numbers, and of the squares and cubes of a random combination.
    """
    rows = tensor.detach().to("cpu", torch.float64)
    rows = rows.flatten(1) if rows.ndim > 1 else rows.reshape(-1, 1)
    mixed = rows @ _signs(rows.shape[1]).to(torch.float64)
    return [*sketch(rows.sum(0)), *((mixed**k).sum().item() for k in (1, 2, 3))]


def vector(sketches: Sketches, names: Iterable[str]) -> torch.Tensor:
    """Return the sketches of `names` as one vector."""
    numbers = itertools.chain.from_iterable(sketches[name] for name in names)
    return torch.tensor([*numbers], dtype=torch.float64)


def length(sketches: Sketches) -> float:
    """Return the length of all as one vector."""
    return math.hypot(*itertools.chain.from_iterable(sketches.values()))


def relative(ours: Sketches, theirs: Sketches) -> float:
    """Return the length of the difference over that of `theirs`, each as one vector."""
    if set(ours) != set(theirs):
        return math.inf
    a, b = vector(ours, theirs), vector(theirs, theirs)
    size = ((a - b).norm() / (b.norm() or 1.0)).item()
    return math.inf if math.isnan(size) else size


def apart(ours: Sketches, theirs: Sketches) -> tuple[float, str]:
    """Return the largest relative error of a tensor, and its name.

    A tensor counts as at least 1e-4 of the length of all: gradients that are zero but
    for rounding differ as much as they like.
    """
    if odd := sorted(set(ours) ^ set(theirs)):
        return math.inf, odd[0]
    floor, worst = 1e-4 * length(theirs), (0.0, "")
    for name, numbers in theirs.items():
        if len(ours[name]) != len(numbers):
            return math.inf, name
        scale = max(math.hypot(*numbers), floor) or 1.0
        size = math.dist(ours[name], numbers) / scale
        worst = max(worst, (math.inf if math.isnan(size) else size, name))
    return worst


def apart_each(ours: Sketches, theirs: Sketches) -> tuple[float, str]:
    """Do as `apart`, each tensor by its own size: of what has other units than the rest.

    A tensor counts as at least 1e-6 long: what is zero but for rounding is equal.
    """
    worst = (0.0, "")
    for name, numbers in theirs.items():
        size = math.inf
        if len(ours.get(name, [])) == len(numbers):
            size = math.dist(ours[name], numbers) / max(math.hypot(*numbers), 1e-6)
        worst = max(worst, (math.inf if math.isnan(size) else size, name))
    return worst


def changes(after: Sketches, before: Sketches) -> Sketches:
    """Return what has been added to each tensor that there was before."""
    return {
        name: [a - b for a, b in zip(numbers, before[name])]
        for name, numbers in after.items()
        if len(before.get(name, [])) == len(numbers)
    }


def made_of(whole: Sketches, parts: list[Sketches]) -> tuple[list[float], float]:
    """Return factors by which the parts add up to the whole, and the relative error."""
    names = [name for name in whole if all(name in part for part in parts)]
    target = vector(whole, names)
    if not names or not target.norm():
        return [0.0] * len(parts), math.inf
    matrix = torch.stack([vector(part, names) for part in parts], 1)
    if not (target.isfinite().all() and matrix.isfinite().all()):
        return [0.0] * len(parts), math.inf
    factors = torch.linalg.pinv(matrix, rtol=1e-9) @ target
    left = (matrix @ factors - target).norm() / target.norm()
    return factors.tolist(), left.item()


def numbers(values: Iterable[float]) -> str:
    """Return numbers as they stand in an evidence."""
    return ", ".join(f"{value:.3g}" for value in values)
