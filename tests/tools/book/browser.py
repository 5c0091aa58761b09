"""Open pages of the book in headless Chromium, wide and narrow, light and dark.

    python browser.py axe.min.js build/screenshots page.html ...

It runs in an environment that has Playwright, and needs nothing of this repository. It
prints one line of JSON per page, width and theme: what axe-core objects to, what the
console says, what was asked of a network, and how the page looks.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"wide": 1400, "phone": 390}
THEMES = ("light", "dark")
# Each rule of axe-core that is broken, with the first elements that break it.
AXE = """async () => (await axe.run({ preload: false })).violations.map(
  v => `${v.id} (${v.impact}): ` + v.nodes.slice(0, 3).map(n => n.html).join(" | "))"""
SEEN = """() => ({
  diagrams: [...document.querySelectorAll("pre.mermaid")].map(
    d => d.querySelector("svg .node")?.getBoundingClientRect().width ?? 0),
  pictures: [...document.querySelectorAll("main img")].map(i => i.naturalWidth),
  sideways: document.documentElement.scrollWidth - innerWidth,
  background: getComputedStyle(document.body).backgroundColor,
  open: document.querySelectorAll("details.solution[open], details.hints[open]").length,
})"""
DRAWN = """() => [...document.querySelectorAll("pre.mermaid")].every(
  d => d.querySelector("svg .node"))"""


def look(page: Page, address: str, axe: str, picture: Path) -> dict:
    """Return what is to be seen on one page, and what it does wrong."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda m: said.extend([m.text] * (m.type == "error")))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_function(DRAWN)
    page.wait_for_load_state("load")
    seen = page.evaluate(SEEN)
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture)
    for folded in page.locator("details").all():
        folded.evaluate("d => { d.open = true; }")
    page.add_script_tag(content=axe)
    local = ("file:", "data:", "blob:")
    network = [url for url in asked if not url.startswith(local)]
    return seen | {"console": said, "network": network, "axe": page.evaluate(AXE)}


def searched(page: Page, site: str, word: str) -> list[str]:
    """Return the titles of the pages that the book's search finds."""
    page.goto(f"{site}/search.html?q={word}")
    page.wait_for_selector("#search-results li a")
    return page.locator("#search-results li > a").all_inner_texts()


def main(axe: str, pictures: str, site: str, *names: str) -> None:
    """Print what is seen of each page, then what a search finds."""
    script = Path(axe).read_text()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, width, theme in itertools.product(names, WIDTHS, THEMES):
            size = {"width": WIDTHS[width], "height": 1000}
            page = browser.new_page(viewport=size, color_scheme=theme)
            page.set_default_timeout(60_000)
            to = Path(pictures) / f"{name.replace('/', '_')}-{width}-{theme}.png"
            seen = look(page, f"{site}/{name}", script, to)
            print(json.dumps({"page": name, "width": width, "theme": theme} | seen))
            page.close()
        page = browser.new_page()
        page.set_default_timeout(60_000)
        print(json.dumps({"search": searched(page, site, "set_epoch")}))
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
