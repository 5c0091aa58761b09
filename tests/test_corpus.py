"""The text of part 03: shipped, split without a byte in common, or any file."""

import lzma

import pytest

from utils import datasets
from utils.datasets import shipped
from utils.errors import BadInput


def test_text_is_the_topics_and_targets_are_the_next_bytes():
    raw = lzma.decompress(shipped.TEXT_FILE.read_bytes())
    assert len(raw) == 466_273
    train, test = datasets.text("train"), datasets.text("test")
    inputs, targets = train.tensors
    assert inputs.shape == targets.shape == (6556, 64)
    assert (inputs.flatten()[1:] == targets.flatten()[:-1]).all()
    assert bytes(inputs.flatten().tolist()) == raw[: inputs.numel()]
    # the splits share no byte
    test_start = len(raw) - len(raw) // 10
    assert inputs.numel() < test_start
    assert bytes(test.tensors[0].flatten().tolist()) in raw[test_start:]


def test_text_of_any_file(tmp_path):
    path = tmp_path / "hello.txt"
    path.write_bytes(bytes(range(200)))
    inputs, targets = datasets.text(block_size=8, path=path).tensors
    assert inputs.shape == (22, 8)
    assert (targets == inputs + 1).all()
    # 180 bytes to train on: the last one has no byte that follows it, so 9 blocks are 8
    inputs, targets = datasets.text(block_size=20, path=path).tensors
    assert inputs.shape == targets.shape == (8, 20)


def test_text_says_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"nowhere\.txt cannot be read"):
        datasets.text(path=tmp_path / "nowhere.txt")
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(BadInput, match="lower block_size"):
        datasets.text(path=short)
    with pytest.raises(BadInput, match="'train' or 'test'"):
        datasets.text("valid")
    monkeypatch.setattr(shipped, "TEXT_FILE", short)
    with pytest.raises(BadInput, match="damaged"):
        datasets.text()
