"""Define the one exception of this repository: bad input, and how to fix it."""

import sys
from pathlib import Path


class BadInput(Exception):
    """Say in one sentence what is wrong with an input, and how to fix it.

    An input is what its user can change: a command line, a variable of the environment, a
    file, a folder, a cluster. `command_line.run` ends a script with the sentence alone, and
    `failures.NoRestartOnBadInput` ends a run of Ray Train at once. A mistake of a program
    is any other exception, and keeps its traceback.
    """


def sentence(problem: BadInput) -> str:
    """Return what a script that ends with `problem` says: its name, and the sentence."""
    return f"{Path(sys.argv[0]).name}: {problem}"
