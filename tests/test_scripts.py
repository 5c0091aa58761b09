"""The scripts as a reader types them: they learn, resume, and answer bad input."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import scripts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(path: Path, *arguments, num_workers: int = 4) -> tuple[int, str]:
    """Run a script as a reader types it; returns its exit status and all it printed."""
    launcher = [sys.executable]
    if path == scripts.TRAIN_DDP:
        launcher = [*TORCHRUN, f"--nproc_per_node={num_workers}"]
    done = subprocess.run(
        [*launcher, path.name, *map(str, arguments)],
        cwd=path.parent,
        env=scripts.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


@pytest.fixture
def complaint(monkeypatch):
    """A function that calls a script here, as the only rank, and returns its sentence."""

    def call(path: Path, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        with pytest.raises(SystemExit) as stopped:
            scripts.load(path).main()
        if dist.is_initialized():
            dist.destroy_process_group()
        said = stopped.value.code  # a text: Python prints it and exits with status 1
        assert said.startswith(f"{path.name}: ")
        assert "\n" not in said
        return said

    return call


BOTH = pytest.mark.parametrize(
    "path", [scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP], ids=lambda path: path.name
)


def saved_state(folder: Path) -> dict:
    (file,) = folder.rglob("checkpoint.pt")
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[Path, tuple[Path, str]]:
    """Of both scripts, as the lessons say to type them: checkpoint folder and output.

    Four workers, on any number of cores.
    """
    results = {}
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        folder = tmp_path_factory.mktemp(path.stem)
        workers = ["--num-workers", 4] if path == scripts.TRAIN_RAY_DDP else []
        arguments = [*workers, "--epochs", 3, "--checkpoint-dir", folder]
        status, output = run(path, *arguments)
        assert status == 0, output
        results[path] = folder, output
    return results


def test_both_scripts_learn(trained):
    ddp, ray = (saved_state(folder)["accuracy"] for folder, _ in trained.values())
    assert ddp == ray >= 0.95


def test_both_scripts_end_with_the_same_weights(trained):
    ddp, ray = (saved_state(folder)["model"] for folder, _ in trained.values())
    for name, value in ddp.items():
        torch.testing.assert_close(value, ray[name], rtol=0, atol=1e-6)


@BOTH
def test_every_epoch_is_one_line_without_noise(trained, path):
    lines = trained[path][1].splitlines()
    for number in (1, 2, 3):
        (line,) = [line for line in lines if re.search(rf"epoch {number}\b", line)]
        assert "test accuracy" in line
    noise = "Warning|Reporting training result|Checkpoint successfully created"
    assert not [line for line in lines if re.search(noise, line)]


@BOTH
def test_a_finished_run_is_not_overwritten(trained, path, complaint):
    folder, _ = trained[path]
    said = complaint(path, "--checkpoint-dir", folder)
    assert said.endswith("or name another folder.")
    assert saved_state(folder)["epoch"] == 2


def test_one_rank_speaks_for_all():
    status, output = run(scripts.TRAIN_DDP, "--dataset", "digitz", num_workers=2)
    assert status == 1
    assert output.count("train_ddp.py: There is no dataset") == 1


BAD_INPUT = {
    "nothing to resume": (
        ["--resume", "--checkpoint-dir", "nothing"],
        "leave out --resu",
    ),
    "read-only folder": (["--checkpoint-dir", "/sys/checkpoints"], "cannot be writ"),
    "a file as folder": (["--checkpoint-dir", "file/checkpoints"], "cannot be writ"),
    "no such dataset": (["--dataset", "digitz"], "choose one of digits, mnist"),
    "resume from where": (["--resume"], "--resume needs --checkpoint-dir"),
}


@BOTH
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_sentence(path, what, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    arguments, words = BAD_INPUT[what]
    assert words in complaint(path, *arguments)
    assert os.listdir() == ["file"]  # nothing written, nothing lost


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "mnist"], "'digits'"),
        (["--batch-size", 2000], "lower --batch-si"),
    ],
)
def test_bad_input_that_workers_find(
    arguments, words, complaint, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    assert words in complaint(scripts.TRAIN_DDP, *arguments)


@BOTH
def test_wrong_mode_names_the_three(path, complaint, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "fast")
    assert "auto, smoke and full" in complaint(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:1000]),
        lambda file: torch.save({"model": {"another.weight": torch.ones(1)}}, file),
    ],
    ids=["damaged", "of another model"],
)
def test_a_checkpoint_that_does_not_fit(spoil, tmp_path, complaint):
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "epoch": 0}, file)
    spoil(file)
    before = file.read_bytes()
    said = complaint(scripts.TRAIN_DDP, "--resume", "--checkpoint-dir", tmp_path)
    assert "damaged or of another model" in said
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
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n"
        f'echo "$1" >>{tmp_path}/hosts\necho "$2" >>{tmp_path}/commands\n'
        'cd / && exec env -u GLOO_SOCKET_IFNAME bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    bin_folder = Path(sys.executable).parent
    environment = {
        "HOSTS": "127.0.0.1 localhost",
        "PATH": f"{tmp_path}:{bin_folder}:{os.environ['PATH']}",
        "MASTER_PORT": "29733",
        "GLOO_SOCKET_IFNAME": "lo",
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
    assert sorted((tmp_path / "hosts").read_text().split()) == [
        "127.0.0.1",
        "localhost",
    ]
    commands = (tmp_path / "commands").read_text().splitlines()
    assert ["GLOO_SOCKET_IFNAME=lo " in command for command in commands] == [True] * 2


def test_a_host_that_fails_ends_the_other_one(tmp_path):
    """Else its torchrun would wait there, and hold the GPUs, after all is over here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/bash\n[[ $* == *node_rank=1* ]] && sleep 1 && exit 3\n"
        f"echo $$ >{tmp_path}/pid && exec sleep 300\n"
    )
    ssh.chmod(0o755)
    environment = {"HOSTS": "one two", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE], env=os.environ | environment, timeout=60
    )
    assert done.returncode != 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
