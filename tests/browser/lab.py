"""Drive JupyterLab in headless Chromium: one step for each line of standard input.

    python lab.py build/screenshots/lab 900

It runs in .venv-weekly and needs nothing of this repository. A line is a list in JSON: the
name of a method of `Lab`, and its arguments. The answer is a line of JSON with what the
method returned. It waits for what the page shows, up to that many seconds. If that does not
come, it leaves a picture, `failed.png`, and ends.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, expect, sync_playwright

NUMBERED = re.compile(r"\[\d+\]:")  # the prompt of a cell that has run
# The page shows a kernel as idle before it is connected, and then runs nothing. JavaScript;
# `--LabApp.expose_app_in_browser` gives pages the name `jupyterapp`.
READY = """() => {
  const panel = globalThis.jupyterapp?.shell.currentWidget;
  return panel?.context?.isReady
    && panel.sessionContext.session?.kernel?.connectionStatus === "connected"
    && panel.sessionContext.session.kernel.status === "idle";
}"""
WIDTHS = "images => images.map(image => image.complete ? image.naturalWidth : 0)"


class Lab:
    """A page of JupyterLab with one notebook, all of whose cells are on the page."""

    def __init__(self, page: Page, pictures: Path):
        self.page = page
        self.pictures = pictures
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda m: self.errors.extend([m.text] * (m.type == "error")))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))

    def open(self, address: str) -> dict[str, str | list[str]]:
        """Open a notebook; return its kernel and what stands on the left."""
        self.page.goto(address)
        self.ready()
        headings = self.page.locator(".jp-TableOfContents-content .jp-tocItem-content")
        headings.first.wait_for()  # in sight
        kernel = self.page.locator(".jp-KernelName").inner_text()
        return {"kernel": kernel, "contents": headings.all_inner_texts()}

    def ready(self) -> None:
        """Wait until the notebook in front has a kernel that has nothing to do."""
        self.page.wait_for_function(READY)
        self.picture("ready")

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook:visible .jp-Cell").nth(index)

    def prompts(self) -> Locator:
        """Return the prompts of the cells of code: "[ ]:", "[*]:" or "[1]:"."""
        notebook = self.page.locator(".jp-Notebook:visible")
        return notebook.locator(".jp-CodeCell .jp-InputPrompt")

    def run_all(self) -> dict[str, list]:
        """Run all cells by the menu.

        Returns:
            By cell of code its prompt, and whether it shows an error or a line of standard
            error; the widths of figures and diagrams, 0 for one that is not drawn.
        """
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        expect(self.prompts().filter(has_not_text=NUMBERED)).to_have_count(0)
        self.ready()
        cells = self.page.locator(".jp-Notebook:visible .jp-CodeCell").all()
        kinds = ("error", "stderr")  # JupyterLab shows an error as the one or the other
        error = ", ".join(f'[data-mime-type$="jupyter.{kind}"]' for kind in kinds)
        return {
            "prompts": self.prompts().all_inner_texts(),
            "errors": [bool(each.locator(error).count()) for each in cells],
            "figures": self.page.locator(".jp-RenderedImage img").evaluate_all(WIDTHS),
            "diagrams": self.page.locator(".jp-RenderedMermaid img").evaluate_all(
                WIDTHS
            ),
        }

    def start(self, index: int, source: str) -> None:
        """Type the code of a cell, and start it."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        before = prompt.inner_text()
        editor = self.cell(index).locator(".cm-content")
        editor.fill(source)
        editor.press("Control+Enter")
        expect(prompt).not_to_have_text(before)

    def shows(self, index: int, text: str) -> None:
        """Wait until a cell that was started has ended and shows a text."""
        expect(self.cell(index).locator(".jp-InputPrompt")).to_have_text(NUMBERED)
        expect(self.cell(index).locator(".jp-OutputArea")).to_contain_text(text)
        self.picture(f"cell-{index}")

    def stop(self) -> None:
        """Press the button that interrupts the kernel."""
        button = '[data-jp-item-name="interrupt"]'
        self.page.locator(f".jp-NotebookPanel:visible {button}").click()

    def follow(self, text: str) -> None:
        """Follow a link in the first cell; wait for the notebook of that title."""
        link = self.cell(0).get_by_role("link", name=text).first
        title = link.inner_text().removesuffix(" →")
        link.click()
        expect(self.cell(0).locator("h1")).to_contain_text(title)
        self.ready()

    def complaints(self) -> dict[str, list[str]]:
        """Return requests to elsewhere, errors in the console, and what asks the reader."""
        home = urlsplit(self.page.url).netloc
        asked = {url for url in self.asked if not url.startswith(("data:", "blob:"))}
        elsewhere = sorted(url for url in asked if urlsplit(url).netloc != home)
        questions = self.page.locator(".Toastify__toast").all_inner_texts()
        return {"elsewhere": elsewhere, "console": self.errors, "questions": questions}

    def picture(self, name: str) -> None:
        """Keep what is to be seen now."""
        self.page.screenshot(path=self.pictures / f"{name}.png")


def main(pictures: str, seconds: str) -> None:
    """Answer each line until there are no more."""
    Path(pictures).mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=float(seconds) * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(float(seconds) * 1000)
        lab = Lab(page, Path(pictures))
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = getattr(lab, name)(*arguments)
            except Exception:
                lab.picture("failed")
                raise
            print(json.dumps(answer), flush=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
