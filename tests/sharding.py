"""Train a small GPT on this rank with the steps of part 03's scripts, for its tests.

To add a strategy to tests/test_parity.py, add an entry to STRATEGIES.
"""

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from tests import scripts
from tests.compare import vector
from utils import comms, launch
from utils.comms import count_comms
from utils.datasets import share_of_batch, text
from utils.memory import state_bytes
from utils.models import GPT, GPTConfig
from utils.zero import load_deepspeed, zero_state_bytes

launch.preload("utils.deepspeed_on_cpus")

CONFIG = GPTConfig(layers=2, block_size=32)
GLOBAL_BATCH = 12  # 1, 2 and 3 ranks have equal shares of it
TRAIN_FSDP2 = scripts.ROOT / "03-fsdp-deepspeed" / "train_fsdp2.py"
TRAIN_DEEPSPEED = TRAIN_FSDP2.with_name("train_deepspeed.py")
EXACT_COUNTING = TRAIN_FSDP2.with_name("ds_config_exact_counting.json")
WHOLE = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
NO_CLIP = float("inf")


def build_model(dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(dtype)


def share(step: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, ...]:
    data = text(block_size=CONFIG.block_size)
    return share_of_batch(data, step, GLOBAL_BATCH, rank, world_size)


def test_set() -> TensorDataset:
    """Seven texts, which no number of ranks here divides; to evaluate in batches of 2."""
    return TensorDataset(*text("test", CONFIG.block_size)[:7])


def loss_of(model, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs).flatten(0, 1)
    at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(at_least_fp32), targets.flatten())


def steps_of(train_step: Callable, steps: int) -> Iterator[tuple]:
    """Train with a script's step; yield the mean loss and the bytes that this rank sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        with count_comms() as comms:
            loss = train_step(*share(step, rank, world_size)).detach().clone()
        dist.all_reduce(loss)
        yield loss.item() / world_size, comms.sent(world_size)


def test_loss(model, evaluate: Callable) -> float:
    """Return the loss of `test_set` that a script's `evaluate` finds."""
    return evaluate(model, test_set(), torch.device("cpu"), batch_size=2)


def one_process(dtype: torch.dtype, steps: int = 10) -> dict:
    """Return the reference: losses, first gradients, final parameters, test loss."""
    model = build_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], None
    for step in range(steps):
        loss = loss_of(model, *share(step))
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": [p.detach() for p in model.parameters()],
        "test loss": loss_of(model, *test_set().tensors).item(),
    }


def ddp(dtype: torch.dtype) -> dict:
    """Take one step with DDP; return the bytes that this rank holds, and sends."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(build_model(dtype), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with count_comms() as comms:
        loss_of(model, *share(0, rank, world_size)).backward()
    optimizer.step()
    return {"state": state_bytes(model, optimizer), "sent": comms.sent(world_size)}


def shard(model: GPT, keep: bool = False, bf16: bool = False, mesh=None) -> GPT:
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    flags = Namespace(no_reshard=keep, bf16=bf16, offload=False)
    return scripts.load(TRAIN_FSDP2).shard(model, mesh, flags)


def predict_sent(strategy: str, world_size: int, config: GPTConfig = CONFIG) -> float:
    """Predict as `comms` does, but with what is in no block gathered once only."""
    model = GPT(config)
    whole = sum(p.nbytes for p in model.parameters())
    if strategy != "fsdp2":
        return comms.predict(strategy, whole, world_size)
    blocks = sum(p.nbytes for p in model.blocks.parameters())
    kept = comms.predict("fsdp2-keep", whole - blocks, world_size)
    return comms.predict("fsdp2", blocks, world_size) + kept


def fsdp2(
    dtype: torch.dtype,
    steps: int = 10,
    sum_gradients: bool = False,
    **options,
) -> dict:
    """Train with the functions of train_fsdp2.py; `options` are those of `shard`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    script = scripts.load(TRAIN_FSDP2)
    model = shard(build_model(dtype), **options)
    if sum_gradients:
        model.set_gradient_divide_factor(1.0)
        for block in model.blocks:
            block.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained, gradients = [], None
    train_step = partial(script.train_step, model, optimizer, clip=NO_CLIP)
    for step in steps_of(train_step, steps):
        trained.append(step)
        gradients = gradients or [p.grad.full_tensor() for p in model.parameters()]
    weights = sd.get_model_state_dict(model, options=WHOLE)
    # the state first: without resharding, a forward pass leaves the weights gathered
    return {
        "losses": [loss for loss, _ in trained],
        "gradients": gradients,
        "parameters": list(weights.values()),
        "state": state_bytes(model, optimizer),
        "sent": trained[-1][1],
        "test loss": test_loss(model, script.evaluate),
    }


