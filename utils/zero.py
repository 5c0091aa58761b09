"""Import DeepSpeed so that it needs no compiler and prints nothing."""

import contextlib
import logging
import os
import warnings

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
    # torch 2.14, the last one for Python 3.10, warns of names that DeepSpeed uses
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device == "cpu":
        with _linker_silenced():  # the first look at this table fills it
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _linker_silenced():
    """DeepSpeed links programs to see which libraries there are.

    Their complaints go to file descriptor 2. DeepSpeed redirects `sys.stderr.fileno()`,
    which is another one in a notebook.
    """
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
