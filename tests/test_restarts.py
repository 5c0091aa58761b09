"""A restart of three ranks ends bit for bit only if DDP keeps its first buckets.

After the first step of a process DDP sorts its buckets anew, in the order in which
gradients came. A process that starts in the middle of a run does so at another step, and
with three ranks or more it then adds up in another order. That is why the notebook
02-ddp-pytorch-ray/04_fault_tolerance.ipynb, which has two ranks, asks DDP not to.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.launch import run_ranks


def train(saved, steps, options):
    """Take some steps on this rank, with noise for data; return model and optimizer."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    dist.barrier()  # nobody leaves while others still add up
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("ranks", "options", "equal"),
    [
        (3, {"find_unused_parameters": True}, True),
        (3, {}, False),  # the control
        (2, {}, True),
    ],
)
def test_who_ends_bit_for_bit_after_a_restart(ranks, options, equal):
    undisturbed = run_ranks(train, ranks, None, range(6), options)[0]["model"]
    saved = run_ranks(train, ranks, None, range(3), options)[0]
    restarted = run_ranks(train, ranks, saved, range(3, 6), options)[0]["model"]
    same = [torch.equal(undisturbed[name], restarted[name]) for name in undisturbed]
    assert all(same) == equal
