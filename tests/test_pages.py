"""What the guide and the READMEs name is there: links, headings, commands, files."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.test_notebooks import dead_links
from tests.tools.notebooks import ROOT, all_notebooks, title
from utils.checks import EXERCISES

FOLDERS = ("*.md", "docs/*.md", "0*/**/*.md", "utils/**/*.md")
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(folder))]
PAGES.remove(ROOT / "CHANGELOG.md")  # names what was there once
GUIDE = ROOT / "docs" / "teaching.md"
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
# A path from the root, such as utils/zero.py, that no command writes.
IN_HERE = re.compile(
    r"(?<!> )(?<![\w./$-])(?:0\d-|utils/|tests/|docs/|\.ci/)[\w./-]*[\w-]"
)


def missing(page: Path) -> list[str]:
    """Return what a page links to or tells the reader to type, and is not there."""
    found = dead_links(page)
    code = "\n".join(CODE.findall(page.read_text()))
    for target in re.findall(r"\bmake (?:-B )?([a-z][a-z-]*)", code):
        if target not in TARGETS:
            found.append(f"make {target}")
    for module in re.findall(r"-m ((?:tests|utils)[\w.]*)", code):
        path = ROOT / module.replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").exists():
            found.append(module)
    return found + [
        path for path in IN_HERE.findall(code) if not (ROOT / path).exists()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    assert missing(page) == []


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("[it](a.md)", "a.md"),
        ("`make gone`", "make gone"),
        ("```\npython -m utils.gone\n```", "utils.gone"),
        ("`utils/gone.py`", "utils/gone.py"),
    ],
)
def test_what_is_gone_is_seen(said, gone, tmp_path):
    page = tmp_path / "page.md"
    right = "[h](#here) [h](page.md#here) `make lab`, `utils/launch.py > docs/new.txt`"
    page.write_text(f"# Here\n{right}\n\n{said}\n")
    assert missing(page) == [gone]


def test_lessons_and_exercises_are_called_in_the_guide_as_they_are():
    text = GUIDE.read_text()
    lessons = re.findall(r"\[\d\d/\d\d: (.+?)\]\((\S+\.ipynb)\)", text)
    lessons += re.findall(r"^### \d\d/\d\d: (.+)\n\n\[Notebook\]\((\S+)\)", text, re.M)
    assert lessons
    for name, file in lessons:
        assert name == title(GUIDE.parent / file), file
    exercises = re.findall(r"^- `([^`]+)`: ", text, re.MULTILINE)
    assert exercises and set(exercises) <= EXERCISES.keys()


def test_minutes_of_a_lesson_are_the_same_wherever_they_stand():
    readme = (ROOT / "README.md").read_text()
    for path in all_notebooks():
        if path.stem == "solutions":
            continue
        first = nbformat.read(path, as_version=4).cells[0].source
        said = re.search(r"(\d+) minutes? to run.*main line takes (\d+) min", first)
        numbers = rf"{said[1]} \| {said[2]} \|"
        name = re.escape(path.relative_to(ROOT).as_posix())
        assert re.search(rf"\({name}\) \| {numbers}", readme), path
        part = (path.parent / "README.md").read_text()
        assert re.search(rf"\({path.name}\) \|[^|]+\| {numbers}", part), path
