"""How far results are apart: a tensor, a list of tensors, or a list of floats, each."""

import torch


def vector(values: torch.Tensor | list[torch.Tensor] | list[float]) -> torch.Tensor:
    """Return all numbers of `values`, of shape [numbers]; floats as float64."""
    if isinstance(values, torch.Tensor):
        return values.flatten()
    if isinstance(values[0], torch.Tensor):
        return torch.cat([tensor.flatten() for tensor in values])
    return torch.tensor(values, dtype=torch.float64)


def worst(ours, theirs) -> float:
    """Return the largest difference of two numbers that belong together."""
    return (vector(ours) - vector(theirs)).abs().max().item()


def relative(ours, theirs) -> float:
    """Return the length of the difference, over that of `theirs`."""
    theirs = vector(theirs)
    return ((vector(ours) - theirs).norm() / theirs.norm()).item()
