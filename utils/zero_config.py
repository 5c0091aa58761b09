"""Read DeepSpeed's configuration file, complete it from the command line, check it."""

import json
from pathlib import Path

from utils import settings
from utils.errors import BadInput
from utils.zero import nvme_is_ready

# What the command line decides where the file says "auto": its option and default.
BY_COMMAND_LINE = {
    "train_micro_batch_size_per_gpu": ("--batch-size", 16),
    "gradient_accumulation_steps": ("--gradient-accumulation-steps", 1),
    "gradient_clipping": ("--clip", 1.0),
}


def read_config(
    path: Path,
    batch_size: int | None = None,
    passes: int | None = None,
    clip: float | None = None,
    stage: int | None = None,
) -> dict:
    """Read the configuration in a file, and complete it, for `deepspeed.initialize`.

    Where the file says "auto", the command line decides. (The word is a convention of
    programs that call DeepSpeed, as Hugging Face's Trainer; DeepSpeed wants a number.)

    Args:
        path: a JSON file.
        batch_size: examples per rank and pass, or None if the command line does not say.
        passes: whose gradients make a step, or None.
        clip: the length to clip gradients at, or None.
        stage: of ZeRO, instead of the file's, or None.

    Source: https://www.deepspeed.ai/docs/config-json/

    Raises:
        BadInput: the file is no configuration, contradicts the command line, or asks
            for what cannot work here.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is no readable JSON file: {error}.") from error
    sections = {"the whole of it": config}
    if isinstance(config, dict):
        names = ("zero_optimization", "bf16", "fp16")
        sections |= {name: config[name] for name in names if name in config}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise BadInput(
                f"{path.name}: {name} is {json.dumps(section)[:40]}, but has to be an "
                "object, in braces."
            )
    _complete(config, path.name, (batch_size, passes, clip))
    zero = config.setdefault("zero_optimization", {})
    if stage is not None:
        zero["stage"] = stage
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise BadInput(f"The ZeRO stage is {zero['stage']}, but must be 0, 1, 2 or 3.")
    _check_device(config, zero)
    return config


def check_batch_size(config: dict, world_size: int) -> None:
    """Check that the three numbers in a configuration agree, for `world_size` ranks.

    Raises:
        BadInput: they do not.
    """
    per_pass = config["train_micro_batch_size_per_gpu"] * world_size
    passes, whole = (
        config.get(name) for name in ("gradient_accumulation_steps", "train_batch_size")
    )
    if whole and (whole % per_pass or (passes and whole != passes * per_pass)):
        raise BadInput(
            f"The configuration says train_batch_size {whole}, but {world_size} workers "
            f"train on {per_pass} texts in each of {passes or 'their'} passes: leave out "
            "train_batch_size, or correct it."
        )


def _complete(config: dict, name: str, command_line: tuple) -> None:
    """Fill in what the file called `name` leaves to the command line."""
    if config.get("train_micro_batch_size_per_gpu") is None:  # null is nothing, too
        config["train_micro_batch_size_per_gpu"] = "auto"
    if config.get("train_batch_size") == "auto":
        del config["train_batch_size"]  # the product of the others
    for (field, (option, default)), given in zip(BY_COMMAND_LINE.items(), command_line):
        in_file = config.get(field)
        if in_file == "auto" or (in_file is None and given is not None):
            config[field] = default if given is None else given
        elif given not in (None, in_file):
            raise BadInput(
                f"{name} says {field} {in_file}, and {option} says {given}: change one of "
                'them, or write "auto" into the file.'
            )
    for field in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        number = config.get(field)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BadInput(
                f"{name} says {field} {json.dumps(number)}, but it has to be a whole "
                'number, and at least 1, or "auto".'
            )


def _check_device(config: dict, zero: dict) -> None:
    """Check that the device of this process can do what the configuration asks for."""
    offload = [zero.get(f"offload_{part}") or {} for part in ("optimizer", "param")]
    targets = {part.get("device") or "none" for part in offload}
    on_cpu = settings.device().type == "cpu"
    if on_cpu and config.get("fp16", {}).get("enabled"):
        raise BadInput(
            "This script computes in fp16 on GPUs only: enable bf16 instead, which CPUs "
            "can compute."
        )
    if on_cpu and "cpu" in targets:
        raise BadInput(
            "Offload to the CPU needs a GPU to offload from: remove offload_optimizer "
            "and offload_param, or set their device to none."
        )
    if "nvme" in targets and not nvme_is_ready(offload):
        raise BadInput(
            "Offload to NVMe needs libaio (package libaio-dev) and an nvme_path that "
            "exists: install and name them, or set the device to cpu or none."
        )
    if targets != {"none"}:  # else it refuses PyTorch's AdamW, which the script uses
        config.setdefault("zero_force_ds_cpu_optimizer", False)
