"""Train a small GPT with FSDP2 or ZeRO on this rank, for the tests of part 03."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests import scripts
from utils.comms import count_comms
from utils.datasets import share_of_batch, text
from utils.memory import state_bytes, zero_state_bytes
from utils.models import GPT, GPTConfig
from utils.zero import load_deepspeed

CONFIG = GPTConfig(layers=2, block_size=32)
GLOBAL_BATCH = 12  # 1, 2 and 3 ranks have equal shares of it
TRAIN_FSDP2 = scripts.ROOT / "03-fsdp-deepspeed" / "train_fsdp2.py"
TRAIN_DEEPSPEED = TRAIN_FSDP2.with_name("train_deepspeed.py")
WHOLE = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_model(dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(dtype)


def loss_of(model, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    data = text(block_size=CONFIG.block_size)
    inputs, targets = share_of_batch(data, step, GLOBAL_BATCH, rank, world_size)
    logits = model(inputs).flatten(0, 1)
    at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(at_least_fp32), targets.flatten())


def mean_over_ranks(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def one_process(dtype: torch.dtype, steps: int = 10) -> dict:
    """The reference: losses, gradients of the first step, final parameters."""
    model = build_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], None
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    parameters = [p.detach() for p in model.parameters()]
    return {"losses": losses, "gradients": gradients, "parameters": parameters}


def ddp(dtype: torch.dtype) -> dict:
    """One step with DDP: the bytes that this rank holds, and sends."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(build_model(dtype), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with count_comms() as comms:
        loss_of(model, 0, rank, world_size).backward()
    optimizer.step()
    return {"state": state_bytes(model, optimizer), "sent": comms.sent(world_size)}


def shard(model: GPT, **options) -> GPT:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def fsdp2(
    dtype: torch.dtype,
    steps: int = 10,
    sum_gradients: bool = False,
    load: Path | None = None,
    save: Path | None = None,
    **options,
) -> dict:
    """Train with FSDP2; `load` and `save` name checkpoints made by the script."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    script = scripts.load(TRAIN_FSDP2)
    model = shard(build_model(dtype), **options)
    if sum_gradients:
        model.set_gradient_divide_factor(1.0)
        for block in model.blocks:
            block.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, losses, gradients = 0, [], None
    if load:
        first = script.load_checkpoint(model, optimizer, GLOBAL_BATCH, load)
    for step in range(first, steps):
        optimizer.zero_grad()
        with count_comms() as comms:
            loss = loss_of(model, step, rank, world_size)
            loss.backward()
        gradients = gradients or [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    if save:
        script.save_checkpoint(model, optimizer, steps, GLOBAL_BATCH, save)
    weights, moments = sd.get_state_dict(model, optimizer, options=WHOLE)
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": list(weights.values()),
        "moments": [m for s in moments.get("state", {}).values() for m in s.values()],
        "state": state_bytes(model, optimizer),
        "sent": comms.sent(world_size),
        "logits": model(text(block_size=CONFIG.block_size)[:2][0]).detach(),
        "weights": weights,
    }


def zero_config(stage: int, batch_size: int) -> dict:
    """The script's ds_config.json at another stage and batch size per rank."""
    config = json.loads(TRAIN_DEEPSPEED.with_name("ds_config.json").read_text())
    config["zero_optimization"]["stage"] = stage
    config["train_micro_batch_size_per_gpu"] = batch_size
    return config | {"gradient_clipping": 0.0}


def zero(
    stage: int,
    dtype: torch.dtype,
    steps: int = 10,
    load: Path | None = None,
    save: Path | None = None,
    first: int = 0,
    passes: int = 1,
    **changes,
) -> dict:
    """Train with ZeRO, from the script's ds_config.json with `changes`."""
    os.environ["WORKSHOP_MODE"] = "smoke"
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = zero_config(stage, GLOBAL_BATCH // world_size) | changes
    config["gradient_accumulation_steps"] = passes
    model = build_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if load:
        engine.load_checkpoint(load)
    losses, gradients, state = [], None, None
    for step in range(first, steps):
        with count_comms() as comms:
            for number in range(passes):
                loss = loss_of(engine, step, rank, world_size)
                engine.backward(loss)
                if number == 0 and step == steps - 1:
                    state = zero_state_bytes(engine)
                if gradients is None and passes == 1:
                    gradients = [
                        (p.grad if stage == 0 else safe_get_full_grad(p)).clone()
                        for p in engine.module.parameters()
                    ]
                engine.step()
        losses.append(mean_over_ranks(loss))
    if save:
        engine.save_checkpoint(save, "saved")
    parameters = [
        (p.detach() if stage == 0 else safe_get_full_fp32_param(p)).clone()
        for p in engine.module.parameters()
    ]
    logits = engine(text(block_size=CONFIG.block_size)[:2][0]).detach()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": parameters,
        "state": state,
        "sent": comms.sent(world_size),
        "logits": logits,
    }
