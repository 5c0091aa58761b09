"""Exercises of part 03 that train on ranks with FSDP2: each is judged by what it does.

torch is imported where it is needed: `utils.checks` is imported by every notebook.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from utils.checks.ranks import join
from utils.launch import run_ranks


def trains_its_shards(prepare: Callable) -> bool | str:
    """Whether `prepare(model, mesh)` shards a GPT and returns an optimizer that trains it.

    Two steps on two ranks have to leave the weights that they leave on one process.
    """
    held, moved, off = run_ranks(_two_steps, 2, prepare, timeout=120)[0]
    if held is None:
        return "prepare returns no optimizer."
    if held > 0.55:
        return f"Each of two ranks holds {held:.0%} of the parameters."
    if moved == 0:
        return "After two training steps, no weight has changed."
    if moved < 1:
        return f"Two training steps have changed only {moved:.0%} of the parameters."
    if off > 1e-8:
        return "After two training steps, the weights are not those of one process."
    return True


def _two_steps(prepare: Callable) -> tuple[float | None, float, float]:
    """Share of the parameters held; share that moved; largest error against one process."""
    import torch
    import torch.distributed as dist

    from utils.memory import local_bytes
    from utils.models import GPT, SMOKE

    def train(model, optimizer, tokens):
        for _ in range(2):
            logits = model(tokens).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()

    def build():  # in float64: Adam blows up the rounding of small gradients
        torch.manual_seed(0)
        return GPT(SMOKE).double()

    join()
    torch.manual_seed(1)
    tokens = torch.randint(SMOKE.vocab_size, (4, SMOKE.block_size))
    model, alone = build(), build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = prepare(model, dist.init_device_mesh("cpu", (2,)))
    if optimizer is None:
        return None, 0.0, 0.0
    held = local_bytes(model.parameters()) / local_bytes(before)
    train(model, optimizer, tokens[dist.get_rank() :: 2])
    rates = optimizer.param_groups[0]
    train(alone, torch.optim.AdamW(alone.parameters(), lr=rates["lr"]), tokens)
    after = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    moved = [not torch.equal(a, b) for a, b in zip(after, before)]
    off = max((a - b).abs().max().item() for a, b in zip(after, alone.parameters()))
    return held, sum(moved) / len(moved), off


def resumes_elsewhere(load: Callable) -> bool | str:
    """Whether `load(model, optimizer, folder)` reads, on 3 ranks, what 2 have saved."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(_save, 2, Path(folder), timeout=120)[0]
        found = run_ranks(_resume, 3, load, Path(folder), timeout=120)[0]
    where = "Saved on 2 ranks and loaded on 3,"
    if not _same(saved[0], found[0]):
        return f"{where} the weights are not those that were saved."
    if not found[1]:
        return f"{where} the weights are right, but AdamW has no averages yet."
    if not _same(saved[1], found[1]):
        return f"{where} the weights are right, but AdamW's averages are not."
    return True


def _sharded() -> tuple:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from utils.models import GPT, SMOKE

    model, mesh = GPT(SMOKE), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def _whole(model, optimizer) -> tuple[dict, dict]:
    """Weights and averages, put together on rank 0; looks at them without filling them."""

    def gathered(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    names = {p: name for name, p in model.named_parameters()}
    weights = {name: gathered(p.detach()) for p, name in names.items()}
    averages = {
        f"{names[p]}.{kind}": gathered(value.detach())
        for p, state in optimizer.state.items()
        for kind, value in state.items()
    }
    return weights, averages


def _save(folder: Path) -> tuple[dict, dict]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    join()
    torch.manual_seed(1)
    model, optimizer = _sharded()
    model(torch.ones(2, 64).long()).square().mean().backward()
    optimizer.step()
    weights, averages = sd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": averages}, checkpoint_id=folder)
    return _whole(model, optimizer)


def _resume(load: Callable, folder: Path) -> tuple[dict, dict]:
    import torch

    join()
    torch.manual_seed(2)  # other weights than those that were saved
    model, optimizer = _sharded()
    load(model, optimizer, folder)
    return _whole(model, optimizer)


def _same(ours: dict, theirs: dict) -> bool:
    import torch

    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
