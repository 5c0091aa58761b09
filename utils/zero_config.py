"""Read DeepSpeed's configuration file; the command line replaces some of its keys."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from utils.errors import BadInput

# The option that replaces a key of the file.
OPTIONS = {
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--clip",
}


# What the file may say of objects that the script makes itself.
OF_THE_SCRIPT = {"optimizer": "PyTorch's AdamW", "scheduler": "--decay-steps"}


class Config(dict):
    """A configuration that notes which of its keys DeepSpeed asks for."""

    def __init__(self, name: str, keys: dict):
        super().__init__(keys)
        self.name, self.read = name, set[str]()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        self.read.add(key)
        return super().__contains__(key)


@contextlib.contextmanager
def in_a_sentence(config: Config) -> Iterator[None]:
    """Say in a sentence what DeepSpeed refuses of a configuration, and what it ignores.

    Raises:
        BadInput: DeepSpeed refuses the configuration, or lacks a package for it.
    """
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
        said = str(error)
        if hasattr(error, "errors"):  # of pydantic: a line for each key
            said = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                for each in error.errors()
            )
        raise BadInput(
            f"DeepSpeed refuses {config.name} ({' '.join(said.split())}): correct it."
        ) from error
    unread = sorted(config.keys() - config.read)
    if unread and dist.get_rank() == 0:
        print(f"{config.name}: DeepSpeed ignores {', '.join(unread)}. Is it misspelt?")


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # all ranks read the file
        print(line)


def read_config(
    path: Path,
    batch_size: int | None = None,
    accumulation_steps: int | None = None,
    clip: float | None = None,
    stage: int | None = None,
) -> Config:
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
        config = json.loads(path.read_text("utf-8-sig"))  # with or without a BOM
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be read as JSON ({error}): correct it."
        ) from error
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
        if isinstance(config.get(key), str):
            raise BadInput(
                f'{path.name} says {key} "{config[key]}": write the number without quotes.'
            )
    for key, instead in OF_THE_SCRIPT.items():
        if config.pop(key, None):
            _say(f"{path.name}: the key {key} is ignored. The script uses {instead}.")
    if "zero_force_ds_cpu_optimizer" not in config:
        # else offload refuses PyTorch's AdamW, which the script uses
        config["zero_force_ds_cpu_optimizer"] = False
        if "offload_optimizer" in zero or zero.get("cpu_offload"):
            _say(
                f"{path.name} moves the optimizer to the CPU, where this script runs "
                "PyTorch's AdamW. DeepSpeed's own DeepSpeedCPUAdam would be faster."
            )
    return Config(path.name, config)
