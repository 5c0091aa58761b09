"""Import DeepSpeed so that it needs no compiler and prints nothing."""

import logging
import os

from utils import settings


def load_deepspeed():
    """The module `deepspeed`, set up for the device of this process.

    Left alone, DeepSpeed guesses a device, and its first process group on a CPU compiles
    a shared-memory all-reduce for inference (a minute, and g++ is needed). Training does
    not use it, so it is left out.
    """
    device = settings.device().type
    os.environ["DS_ACCELERATOR"] = device
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
