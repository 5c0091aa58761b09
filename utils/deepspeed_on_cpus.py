"""DeepSpeed, loaded for CPUs by the process that ranks are forked from (`utils.launch`)."""

from utils.zero import load_for

load_for("cpu")
