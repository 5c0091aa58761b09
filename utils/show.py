"""Show code of the scripts in a notebook, so that notebook and script never drift."""

import difflib
import inspect
from pathlib import Path

from IPython.display import Markdown


def source(*objects) -> Markdown:
    """The source code of functions or classes, highlighted."""
    code = "\n\n".join(inspect.getsource(each).rstrip() for each in objects)
    return Markdown(f"```python\n{code}\n```")


def diff(old: str | Path, new: str | Path, context: int = 2) -> Markdown:
    """What changes from file `old` to file `new`, as a unified diff.

    `context` is the number of unchanged lines to show around each change.
    """
    old, new = Path(old), Path(new)
    lines = difflib.unified_diff(
        old.read_text().splitlines(),
        new.read_text().splitlines(),
        old.name,
        new.name,
        n=context,
        lineterm="",
    )
    return Markdown("```diff\n" + "\n".join(lines) + "\n```")
