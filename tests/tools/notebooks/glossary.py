"""Link a few terms of each lesson to the glossary, where its main line first uses them.

Which terms stands in glossary.toml; `python -m tests.tools.notebooks link` sets the links.
"""

import re
import tomllib
from functools import cache
from pathlib import Path

from tests.tools.notebooks import ROOT, electives
from tests.tools.notebooks.outline import anchor, main_line

PAGE = ROOT / "docs" / "glossary.md"
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+docs/glossary\.md#[^)]+\)")
# Where no link may stand: code, links, headings, folded answers, tags and generated lines.
PROTECTED = re.compile(
    r"^```.*?^```|<details>.*?</details>|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|^#[^\n]*$"
    r"|^[^\n]*<!-- (?:navigation|time) -->[^\n]*$|<[^>\n]+>",
    re.MULTILINE | re.DOTALL,
)


@cache
def chosen() -> dict[str, list[str]]:
    """Return the terms to link, by lesson ("01/01", "elective 1")."""
    text = Path(__file__).with_suffix(".toml").read_text()
    return tomllib.loads(text)["terms"]


def entries() -> list[str]:
    """Return the terms that the glossary explains."""
    return re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


def terms(path: Path) -> list[str]:
    """Return the terms to link in a notebook; those beside the route have none."""
    if path in electives():
        return chosen().get(f"elective {path.name[1:2]}", [])
    if path.parent.parent != ROOT:
        return []
    return chosen().get(f"{path.parent.name[:2]}/{path.name[:2]}", [])


def pattern(term: str) -> re.Pattern:
    """Return what matches a term in a sentence: in any case, unless it has capitals."""
    flags = re.IGNORECASE if term == term.lower() else re.NOFLAG
    return re.compile(rf"(?<![\w-]){re.escape(term)}(?:s|es|ed)?(?![\w-])", flags)


def first_use(text: str, term: str) -> re.Match | None:
    """Return where a text first uses a term and a link may stand."""
    kept = [match.span() for match in PROTECTED.finditer(text)]
    for found in pattern(term).finditer(text):
        if not any(start <= found.start() < end for start, end in kept):
            return found
    return None


def with_links(path: Path, notebook) -> None:
    """Set a notebook's links to the glossary anew: each term once, at its first use.

    Raises:
        LookupError: the main line never uses a term, or the glossary does not have it.
    """
    texts = [c for c in main_line(notebook.cells) if c.cell_type == "markdown"]
    up = "../../" if path in electives() else "../"
    for cell in texts:
        cell.source = LINK.sub(r"\1", cell.source)
    for term in terms(path):
        if term not in entries():
            raise LookupError(f"The glossary has no term {term!r}: see glossary.toml.")
        for cell in texts:
            if found := first_use(cell.source, term):
                link = f"[{found[0]}]({up}docs/glossary.md#{anchor(term)})"
                start, end = found.span()
                cell.source = cell.source[:start] + link + cell.source[end:]
                break
        else:
            raise LookupError(f"{path.name} never uses {term!r}: see glossary.toml.")