def zero_config(stage: int, batch_size: int) -> dict:
    """Return ds_config_exact_counting.json at another stage and batch size per rank."""
    config = json.loads(EXACT_COUNTING.read_text())
    config["zero_optimization"]["stage"] = stage
    config["train_micro_batch_size_per_gpu"] = batch_size
    return config | {"gradient_clipping": 0.0}


def zero_engine(stage: int, dtype: torch.dtype, accumulation_steps: int = 1, **changes):
    """Return an engine of DeepSpeed with the script's config at a stage, with `changes`."""
    os.environ["WORKSHOP_MODE"] = "smoke"
    deepspeed = load_deepspeed()
    deepspeed.init_distributed("gloo")
    config = zero_config(
        stage, GLOBAL_BATCH // dist.get_world_size() // accumulation_steps
    )
    config |= {"gradient_accumulation_steps": accumulation_steps} | changes
    model = build_model(dtype)
    if stage == 0 and dtype == torch.float64:
        # gloo reduces float64, but DeepSpeed's list of types on a CPU leaves it out
        accelerator = deepspeed.accelerator.get_accelerator()
        types = {*accelerator.supported_dtypes(), dtype}
        accelerator.supported_dtypes = lambda: types
    if stage == 3 and dtype == torch.float64:
        # named here, a type is not read off the model: DeepSpeed refuses float64 on CPUs
        # that compute in float16, and on no others
        deepspeed.zero.Init(model, dtype=torch.float32, config_dict_or_path=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def look_before_steps(engine, whole_gradient: Callable) -> tuple[list, list]:
    """Return two lists: what an engine holds before each step, and its first gradients.

    They are filled when it steps, as the script's step leaves no gradients behind.
    """
    states, gradients, step_of_engine = [], [], engine.step

    def look_and_step() -> None:
        states.append(zero_state_bytes(engine))
        if not gradients and engine.is_gradient_accumulation_boundary():
            gradients.extend(
                whole_gradient(p).clone() for p in engine.module.parameters()
            )
        step_of_engine()

    engine.step = look_and_step
    return states, gradients


def zero(
    stage: int,
    dtype: torch.dtype,
    steps: int = 10,
    accumulation_steps: int = 1,
    **changes,
) -> dict:
    """Train with the functions of train_deepspeed.py, and its config with `changes`.

    The state is that of the last step after its first pass, where gradients exist.
    """
    engine = zero_engine(stage, dtype, accumulation_steps, **changes)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    script = scripts.load(TRAIN_DEEPSPEED)
    is_whole = stage == 0  # and not DeepSpeed's to put together
    states, gradients = look_before_steps(
        engine, (lambda p: p.grad) if is_whole else safe_get_full_grad
    )
    trained = list(steps_of(partial(script.train_step, engine), steps))
    whole_parameter = torch.Tensor.detach if is_whole else safe_get_full_fp32_param
    return {
        "test loss": test_loss(engine, script.evaluate),
        "losses": [loss for loss, _ in trained],
        "gradients": gradients,
        "parameters": [whole_parameter(p).clone() for p in engine.module.parameters()],
        "state": states[-accumulation_steps],
        "sent": trained[-1][1],
    }


# Each trains as many steps as it is told, in a type: strategy(dtype, steps).
STRATEGIES = {
    "FSDP2": fsdp2,
    "FSDP2 without resharding": partial(fsdp2, keep=True),
    "ZeRO 0": partial(zero, 0),
    "ZeRO 1": partial(zero, 1),
    "ZeRO 2": partial(zero, 2),
    "ZeRO 3": partial(zero, 3),
}


def train_all(strategies: dict) -> dict[str, dict]:
    """Train as `parity.train_all`: ten steps in float64, the first gradient in float32.

    Of each strategy also the "test loss" after the last step.
    """
    results = {}
    for name, strategy in strategies.items():
        results[name] = _flat(strategy(torch.float64))
        single = _flat(strategy(torch.float32, steps=1))
        results[name]["gradient32"] = single["gradient"]
    return results


def _flat(result: dict) -> dict:
    return {
        "losses": torch.tensor(result["losses"], dtype=torch.float64),
        "gradient": vector(result["gradients"]),
        # FSDP2's whole parameters are on rank 0 only
        "parameters": vector(result["parameters"]) if result["parameters"] else None,
        "test loss": torch.tensor(result["test loss"], dtype=torch.float64),
    }
