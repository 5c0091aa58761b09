"""Drive JupyterLab in headless Chromium: one step for each line of standard input.

    python lab.py build/screenshots/lab 900

It runs in an environment that has Playwright, and needs nothing of this repository. A line
is a list in JSON: the name of a method of `Lab`, and its arguments. The answer is a line of
JSON with what the method returned. It waits for what the page shows, up to that many
seconds. If that does not come, it leaves a picture, `failed.png`, and ends.
"""

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, sync_playwright

# JavaScript; `--LabApp.expose_app_in_browser` gives pages the name `jupyterapp`.
READY = """path => {
  const panel = globalThis.jupyterapp?.shell.currentWidget;
  return panel?.context?.path === path && panel.context.isReady
    && panel.sessionContext.session?.kernel?.status === "idle";
}"""
CODE = """() => [...jupyterapp.shell.currentWidget.content.model.cells]
  .map((cell, index) => ({ cell, index })).filter(each => each.cell.type === "code")
  .map(({ cell, index }) => ({
    index, count: cell.executionCount, outputs: cell.outputs.toJSON(),
    may_fail: (cell.getMetadata("tags") ?? []).includes("raises-exception") }))"""
IDLE = 'jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === "idle"'
# All cells have run, or one has failed that should not, below which none runs.
ENDED = f"""() => {{
  const cells = ({CODE})();
  return {IDLE} && (cells.every(each => each.count) || cells.some(each =>
    !each.may_fail && each.outputs.some(output => output.output_type === "error")));
}}"""
# A cell that has been answered has a new number, and its outputs come a moment later.
ANSWERED = f"""([index, before]) => {{
  const {{ count, outputs }} = ({CODE})().find(each => each.index === index);
  const cell = jupyterapp.shell.currentWidget.content.widgets[index].node;
  const shown = [...cell.querySelectorAll(".jp-OutputArea-output")];
  return {IDLE} && count && count !== before && shown.length === outputs.length
    && shown.every(output => output.textContent.trim());
}}"""
SHOW = """async index => {
  const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  await notebook.scrollToItem(index);
}"""
SOURCE = """([index, source]) => jupyterapp.shell.currentWidget.content.model.cells
  .get(index).sharedModel.getSource() === source"""
LOADED = "image => image.complete && image.naturalWidth > 0"
# The share of pixels that have not the commonest colour: 0 of a blank picture.
DRAWN = """async png => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  const counts = new Map();
  for (const pixel of new Uint32Array(data.buffer)) {
    counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  }
  return 1 - Math.max(...counts.values()) / (image.width * image.height);
}"""


class Lab:
    """A page of JupyterLab, with the notebook in front."""

    def __init__(self, page: Page, pictures: Path):
        self.page = page
        self.pictures = pictures
        self.said: list[str] = []
        self.asked: list[str] = []
        self.before: dict[int, int | None] = {}  # the number of a cell when it was sent
        page.on("console", lambda m: self.said.extend([m.text] * (m.type == "error")))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))

    def open(self, address: str, path: str) -> dict[str, Any]:
        """Open a notebook; return its kernel and what stands on the left."""
        self.page.goto(address)
        self.ready(path)
        headings = self.page.locator(".jp-TableOfContents-content .jp-tocItem-content")
        headings.first.wait_for()  # in sight
        self.picture("opened")
        kernel = self.page.locator(".jp-KernelName").inner_text()
        return {"kernel": kernel, "contents": headings.all_inner_texts()}

    def ready(self, path: str) -> None:
        """Wait until a notebook is in front, and its kernel has nothing to do."""
        self.page.wait_for_function(READY, arg=path)
        self.page.locator(".jp-Notebook:visible .jp-Cell").first.wait_for()

    def run_all(self) -> list[dict[str, Any]]:
        """Run all cells by the menu; return each cell of code with its outputs."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(ENDED, polling=500)
        self.picture("ran")
        return self.page.evaluate(CODE)

    def drawn(self, index: int, kind: str, count: int) -> list[float]:
        """Return how much is to be seen in each picture of a cell: 0 is a blank one.

        Args:
            kind: a class of CSS, "jp-RenderedImage" or "jp-RenderedMermaid".
            count: how many pictures to wait for.
        """
        images = self.cell(index).locator(f".{kind} img")
        images.nth(count - 1).wait_for()
        found = []
        for number, image in enumerate(images.all()):
            self.page.wait_for_function(LOADED, arg=image.element_handle())
            path = self.pictures / f"{kind}-{index}-{number}.png"
            picture = base64.b64encode(image.screenshot(path=path)).decode()
            found.append(self.page.evaluate(DRAWN, picture))
        return found

    def cell(self, index: int) -> Locator:
        """Show a cell, which is not on the page before, and return it."""
        self.page.evaluate(SHOW, index)
        place = f'[data-windowed-list-index="{index}"]'
        return self.page.locator(f".jp-Notebook:visible .jp-Cell{place}")

    def send(self, index: int, source: str) -> None:
        """Type the code of a cell, and start it."""
        cells = {each["index"]: each["count"] for each in self.page.evaluate(CODE)}
        self.before[index] = cells[index]
        editor = self.cell(index).locator(".cm-content")
        editor.fill(source)
        self.page.wait_for_function(SOURCE, arg=[index, source])
        editor.press("Control+Enter")

    def answered(self, index: int) -> str:
        """Wait until a cell has ended that was sent; return the text that it shows."""
        arg = [index, self.before[index]]
        self.page.wait_for_function(ANSWERED, arg=arg, polling=100)
        self.picture(f"cell-{index}")
        output = self.cell(index).locator(".jp-OutputArea-output")
        return "\n".join(output.all_text_contents()).strip()

    def bar(self, index: int, seen: str) -> None:
        """Wait until a cell shows that it is at work; write `seen`; wait until it ended."""
        bar = self.cell(index).locator(".jp-OutputArea-output progress")
        bar.wait_for()
        self.picture("bar")
        Path(seen).touch()
        bar.wait_for(state="detached")

    def stop(self) -> None:
        """Press the button that interrupts the kernel."""
        button = '[data-jp-item-name="interrupt"]'
        self.page.locator(f".jp-NotebookPanel:visible {button}").click()

    def follow(self, text: str, path: str) -> str:
        """Follow a link in the first cell; return the heading of the page it leads to."""
        self.cell(0).get_by_role("link", name=text).first.click()
        self.ready(path)
        self.picture("followed")
        return self.cell(0).locator("h1").inner_text()

    def complaints(self) -> dict[str, list[str]]:
        """Return requests to elsewhere, errors in the console, and what asks the reader."""
        questions = self.page.locator(".Toastify__toast").all_inner_texts()
        home = urlsplit(self.page.url).netloc
        local = ("data:", "blob:")
        asked = {url for url in self.asked if not url.startswith(local)}
        elsewhere = sorted(url for url in asked if urlsplit(url).netloc != home)
        return {"elsewhere": elsewhere, "console": self.said, "questions": questions}

    def picture(self, name: str) -> None:
        """Keep what is to be seen now."""
        self.page.screenshot(path=self.pictures / f"{name}.png")


def main(pictures: str, seconds: str) -> None:
    """Answer each line until there are no more."""
    Path(pictures).mkdir(parents=True, exist_ok=True)
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
