"""Look at pages of the book in headless Chromium: wide and light, narrow and dark.

    python book.py build/screenshots/book page.html ...

It runs in .venv-weekly and needs nothing of this repository. For each page and view it
prints a line of JSON: rules of axe-core that the page breaks, errors in the console, what
it asked of a network, how far it scrolls sideways, and what it shows.
"""

import json
import shutil
import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

VIEWS = {"light": 1400, "dark": 390}  # the theme, and the width of the window
DIAGRAMS_DRAWN = """() => [...document.querySelectorAll("pre.mermaid")].every(
  diagram => diagram.querySelector("svg .node")?.getBoundingClientRect().width)"""
SHOWN = """() => ({
  diagrams: document.querySelectorAll("pre.mermaid").length,
  pictures: [...document.querySelectorAll("main img")].map(image => image.naturalWidth),
  sideways: document.documentElement.scrollWidth - innerWidth,
  background: getComputedStyle(document.body).backgroundColor,
  unfolded: document.querySelectorAll("main details[open]").length,
})"""
UNFOLD = "() => document.querySelectorAll('details').forEach(d => { d.open = true; })"


def look(page: Page, address: str, picture: Path) -> dict:
    """Return what one page shows, and what it does wrong."""
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda m: errors.extend([m.text] * (m.type == "error")))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_function(DIAGRAMS_DRAWN)
    shown = page.evaluate(SHOWN)
    page.screenshot(path=picture)
    page.evaluate(UNFOLD)
    broken = Axe().run(page, options={"preload": False}).response["violations"]
    local = ("file:", "data:", "blob:")
    return shown | {
        "errors": errors,
        "network": [url for url in asked if not url.startswith(local)],
        "axe": [f"{each['id']}: {each['nodes'][0]['html']}" for each in broken],
    }


def main(pictures: str, *pages: str) -> None:
    """Print what is seen of each page."""
    Path(pictures).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for number, name in enumerate(pages):
            for theme, width in VIEWS.items():
                size = {"width": width, "height": 1000}
                page = browser.new_page(viewport=size, color_scheme=theme)
                page.set_default_timeout(60_000)
                picture = Path(pictures, f"{number:02}-{Path(name).stem}-{theme}.png")
                seen = look(page, Path(name).resolve().as_uri(), picture)
                print(json.dumps({"page": name, "theme": theme} | seen), flush=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
