"""Main line and side trips of a lesson, and their minutes, from one source."""

import nbformat
import pytest

from tests.tools.notebooks import outline

text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell


@pytest.fixture
def lesson():
    cells = [text("# What?\n\nWords.\n\n**Needs:** nothing."), code("x = 1\n" * 20)]
    cells += [text("## Summary"), text("## Going deeper\n\nEach stands alone.")]
    cells += [text("### How fast, and why?\n\n" + "word " * 395), code("x")]
    cells += [text("#### Part of it"), text("### Short"), code("y")]
    cells += [text("## Read next\n\n[that](there)"), code("end()")]
    return nbformat.v4.new_notebook(cells=cells)


def test_trips_end_where_the_next_heading_begins(lesson):
    assert len(outline.main_line(lesson.cells)) == 3
    trips = outline.side_trips(lesson.cells)
    assert {heading: len(cells) for heading, cells in trips.items()} == {
        "How fast, and why?": 3,
        "Short": 2,
    }


def test_code_that_a_cell_shows_is_read_too():
    cell = code("show.source(train)")
    cell.outputs = [
        nbformat.v4.new_output("display_data", {"text/markdown": block})
        for block in ("```python\n" + "x = 1\n\n" * 20 + "```", "| a table |\n" * 30)
    ]
    assert outline.lines_shown(cell) == 20
    assert outline.minutes_to_read([cell]) == 2


def test_times_are_written_once_and_stay_as_they_are(lesson):
    outline.with_times(lesson, seconds=61)
    first = lesson.cells[0].source
    assert first.endswith(
        "**Time:** 2 minutes to run on two CPU cores; the main line takes 2 minutes to "
        "read. Going deeper, in minutes: [How fast, and why?](#how-fast-and-why) 2, "
        "[Short](#short) 1. <!-- time -->"
    )
    outline.with_times(lesson)
    assert lesson.cells[0].source == first
    lesson.cells[0].source = first.replace("# What?", "# What?\n\n**Also.**")
    outline.with_times(lesson, seconds=1)
    assert "1 minute to run" in lesson.cells[0].source
    assert lesson.cells[0].source.count("<!-- time -->") == 1


def test_rows_of_a_readme_come_from_the_notebooks(lesson, tmp_path, monkeypatch):
    path = tmp_path / "01-part" / "02_what.ipynb"
    path.parent.mkdir()
    outline.with_times(lesson, seconds=61)
    nbformat.write(lesson, path)
    monkeypatch.setattr(outline, "ROOT", tmp_path)
    monkeypatch.setattr(outline, "all_notebooks", lambda: [path])
    top, part = tmp_path / "README.md", path.parent / "README.md"
    top.write_text("| 01/02 | [old](01-part/02_what.ipynb) | 9 |\n| other |\n")
    part.write_text("| [02_what](02_what.ipynb) | old | 9 | 9 | 9 |\n")
    outline.write_rows()
    assert top.read_text() == (
        "| 01/02 | [What?](01-part/02_what.ipynb) | 2 | 2 | 3 |\n| other |\n"
    )
    assert part.read_text() == (
        "| [02_what](02_what.ipynb) | What? | 2 | 2 | "
        "[How fast, and why?](02_what.ipynb#how-fast-and-why) 2, "
        "[Short](02_what.ipynb#short) 1 |\n"
    )
