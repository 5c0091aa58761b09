"""What is wrong with a folder of pages: what they take from elsewhere, and dead links."""

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
# In styles, and in scripts that stand in a page: what the browser would fetch.
IN_STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
IN_SCRIPT = re.compile(r"""(?:\bimport\b[^"';]*|\bfetch\()["']([^"']+)["']""")
# A link of these kinds names a page, and fetches nothing.
NAMES = {"next", "prev", "index", "search", "author", "canonical", "license"}


class Page(HTMLParser):
    """The names, links and pictures of a page, and what it fetches."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.without_text: list[str] = []
        self.inside = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = {name: value or "" for name, value in attributes}
        self.inside = tag
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            self.links.append(given["href"])
            if tag in ("link", "use", "image") and given.get("rel") not in NAMES:
                self.fetched.append(given["href"])
        for name in ("src", "poster", "data"):
            if name in given and tag not in ("param",):
                self.fetched.append(given[name])
                self.links.append(given[name])
        for each in filter(None, given.get("srcset", "").split(",")):
            self.fetched.append(each.split()[0])
        if tag == "img" and not given.get("alt", "").strip():
            self.without_text.append(given.get("src", ""))
        self.fetched += styled(given.get("style", ""))

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "style":
            self.fetched += styled(data)
        elif self.inside == "script":
            self.fetched += IN_SCRIPT.findall(data)


def styled(text: str) -> list[str]:
    """Return what a style sheet fetches."""
    return [first or second for first, second in IN_STYLE.findall(text)]


@cache
def page(path: Path) -> Page:
    return Page(path)


def pages(folder: Path) -> Iterator[tuple[str, Page]]:
    """Yield each page of a folder, with its name."""
    for path in sorted(folder.rglob("*.html")):
        yield path.relative_to(folder).as_posix(), page(path)


def from_elsewhere(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses that a page or style sheet would fetch from a network."""
    for name, each in pages(folder):
        yield from ((name, url) for url in each.fetched if ELSEWHERE.match(url))
    for path in sorted(folder.rglob("*.css")):
        for url in styled(path.read_text()):
            if ELSEWHERE.match(url):
                yield path.relative_to(folder).as_posix(), url


def dead_links(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the links to a file, or a place in a page, that is not in the folder."""
    for name, each in pages(folder):
        for link in dict.fromkeys(each.links):
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = folder / name
            if to.path:
                target = (target.parent / unquote(to.path)).resolve()
            if not target.is_file() or (
                to.fragment
                and target.suffix == ".html"
                and unquote(to.fragment) not in page(target).ids
            ):
                yield name, link


def without_text(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the pictures that say nothing to those who do not see them."""
    for name, each in pages(folder):
        yield from ((name, source) for source in each.without_text)
