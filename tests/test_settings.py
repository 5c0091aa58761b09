"""Run mode and what follows from it, with and without CUDA."""

import subprocess
import sys

import pytest
import torch

from tests.waiting import TIMEOUT_S
from utils import settings
from utils.errors import BadInput


@pytest.fixture(params=[True, False], ids=["cuda", "no cuda"])
def cuda(request, monkeypatch):
    """Set up a machine with three GPUs, and one without any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3 * request.param)
    return request.param


def test_auto_follows_cuda(cuda, monkeypatch):
    expected = "full" if cuda else "smoke"
    for setting in ("auto", "AUTO ", None):
        if setting:
            monkeypatch.setenv("WORKSHOP_MODE", setting)
        else:
            monkeypatch.delenv("WORKSHOP_MODE")
        assert settings.mode() == expected


def test_smoke_forces_the_cpu(cuda, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    assert settings.mode() == "smoke"
    assert settings.device() == torch.device("cpu")
    assert settings.backend() == "gloo"
    assert settings.num_workers() == 2
    assert settings.pick(smoke=(2, 60), full=(4, 500)) == (2, 60)


def test_full_uses_every_gpu_there_is(cuda, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "full")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert settings.mode() == "full"
    assert settings.device() == torch.device("cuda:2" if cuda else "cpu")
    assert settings.backend() == ("nccl" if cuda else "gloo")
    assert settings.num_workers() == (3 if cuda else 2)
    # on a head without a GPU, what trains here is as small as on a laptop
    assert settings.pick(smoke=1, full=2) == (2 if cuda else 1)
    assert settings.pick(smoke=1, full=2, joins=True) == 2


@pytest.mark.parametrize("wrong", ["fast", ""])
def test_wrong_mode_names_the_three(monkeypatch, wrong):
    monkeypatch.setenv("WORKSHOP_MODE", wrong)
    for ask in (settings.mode, settings.device, lambda: settings.pick(smoke=1, full=2)):
        with pytest.raises(BadInput, match="must be one of auto, smoke and full") as e:
            ask()
        assert repr(wrong) in str(e.value)
        assert "\n" not in str(e.value)


def test_asking_for_the_mode_does_not_import_torch():
    code = (
        "import sys; from utils import settings; settings.mode(); print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    modules = subprocess.check_output(command, text=True, timeout=TIMEOUT_S).split()
    assert "utils.settings" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("address", ["s3://bucket/results", "file:///a"])
def test_storage_path_that_is_no_folder(monkeypatch, tmp_path, address):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKSHOP_STORAGE", address)
    with pytest.raises(BadInput, match="is an address: name a path"):
        settings.storage_path()
    assert list(tmp_path.iterdir()) == []


def test_storage_path_is_made_and_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKSHOP_STORAGE", "a folder/below")
    assert settings.storage_path() == tmp_path / "a folder" / "below"
    assert list(settings.storage_path().iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORKSHOP_STORAGE", "~/results")
    assert settings.storage_path() == tmp_path / "results"


@pytest.mark.parametrize("place", ["/sys/kernel/results", "{tmp}/file/results", "/sys"])
def test_storage_path_that_cannot_be_written(monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    path = place.format(tmp=tmp_path)
    monkeypatch.setenv("WORKSHOP_STORAGE", path)
    with pytest.raises(BadInput, match="set WORKSHOP_STORAGE to another") as e:
        settings.storage_path()
    assert f"The folder {path} cannot be written to (" in str(e.value)
    assert "None" not in str(e.value)
    assert "\n" not in str(e.value)
