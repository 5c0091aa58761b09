"""Show code of the scripts in a notebook, so that notebook and script never drift."""

import ast
import difflib
import inspect
import textwrap
from pathlib import Path

from IPython.display import Markdown


def source(*objects) -> Markdown:
    """Show the source code of functions, methods or classes, highlighted."""
    sources = (textwrap.dedent(inspect.getsource(each)) for each in objects)
    code = "\n\n".join(source.rstrip() for source in sources)
    return Markdown(f"```python\n{code}\n```")


def diff(
    old: str | Path,
    new: str | Path,
    functions: tuple[str, str] | None = None,
    context: int = 2,
) -> Markdown:
    """Show what changes from file `old` to file `new`, as a unified diff.

    `functions` names one function of each file to compare, instead of the whole files;
    `context` is the number of unchanged lines to show around each change.

    Raises:
        ValueError: a file has no function of that name.
    """
    texts = [Path(old).read_text(), Path(new).read_text()]
    if functions:
        texts = [function_source(t, name) for t, name in zip(texts, functions)]
    if texts[0] == texts[1]:
        return Markdown("No difference.")
    lines = difflib.unified_diff(
        texts[0].splitlines(),
        texts[1].splitlines(),
        Path(old).name,
        Path(new).name,
        n=context,
        lineterm="",
    )
    return Markdown("```diff\n" + "\n".join(lines) + "\n```")


def function_source(text: str, name: str) -> str:
    """Return the source of a top-level function or class of a module's `text`.

    Raises:
        ValueError: there is none of that name.
    """
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == name:
            above = getattr(node, "decorator_list", [])
            first = min([node.lineno] + [decorator.lineno for decorator in above])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise ValueError(f"There is no function {name!r}.")
