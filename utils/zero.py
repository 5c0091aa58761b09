"""Load DeepSpeed, check its checkpoints, and count the bytes of an engine."""

import logging
import os
from pathlib import Path
from unittest import mock

from utils import memory, settings
from utils.errors import BadInput


def load_deepspeed():
    """Import and return `deepspeed`, set up for the device of this process."""
    return load_for(settings.device().type)


def load_for(device: str):
    """Import and return `deepspeed`, set up for "cpu" or "cuda".

    Left alone, DeepSpeed guesses a device, and its first process group on a CPU compiles
    a shared-memory all-reduce for inference (a minute, and g++ is needed). Training does
    not use it, so it is left out. On a CPU a second thing is left out: DeepSpeed's module
    for the optimizer Muon, which the first engine imports, hands a function to
    torch.compile, and importing the compiler takes 2 s.

    Raises:
        RuntimeError: it was loaded before, for another device.
    """
    os.environ["DS_ACCELERATOR"] = device
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import deepspeed

    loaded_for = deepspeed.accelerator.get_accelerator().device_name()
    if loaded_for != device:
        raise RuntimeError(f"DeepSpeed is loaded for {loaded_for}, not for {device}.")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device == "cpu":
        # set whole: the first look at this table would fill it, and so call the linker
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        # torch.compile then returns what it is given (torch/_dynamo/eval_frame.py)
        with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
            import deepspeed.runtime.zero.muon.muon_optimizer
    return deepspeed


def is_universal(checkpoint: Path) -> bool:
    """Return whether a checkpoint was converted: `zero` then has a folder per parameter."""
    return (checkpoint / "zero").is_dir()


def check_world_size(checkpoint: Path, world_size: int) -> None:
    """Check that a checkpoint fits `world_size` ranks.

    Partitions are made for one world size; a universal checkpoint fits every one.

    Source: https://www.deepspeed.ai/tutorials/universal-checkpointing/

    Raises:
        BadInput: the checkpoint was made for another; says how to convert it.
    """
    made_for = len(list(checkpoint.glob("*_optim_states.pt")))
    if made_for not in (0, world_size) and not is_universal(checkpoint):
        raise BadInput(
            f"The checkpoint {checkpoint.name} was made for {made_for} workers, and there "
            f"are {world_size}: convert it with `python -m deepspeed.checkpoint."
            f"ds_to_universal --input_folder {checkpoint} --output_folder "
            f"{checkpoint}-universal --inject_missing_state`, and copy run.json and "
            "random.pt into that: the next start takes it."
        )


def check_exportable(checkpoint: Path) -> None:
    """Check that DeepSpeed's `zero_to_fp32` reads a checkpoint.

    Raises:
        BadInput: it was converted, and lacks what that reads.
    """
    if is_universal(checkpoint):
        raise BadInput(
            f"{checkpoint.name} was converted, and --export reads what a training has "
            "saved: ask for more steps than it has."
        )


def zero_state_bytes(engine) -> memory.State:
    """Count the bytes of state that this rank holds for a DeepSpeed engine: its partition.

    Call it between `backward` and `step`. The optimizer's part contains the master copy of
    the parameters (float32, unless `bf16_master_weights_and_grads` says otherwise), which
    stages 1 to 3 keep even if the model is float32, and stage 0 if it is bf16. While
    gradients accumulate, a rank holds all of them at stage 1, and at stage 2 those of all
    weights of which it owns a part: where two partitions share a weight, both ranks hold
    its whole gradient. In the last accumulation step a rank holds its partition alone.
    """
    outer = engine.optimizer
    parameters = list(engine.module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    for name in ("averaged_gradients", "all_grad_tensors"):
        for partition in getattr(outer, name, {}).values():
            gradients += partition or []
    masters = [
        *getattr(outer, "single_partition_of_fp32_groups", []),
        *getattr(outer, "fp32_partitioned_groups_flat", []),
        *(p for group in getattr(outer, "fp32_groups", []) for p in group),
    ]
    inner = getattr(outer, "optimizer", outer)
    return memory.State(
        memory.local_bytes(getattr(p, "ds_tensor", p) for p in parameters),
        memory.local_bytes({t.data_ptr(): t for t in gradients}.values()),
        memory.local_bytes([*memory.moments(inner), *masters]),
    )
