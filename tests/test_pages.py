"""What the guide and the READMEs name is there: links, headings, commands, files."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.test_notebooks import dead_links
from tests.tools.notebooks import ROOT, all_notebooks, title
from tests.tools.notebooks.outline import main_line
from utils.checks import EXERCISES

FOLDERS = ("*.md", "docs/**/*.md", "0*/**/*.md", "utils/**/*.md")
PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(folder))]
PAGES.remove(ROOT / "CHANGELOG.md")  # names what was there once
GUIDE = ROOT / "docs" / "teaching.md"
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
# In minutes. A half day ends with lunch, or with the day.
LONGEST_STRETCH, LEAST_SLACK = 75, 20
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


def agendas() -> list[list[list[str]]]:
    """Return the tables of days: of each row when it starts, its minutes, what, and how."""
    tables = re.findall(r"^\| start \|.*?(?=\n\n)", GUIDE.read_text(), re.M | re.S)
    rows = [table.splitlines()[2:] for table in tables]
    return [[re.split(r" *\| *", row.strip("|")) for row in day] for day in rows]


def too_tight(day: list[list[str]]) -> list[str]:
    """Return where a day's times don't add up, and where a break or slack is missing."""
    found, now, stretch, slack = [], 0, 0, 0
    for start, minutes, what, *_ in day:
        what, lasts = what.strip(), int(minutes or 0)
        hours, rest = map(int, start.split(":"))
        if 60 * hours + rest != now:
            found.append(f"{what}: not at {start.strip()}")
        now += lasts
        if what in ("Break", "Lunch", "end"):
            if stretch > LONGEST_STRETCH:
                found.append(f"{what}: after {stretch} minutes")
            stretch = -lasts
        stretch += lasts
        slack += lasts * (what == "Slack")
        if what in ("Lunch", "end"):
            if slack < LEAST_SLACK:
                found.append(f"{what}: only {slack} minutes of slack before it")
            slack = 0
    return found


def test_each_agenda_has_breaks_and_slack():
    days = agendas()
    assert len(days) >= 5
    for day in days:
        assert too_tight(day) == [], day[0]


@pytest.mark.parametrize(
    ("day", "missing"),
    [
        ("0:00|55|a 0:55|20|Slack 1:15|15|Break 1:30|75|b 2:45||end", []),
        ("0:00|56|a 0:56|20|Slack 1:16||end", ["end: after 76 minutes"]),
        (
            "0:00|55|a 0:55|20|Slack 1:15|60|Lunch 2:15|40|b 2:55||end",
            ["end: only 0 minutes of slack before it"],
        ),
        ("0:00|20|Slack 0:25||end", ["end: not at 0:25"]),
    ],
)
def test_a_day_that_is_too_tight_is_seen(day, missing):
    assert too_tight([row.split("|") for row in day.split()]) == missing


def test_exercises_that_an_agenda_names_are_in_the_lesson():
    for _, _, what, how in (row for day in agendas() for row in day):
        if lesson := re.search(r"\((\S+\.ipynb)\)", what):
            cells = main_line(
                nbformat.read(GUIDE.parent / lesson[1], as_version=4).cells
            )
            text = "\n".join(cell.source for cell in cells)
            text = text.partition("## Exercises")[2].partition("\n## ")[0]
            for number in re.findall(r"exercise (\d)", how):
                assert re.search(rf"^(?:\*\*)?{number}\.", text, re.M), (what, number)


def in_a_hub(page: Path) -> list[str]:
    """Return the cells of the column "in a hub", of all tables of a page."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, _, *rows = (
            [c.strip() for c in row.split("|")] for row in table.splitlines()
        )
        if "in a hub" in head:
            found += [row[head.index("in a hub")] for row in rows]
    return found


@pytest.mark.parametrize("page", [GUIDE, GUIDE.parent / "teaching" / "handout.md"])
def test_what_a_page_says_of_a_hub_can_be_typed_there(page):
    """A seat has neither make nor a .venv, and its lessons are a copy without git."""
    cells = in_a_hub(page)
    assert len(cells) > 8
    for cell in cells:
        assert not re.search(r"\bmake\b|\bgit\b|\.venv", cell), cell


def test_every_command_is_on_the_page_of_commands():
    helped = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert {*re.findall(r"^make ([a-z-]+)", page, re.M)} == {*helped} - {"help"}


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
