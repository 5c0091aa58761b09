"""Write down why a rank failed, so that torchrun's summary names the cause.

Under "Root Cause" the summary has the failure with the earliest time, in whole seconds, and
takes it from the file that a rank writes, or from the moment at which torchrun saw the rank
gone. Ranks that fail only because another one is gone are often the first to write.

Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from utils.errors import BadInput, sentence

# Part of a path of gloo's sources, and so of what it says of a peer that is gone or late.
LOST_A_PEER = "gloo/transport"


class Summary(ErrorHandler):
    """Write an exception of `record`'s function to `path`, in torchrun's format."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record_exception(self, e: BaseException) -> None:
        """Write type, message and traceback; what followed from another rank's end later.

        Two seconds: torchrun looks ten times a second, and a file has whole ones.
        """
        seconds = int(time.time()) + (2 if LOST_A_PEER in str(e) else 0)
        known = {"py_callstack": traceback.format_exc(), "timestamp": str(seconds)}
        text = f"{type(e).__name__}: {e}"
        write(self._path, {"message": {"message": text, "extraInfo": known}})


def run(main: Callable[[], None], path: Path) -> None:
    """Call a script's `main`, and write to `path` what it fails with.

    Raises:
        SystemExit: BadInput, whose sentence is all that torchrun shows; status 1.
    """

    def ends_with_sentence() -> None:
        try:
            main()
        except BadInput as problem:
            # A second earlier than an exception that another rank has because of it.
            seconds = int(time.time()) - 1
            write(path, {"message": sentence(problem), "timestamp": seconds})
            sys.exit(1)

    record(ends_with_sentence, Summary(path))()


def write(path: Path, what: dict) -> None:
    """Write it whole: torchrun may end this rank at any moment, and fails over a part."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(what))
    part.replace(path)
