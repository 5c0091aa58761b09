"""The scripts as a reader types them: they learn, resume, and answer bad input."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import scripts

DDP, RAY = scripts.TRAIN_DDP.name, scripts.TRAIN_RAY_DDP.name
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(path: Path, *arguments, num_workers: int = 2, **environment) -> tuple[int, str]:
    """Run a script in its own folder; returns its exit status and all it printed."""
    launcher = [sys.executable]
    if path == scripts.TRAIN_DDP:
        launcher = [*TORCHRUN, f"--nproc_per_node={num_workers}"]
    done = subprocess.run(
        [*launcher, path.name, *map(str, arguments)],
        cwd=path.parent,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


def saved_state(folder: Path) -> dict:
    (file,) = folder.rglob("checkpoint.pt")
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Both scripts, trained with their defaults; their checkpoint folders."""
    folders = {DDP: tmp_path_factory.mktemp("ddp"), RAY: tmp_path_factory.mktemp("ray")}
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        status, output = run(path, "--checkpoint-dir", folders[path.name])
        assert status == 0, output
    return folders


def test_both_scripts_learn_and_land_on_the_same_accuracy(trained):
    ddp, ray = saved_state(trained[DDP]), saved_state(trained[RAY])
    assert ddp["accuracy"] >= 0.95
    assert ddp["accuracy"] == ray["accuracy"]
    for name, value in ddp["model"].items():
        torch.testing.assert_close(value, ray["model"][name], rtol=0, atol=1e-6)


def test_a_finished_run_is_not_overwritten(trained):
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        before = saved_state(trained[path.name])
        status, output = run(path, "--checkpoint-dir", trained[path.name])
        assert status == 1
        assert sentence(path, output).endswith("or name another folder.")
        assert saved_state(trained[path.name])["epoch"] == before["epoch"]


def sentence(path: Path, output: str) -> str:
    """The one line in which the script says what is wrong; it comes exactly once."""
    said = [line for line in output.splitlines() if line.startswith(f"{path.name}: ")]
    assert len(said) == 1, output
    assert "Traceback (most recent call last):\n  File" not in output.split(said[0])[0]
    return said[0]


def missing(folder: Path) -> list:
    return ["--resume", "--checkpoint-dir", folder / "nothing"]


def unwritable(folder: Path) -> list:
    return ["--checkpoint-dir", "/sys/checkpoints"]  # also for root


def a_file(folder: Path) -> list:
    (folder / "file").write_text("not a folder")
    return ["--checkpoint-dir", folder / "file" / "checkpoints"]


def no_such_dataset(folder: Path) -> list:
    return ["--dataset", "digitz"]


def no_network(folder: Path) -> list:
    return ["--dataset", "mnist"]


def no_folder_to_resume(folder: Path) -> list:
    return ["--resume"]


def too_large_a_batch(folder: Path) -> list:
    return ["--batch-size", 1000]


BAD_INPUT = {
    missing: "leave out --resume",
    unwritable: "cannot be writ",
    a_file: "cannot be writ",
    no_such_dataset: "choose one of digits",
    no_folder_to_resume: "--resume needs --checkpoint-dir",
}


@pytest.mark.parametrize("bad", BAD_INPUT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", [scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP], ids=[DDP, RAY])
def test_bad_input_gets_one_sentence(path, bad, tmp_path):
    status, output = run(path, *bad(tmp_path))
    assert status != 0
    assert BAD_INPUT[bad] in sentence(path, output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(no_network, "'digits'"), (too_large_a_batch, "lower --batch-size")],
)
def test_bad_input_that_workers_find(arguments, words, tmp_path):
    status, output = run(scripts.TRAIN_DDP, *arguments(tmp_path))
    assert status == 1
    assert words in sentence(scripts.TRAIN_DDP, output)


def test_wrong_mode_names_the_three(tmp_path):
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        status, output = run(path, WORKSHOP_MODE="fast")
        assert status == 1
        assert "auto, smoke and full" in sentence(path, output)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:1000]),
        lambda file: torch.save({"model": {"another.weight": torch.ones(1)}}, file),
    ],
    ids=["damaged", "of another model"],
)
def test_a_checkpoint_that_does_not_fit(spoil, tmp_path):
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "epoch": 0}, file)
    spoil(file)
    before = file.read_bytes()
    status, output = run(
        scripts.TRAIN_DDP, "--resume", "--checkpoint-dir", tmp_path, num_workers=1
    )
    assert status == 1
    assert "damaged or of another model" in sentence(scripts.TRAIN_DDP, output)
    assert file.read_bytes() == before


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path):
    train_ddp = scripts.load(scripts.TRAIN_DDP)
    path = tmp_path / "checkpoint.pt"
    train_ddp.save_checkpoint({"epoch": 1}, path)

    class Unpicklable:
        def __reduce__(self):
            raise OSError(28, "No space left on device")

    # fails after its first bytes are written, as a disk that fills up does
    with pytest.raises(OSError, match="What was saved before is untouched"):
        train_ddp.save_checkpoint({"a": torch.ones(1000), "b": Unpicklable()}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_checkpoints_are_loaded_as_data_only():
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        calls = [
            {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg != "f"}
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        ]
        assert calls
        assert all(call["weights_only"] is True for call in calls)


def test_port_in_use_is_said():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [scripts.LAUNCH_MULTINODE],
            env=os.environ | {"MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == f"Port {port} is in use: set MASTER_PORT to a free one.\n"


def test_nodes_are_launched_over_ssh(tmp_path):
    """With an `ssh` that runs the command here, as sshd would, in another folder."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n'
        f'echo "$1" >>{tmp_path}/hosts\ncd / && exec bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    bin_folder = Path(sys.executable).parent
    environment = {
        "HOSTS": "127.0.0.1 localhost",
        "PATH": f"{tmp_path}:{bin_folder}:{os.environ['PATH']}",
        "MASTER_PORT": "29733",
    }
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE, "--epochs", "0", "--batch-size", "16"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 workers on cpu, batch 16 each and 32 global" in done.stdout
    assert sorted((tmp_path / "hosts").read_text().split()) == ["127.0.0.1", "localhost"]
