"""A record of the exercises that somebody has tried and solved, in an ignored file.

`check` adds a line for each answer, and `make progress` shows what they come to.
"""

import contextlib
import json
import os
import re
import sys
from pathlib import Path

RECORD = Path(__file__).absolute().parents[2] / "build" / "progress.jsonl"
NOT_THEIRS = r"solutions|.*-solved(-\d+)?"  # notebooks that come solved


def note(name: str, solved: bool) -> None:
    """Add an answer to the record, if it can be written; nothing fails if it cannot.

    Not in the solutions or a copy by `make catch-up`, and not where WORKSHOP_PROGRESS is
    "off", as in tests.
    """
    off = os.environ.get("WORKSHOP_PROGRESS") == "off"
    if off or re.fullmatch(NOT_THEIRS, _notebook().stem):
        return
    line = json.dumps({"exercise": name, "solved": solved})
    # A full disk, or a folder that only its owner may write to, is no reader's mistake.
    with contextlib.suppress(OSError):
        RECORD.parent.mkdir(exist_ok=True)
        with RECORD.open("a") as record:
            # The newline comes first: half a line, of a full disk, spoils no other one.
            record.write(f"\n{line}")


def read() -> dict[str, bool]:
    """Return whether each exercise that was tried has been solved, once is enough."""
    found: dict[str, bool] = {}
    try:
        lines = RECORD.read_text(errors="replace").splitlines()
    except OSError:  # nothing was tried yet
        return found
    for line in filter(None, lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line
            entry = json.loads(line)
            name, solved = str(entry["exercise"]), entry["solved"] is True
            found[name] = found.get(name, False) or solved
    return found


def _notebook() -> Path:
    """Return the notebook that this process runs, as JupyterLab or VS Code says."""
    in_code = getattr(sys.modules["__main__"], "__vsc_ipynb_file__", "")
    return Path(os.environ.get("JPY_SESSION_NAME") or in_code)
