"""The book: all lessons, READMEs and guides as pages that are read without a network.

`pages` says which there are, `lessons` makes a page of a notebook, `figures` names its
figures, `exercises` folds hints and solutions, and `python -m tests.tools.book` is what
`make book` runs. Notebooks and texts stay where they are: Sphinx reads copies of them, in
build/book-pages, and writes build/book. Nothing is executed.
"""

from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "build" / "book-pages"  # what Sphinx reads
SITE = ROOT / "build" / "book"
