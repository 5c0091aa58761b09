"""Code shown in a notebook is the code of the file."""

import pytest

from utils import models, show


def test_source_is_the_code_of_the_function():
    shown = show.source(models.resnet18, models.resnet18).data
    assert shown.startswith("```python\ndef resnet18(")
    assert shown.endswith("return model\n```")
    assert shown.count("def resnet18(") == 2


def test_diff_shows_what_changes(tmp_path):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("".join(f"line {n}\n" for n in range(20)))
    new.write_text(old.read_text().replace("line 10\n", "changed\nadded\n"))
    lines = show.diff(old, new, context=1).data.splitlines()
    assert lines == [
        "```diff",
        "--- old.py",
        "+++ new.py",
        "@@ -10,3 +10,4 @@",
        " line 9",
        "-line 10",
        "+changed",
        "+added",
        " line 11",
        "```",
    ]
    assert show.diff(old, old).data == "No difference."


def test_diff_of_one_function_of_each_file(tmp_path):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("x = 1\n\n\n@property\ndef f():\n    return 1\n")
    new.write_text("y = 2\n\n\n@property\ndef g():\n    return 1\n")
    lines = show.diff(old, new, ("f", "g")).data.splitlines()
    assert [line for line in lines[3:] if line[0] in "+-"] == ["-def f():", "+def g():"]
    with pytest.raises(ValueError, match="no function 'h'"):
        show.diff(old, new, ("f", "h"))
