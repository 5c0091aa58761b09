"""The instructor's guide: each heading, exercise, minute, link and command is there."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from tests import readme
from tests.test_catch_up import bound, names_of, needs
from tests.tools.book.exercises import CHECK
from tests.tools.notebooks import ROOT, guide, outline, title
from utils.checks import EXERCISES

TEXT = guide.GUIDE.read_text()
LESSON = re.compile(
    r"^### (?P<number>\d\d/\d\d): (?P<title>.+)\n(?P<body>(?:(?!^#).*\n)+)",
    re.MULTILINE,
)
LESSONS = {found["number"]: found for found in LESSON.finditer(TEXT)}
ROUTE = {n: path for n, path in guide.by_number().items() if n[3:].isdigit()}
LINK = re.compile(r"\[(?P<text>[^\]]+|`[^`]+`[^\]]*)\]\((?P<target>[^)\s]+)\)")
# Of each lesson: they need no row.
OWN_SECTIONS = ("Exercises", "Summary", "Three questions")


def cells(path):
    return nbformat.read(path, as_version=4).cells


def headings(path: Path) -> list[str]:
    text = path.read_text()
    if path.suffix == ".ipynb":
        markdown = [c.source for c in cells(path) if c.cell_type == "markdown"]
        text = "\n".join(markdown)
    return guide.HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def exercises(path: Path) -> list[str]:
    """Return the exercises of a lesson's main line."""
    code = [c.source for c in outline.main_line(cells(path)) if c.cell_type == "code"]
    return [name for source in code for name in CHECK.findall(source)]


def test_minutes_are_those_of_the_notebooks():
    """`python -m tests.tools.notebooks link` writes them anew."""
    assert guide.with_minutes(TEXT) == TEXT
    assert len(guide.TIMES.findall(TEXT)) == len(LESSONS) > 0
    wrong = re.sub(r"Machine: \d+", "Machine: 99", TEXT)
    wrong = re.sub(r"(\.ipynb#[^)]+\) \| )\d+", r"\g<1>99", wrong)
    assert wrong != TEXT
    assert guide.with_minutes(wrong) == TEXT


@pytest.mark.parametrize("number", ROUTE)
def test_a_lesson_is_described_as_it_is(number):
    path, said = ROUTE[number], LESSONS[number]
    assert said["title"] == title(path)
    main = list(guide.sections(outline.main_line(cells(path))))
    rows = [row["heading"] for row in guide.ROW.finditer(said["body"])]
    assert rows == [name for name, _ in main if name not in OWN_SECTIONS]
    named = re.findall(r"^- `([^`]+)`: ", said["body"], re.MULTILINE)
    assert named == exercises(path)
    for word in ("Goal", "Wrong answers to expect", "Unstuck in a minute", "Late?"):
        assert f"**{word}" in said["body"], word


@pytest.mark.parametrize("number", LESSONS)
def test_what_is_quoted_of_a_lesson_stands_there(number):
    """Sections named in the sentences, as in 'skip "What workers print"'."""
    path, body = ROUTE[number], LESSONS[number]["body"]
    known = [*headings(path), "Run > Run All Above Selected Cell", "Run All Above"]
    known += ["Break it on purpose", "Shut Down All Kernels"]
    sentences = re.findall(r"^\*\*(?:Unstuck|Late).+$", body, re.MULTILINE)
    quoted = re.findall(r'"([^"]+)"', "\n".join(sentences))
    source = path.read_text()
    for words in quoted:
        there = any(heading.startswith(words) for heading in known)
        assert there or words in source, words


def test_every_link_leads_somewhere():
    found = 0
    for link in LINK.finditer(TEXT):
        if link["target"].startswith("https://"):
            continue
        file, _, anchor = link["target"].partition("#")
        path = (guide.GUIDE.parent / file).resolve()
        assert path.exists(), file
        if anchor:
            known = headings(path)
            assert anchor in map(outline.anchor, known), link["target"]
            found += 1
    assert found


def test_the_agendas_add_up_and_name_lessons():
    """Each start is the one before it and its minutes."""
    agendas = re.findall(r"^\| start .*\n\|-.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert agendas
    for agenda in agendas:
        clock = 0
        for row in agenda.splitlines():
            start, minutes, what, _ = (cell.strip() for cell in row.split("|")[1:5])
            assert start == f"{clock // 60}:{clock % 60:02d}", row
            clock += int(minutes or 0)
            if lesson := re.match(r"\[(\d\d/\d\d): (.+)\]\((.+)\)", what):
                path = ROUTE[lesson[1]]
                assert lesson[2] == title(path)
                assert (guide.GUIDE.parent / lesson[3]).resolve() == path
        assert what == "end"


def test_lessons_that_are_named_by_number_exist():
    for number in re.findall(r"\b\d\d/\d\d\b", TEXT):
        assert number in ROUTE, number


def test_commands_of_the_guide_exist():
    named = re.findall(r"(?:`|^)make (?:-B )?([a-z-]+)", TEXT, re.MULTILINE)
    assert {"doctor", "update", "catch-up", "rehearse"} <= set(named)
    assert set(named) <= set(readme.targets())
    for module in re.findall(r"-m ((?:tests|utils)[\w.]+)", TEXT):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module


def test_wrong_answers_are_of_exercises_that_exist():
    named = re.findall(r"^- `([^`]+)`: ", TEXT, re.MULTILINE)
    assert set(named) <= EXERCISES.keys()
    assert len(named) == len(set(named))


@pytest.mark.parametrize("number", LESSONS)
def test_what_may_be_skipped_is_needed_by_nothing_that_stays(number):
    """A section that the guide skips gives no name to a later one, but for exercises."""
    (late,) = re.findall(r"^\*\*Late\?.+$", LESSONS[number]["body"], re.MULTILINE)
    sentences = [s for s in re.split(r"(?<=[.:]) (?=[A-Zs])", late) if "Skip " in s]
    named = [words for s in sentences for words in re.findall(r'"([^"]+)"', s)]
    main = dict(guide.sections(outline.main_line(cells(ROUTE[number]))))
    skipped = [heading for heading in main if heading in named]
    assert len(skipped) == len(named), named
    gone: set[str] = set()
    for heading, below in main.items():
        for cell in (c for c in below if c.cell_type == "code"):
            if heading in skipped:
                gone |= names_of(cell, bound)
            elif heading not in OWN_SECTIONS:
                # a parameter or a local name may be called the same
                read = names_of(cell, needs) - names_of(cell, local)
                assert not read & gone, (heading, read & gone)
                gone -= names_of(cell, bound)


def local(source: str) -> set[str]:
    """Return the names that a cell binds anywhere, parameters included."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {
        n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return names | {n.arg for n in nodes if isinstance(n, ast.arg)}
