"""Train the GPT of tests/sharding.py on a grid of ranks, for tests/test_parity.py.

To add a layout, add an entry to LAYOUTS.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests import sharding
from tests.compare import vector
from utils.memory import state_bytes

RANKS = 4  # a grid of 2 x 2
PLAN = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def grid(*names: str) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


# Each wraps the model; returns it, which share of a batch this rank reads, of how many.
def hsdp(model: nn.Module) -> tuple[nn.Module, int, int]:
    return shard(model, grid("replicate", "shard")), dist.get_rank(), RANKS


def tensor_parallel(model: nn.Module, **changes) -> tuple[nn.Module, int, int]:
    """Add FSDP2 over the other dimension; `changes` are to the styles of layers."""
    mesh = grid("shard", "tensor")
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN | changes)
    return shard(model, mesh["shard"]), mesh.get_local_rank("shard"), 2


def replicas_apart(model: nn.Module) -> tuple[nn.Module, int, int]:
    """Give FSDP2 the inner dimension alone: it knows of no replica to average with."""
    return shard(model, grid("replicate", "shard")["shard"]), dist.get_rank(), RANKS


def sums_left_open(model: nn.Module) -> tuple[nn.Module, int, int]:
    """Leave out RowwiseParallel's all-reduce: each rank goes on with a part of the sum."""
    return tensor_parallel(model, down=RowwiseParallel(output_layouts=Partial()))


def own_texts(model: nn.Module) -> tuple[nn.Module, int, int]:
    """Let each rank of a tensor group read texts of its own."""
    model, *_ = tensor_parallel(model)
    return model, dist.get_rank(), RANKS


def shards_nothing(model: nn.Module) -> tuple[nn.Module, int, int]:
    """Average whole weights: it passes for FSDP if only numbers are compared."""

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= RANKS

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model, dist.get_rank(), RANKS


LAYOUTS = {"HSDP": hsdp, "tensor parallel": tensor_parallel}
CONTROLS = {
    "replicas apart": replicas_apart,
    "sums left open": sums_left_open,
    "own texts": own_texts,
}


def train(lay_out: Callable, dtype: torch.dtype, steps: int) -> dict:
    """Train; return losses, first gradient, parameters, all whole; the state held."""
    model, share, shares = lay_out(sharding.build_model(dtype))
    # DTensors of several meshes do not go into one operation
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses, gradient = [], None
    for step in range(steps):
        loss = sharding.loss_of(model, *sharding.share(step, share, shares))
        optimizer.zero_grad()
        loss.backward()
        if gradient is None:
            gradient = vector([_whole(p.grad) for p in model.parameters()])
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.double() / RANKS)
    return {
        "losses": torch.stack(losses),
        "gradient": gradient,
        "parameters": vector([_whole(p.detach()) for p in model.parameters()]),
        "state": state_bytes(model, optimizer).total,
    }


def train_all(layouts: dict[str, tuple[Callable, int]]) -> dict[str, dict]:
    """Train each layout for its steps in float64, and for the first one in float32."""
    dist.init_process_group("gloo")
    results = {}
    for name, (lay_out, steps) in layouts.items():
        single = train(lay_out, torch.float32, 1)
        results[name] = train(lay_out, torch.float64, steps)
        results[name]["gradient32"] = single["gradient"]
        results[name]["state"] = single["state"]
    return results


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
