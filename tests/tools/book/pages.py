"""Which pages the book has, in which order, and what they link to."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tools.book import ROOT
from tests.tools.notebooks import lessons
from utils.errors import BadInput

# The target of a link or picture, in Markdown or HTML, up to its anchor.
LINK = re.compile(r'(?P<before>\]\(|\b(?:src|srcset)=")(?P<target>[^)\s#"]+)')
INDEX = "index.md"
# Behind the lessons, in this order. A text that is nowhere here stands under "More".
CAPTIONS = {
    "Part 01": "01-*/**/*",
    "Part 02": "02-*/**/*",
    "Part 03": "03-*/**/*",
    "Guides": "docs/*",
    "More": "**/*",
}


def texts() -> list[Path]:
    """Return the READMEs, guides and other texts, the one at the root first."""
    found = [ROOT / "README.md"]
    for pattern in ("*.md", "0*/**/*.md", "docs/*.md", "utils/**/*.md"):
        found += sorted(ROOT.glob(pattern))
    found += sorted(ROOT.glob("tests/tools/**/*.md"))
    return list(dict.fromkeys(found))


def notebooks() -> list[Path]:
    """Return the notebooks in reading order: a folder's lessons, then its solutions."""
    patterns = ("0*/**/[0-9]*.ipynb", "0*/**/solutions.ipynb")
    return [path for pattern in patterns for path in lessons(pattern)]


def order(page: Path) -> tuple:
    """Return a key by which pages are sorted: a README, its lessons, folders below it."""
    folder = page.relative_to(ROOT).parent.parts
    kinds = (page.stem == "README", page.suffix == ".ipynb")
    return folder, *(not kind for kind in kinds), page.name


def contents() -> Iterator[tuple[str, list[Path]]]:
    """Yield the captions of the contents, each with its pages in reading order."""
    left = [page for page in (*notebooks(), *texts()) if page != ROOT / "README.md"]
    for caption, pattern in CAPTIONS.items():
        here = {page for page in ROOT.glob(pattern) if page in left}
        left = [page for page in left if page not in here]
        if here:
            yield caption, sorted(here, key=order)


def table_of_contents() -> str:
    """Return the contents for the end of the first page, which its side bar shows."""
    blocks = []
    for caption, found in contents():
        lines = [page.relative_to(ROOT).as_posix() for page in found]
        head = f":caption: {caption}\n:hidden:\n:maxdepth: 1\n"
        blocks.append("```{toctree}\n" + head + "\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(blocks)


def linked(text: str, page: Path) -> list[Path]:
    """Return the files of this repository that a page links to, or shows.

    Raises:
        BadInput: one of them is not there.
    """
    found = []
    for match in LINK.finditer(without_code(text)):
        if re.match(r"[a-z]+:|mailto:|<", match["target"]):
            continue
        path = Path(os.path.normpath(page.parent / match["target"]))
        if not path.exists():
            where = page.relative_to(ROOT)
            raise BadInput(f"{where} links to {match['target']}, which is not there.")
        if not path.is_relative_to(ROOT):
            where = page.relative_to(ROOT)
            raise BadInput(f"{where} links to {match['target']}, outside of the book.")
        found.append(path)
    return found


def without_code(text: str) -> str:
    """Return a text in Markdown without its blocks and spans of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "", text)


def links_to_index(text: str, page: Path) -> str:
    """Return a text whose links to the README at the root lead to the first page."""

    def replace(match: re.Match) -> str:
        path = Path(os.path.normpath(page.parent / match["target"]))
        if path != ROOT / "README.md":
            return match[0]
        return match["before"] + os.path.relpath(ROOT / INDEX, page.parent)

    return LINK.sub(replace, text)
