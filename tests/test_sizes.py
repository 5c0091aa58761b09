"""The report of sizes counts right; no size is a limit."""

import nbformat

from tests import readme, scripts
from tests.tools import notebooks, sizes


def test_a_notebook_is_counted(tmp_path):
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    ignored = code("a = 1\n\nb = 2\nc = 3", metadata={"tags": ["nbval-ignore-output"]})
    picture = nbformat.v4.new_output("display_data", {"image/png": "AA=="})
    cells = [text("# A\n**Time:** a minute to run, 9 minutes to read."), ignored]
    cells += [code("\n".join(["x"] * 17)), text("word " * 587 + "\n```mermaid\n```")]
    cells += [code("d", outputs=[picture]), text("## Going deeper"), code("x\n" * 40)]
    path = tmp_path / "02-part" / "01_a.ipynb"
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    # 3, 17, 1 and 40 lines of code; 11, 589 and 3 words, of which 600 in the main line
    expected = [7, 5, "10", 40, 2, 1, 1, 1, 9, 5]
    assert sizes.notebook_row(path) == expected
    assert sizes.notebook_table([path]).splitlines()[1].split() == [
        "02/01_a",
        *map(str, expected),
    ]


def test_a_script_is_counted(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import os\n\n\ndef f():\n    return (\n        1\n    )\n\nf()\n")
    assert sizes.script_row(path) == [9, 4, "f"]


def test_every_notebook_script_and_covered_command_is_in_the_report(capsys):
    sizes.main()
    printed = capsys.readouterr().out
    starts = {line.split("  ")[0] for line in printed.splitlines()}
    there = {f"{p.parent.name[:2]}/{p.stem}" for p in notebooks.all_notebooks()}
    there |= {path.name for path in scripts.ROOT.glob("0*/train_*.py")}
    assert there | readme.only_covered().keys() <= starts
