"""Load DeepSpeed for CPUs, in the process that ranks are forked from (`launch.preload`)."""

from utils.zero import load_for

load_for("cpu")
