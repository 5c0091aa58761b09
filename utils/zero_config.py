"""Read DeepSpeed's configuration file; the command line replaces some of its keys."""

import json
from pathlib import Path

from utils.errors import BadInput

# The option that replaces a key of the file.
OPTIONS = {
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--clip",
}


def read_config(
    path: Path,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    clip: float | None = None,
    stage: int | None = None,
) -> dict:
    """Read a JSON file for `deepspeed.initialize`; what is not None replaces its keys.

    Checks what ends in a riddle otherwise; DeepSpeed judges the rest. "auto" is a
    placeholder that integrations fill in, such as Hugging Face's Trainer: DeepSpeed itself
    compares it with a number.

    Args:
        path: of the file.
        batch_size: examples per rank and gradient accumulation step.
        accumulation_steps: gradient accumulation steps per optimizer step.
        clip: norm to clip gradients at.
        stage: of ZeRO.

    Source: https://www.deepspeed.ai/docs/config-json/

    Raises:
        BadInput: it is no JSON object, or its ZeRO stage does not exist, or it says "auto"
            where an option has to give a number.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is no readable JSON file: {error}.") from error
    is_object = isinstance(config, dict)
    zero = config.setdefault("zero_optimization", {}) if is_object else None
    if not isinstance(zero, dict):
        raise BadInput(
            f"{path.name} has to be a JSON object, in braces, and so has its "
            "zero_optimization."
        )
    if stage is not None:
        zero["stage"] = stage
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise BadInput(f"The ZeRO stage is {zero['stage']}, but must be 0, 1, 2 or 3.")
    if batch_size or accumulation_steps or config.get("train_batch_size") == "auto":
        config.pop("train_batch_size", None)  # the product of the others and the ranks
    given = dict(zip(OPTIONS, (batch_size, accumulation_steps, clip)))
    config |= {key: number for key, number in given.items() if number is not None}
    for key, option in OPTIONS.items():
        if config.get(key) == "auto":
            raise BadInput(
                f'{path.name} says {key} "auto": write a number into it, or add {option}.'
            )
    if "zero_force_ds_cpu_optimizer" not in config:
        # else offload refuses PyTorch's AdamW, which the script uses
        config["zero_force_ds_cpu_optimizer"] = False
        if "offload_optimizer" in zero:
            print(
                f"{path.name} offloads the optimizer, which in this script is PyTorch's "
                "AdamW, on the CPU. DeepSpeed's own DeepSpeedCPUAdam would be faster."
            )
    return config
