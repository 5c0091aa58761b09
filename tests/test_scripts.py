"""The scripts as a reader types them: they learn, resume, and answer bad input."""

import ast
import os
import re
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests import scripts
from utils.launch import run_ranks
from utils.models import resnet18

pytestmark = [pytest.mark.part01, pytest.mark.part02]

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


def kill_a_ray_worker(folder: Path) -> None:
    """SIGKILL to one of the workers of a run, in its second epoch; leaves a note."""
    noted = folder / "train_ray_ddp" / "checkpoint_manager_snapshot.json"
    deadline = time.time() + 200
    while time.time() < deadline:
        if noted.exists() and "checkpoint_2" in noted.read_text():
            workers = [
                process
                for process in psutil.Process().children(recursive=True)
                if "RayTrainWorker" in " ".join(process.cmdline())
            ]
            workers[-1].kill()
            (folder / "killed").write_text(f"one of {len(workers)}")
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[Path, tuple[Path, str]]:
    """Of both scripts, as the lessons say to type them: checkpoint folder and output.

    Four workers, on any number of cores. After the first epoch, one under Ray is killed,
    and torchrun's run is resumed: both go on from a checkpoint, with the same rounding.
    """
    results = {}
    for path in (scripts.TRAIN_DDP, scripts.TRAIN_RAY_DDP):
        folder = tmp_path_factory.mktemp(path.stem)
        arguments = ["--epochs", 3, "--checkpoint-dir", folder]
        earlier = ""
        if path == scripts.TRAIN_DDP:
            status, earlier = run(path, *arguments, "--epochs", 1)
            assert status == 0, earlier
            arguments.append("--resume")
        else:
            arguments += ["--num-workers", 4]
            killer = threading.Thread(target=kill_a_ray_worker, args=[folder])
            killer.start()
        status, output = run(path, *arguments)
        assert status == 0, output
        output = earlier + output
        results[path] = folder, output
    return results


@pytest.mark.slow
@pytest.mark.runs("torchrun --nproc_per_node=4 train_ddp.py --epochs 3")
@pytest.mark.runs("python train_ray_ddp.py --num-workers 4 --epochs 3")
def test_both_scripts_learn(trained):
    ddp, ray = (saved_state(folder)["accuracy"] for folder, _ in trained.values())
    assert ddp == ray >= 0.95


@pytest.mark.slow
def test_ray_replaced_a_worker_that_was_killed(trained):
    """And the run went on from its checkpoint: it ends with torchrun's weights, below."""
    folder, _ = trained[scripts.TRAIN_RAY_DDP]
    assert (folder / "killed").read_text() == "one of 4"


@pytest.mark.slow
def test_both_scripts_end_with_the_same_weights(trained):
    ddp, ray = (saved_state(folder)["model"] for folder, _ in trained.values())
    for name, value in ddp.items():
        torch.testing.assert_close(value, ray[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@BOTH
def test_every_epoch_is_one_line_without_noise(trained, path):
    lines = trained[path][1].splitlines()
    for number in (1, 2, 3):
        (line,) = [line for line in lines if re.search(rf"epoch {number}\b", line)]
        assert "test accuracy" in line
    noise = "Warning|Reporting training result|Checkpoint successfully created"
    assert not [line for line in lines if re.search(noise, line)]


@pytest.mark.slow
@BOTH
def test_a_finished_run_is_not_overwritten(trained, path, complaint):
    folder, _ = trained[path]
    said = complaint(path, "--checkpoint-dir", folder)
    assert said.endswith("or name another folder.")
    assert saved_state(folder)["epoch"] == 2


def test_a_rank_speaks_where_rank_0_has_nothing_to_say(monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)  # torchrun would end this rank
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match=r"train_ddp\.py: No room on this host"):
        scripts.load(scripts.TRAIN_DDP).stop(OSError("No room on this host."))
    assert waited == [10]


def test_a_restart_without_a_shared_folder_is_said(tmp_path):
    """Rank 0 finds its checkpoint on its node; rank 1, on another one, would start anew."""

    def set_up():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        train_ddp = scripts.load(scripts.TRAIN_DDP)
        args = Namespace(dataset="digits", batch_size=8, epochs=1, resume=False)
        args.checkpoint_dir = tmp_path / os.environ["RANK"]
        if os.environ["RANK"] == "0":
            state = {"model": train_ddp.resnet18().state_dict()}
            state |= {"optimizer": {}, "epoch": 0}
            train_ddp.save_checkpoint(state, args.checkpoint_dir / "checkpoint.pt")
        try:
            return train_ddp.set_up(args)[4]["epoch"]
        except OSError as problem:
            return str(problem)

    first, second = run_ranks(set_up, 2)
    assert first == 0
    assert "on several nodes, name a folder that all of them share" in second


def test_more_workers_than_gpus_is_said_by_every_rank(monkeypatch):
    train_ddp = scripts.load(scripts.TRAIN_DDP)
    monkeypatch.setattr(train_ddp.settings, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="more workers than GPUs \\(1\\)"):
        train_ddp.set_up(Namespace(batch_size=8, epochs=1))


@pytest.mark.slow
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


def no_network(monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "mnist"], "'digits'"),
        (["--batch-size", 2000], "lower --batch-si"),
        (["--batch-size", 0], "--batch-size has to be at least 1"),
    ],
)
def test_bad_input_that_workers_find(
    arguments, words, complaint, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    no_network(monkeypatch)
    assert words in complaint(scripts.TRAIN_DDP, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "mnist"], "'digits'"),
        (["--batch-size", 2000], "lower --batch-size"),
        (["--epochs", 0], "--epochs is 0, but has to be at least 1"),
    ],
)
def test_bad_input_that_is_found_before_ray_starts(
    arguments, words, complaint, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_STORAGE", str(tmp_path))
    no_network(monkeypatch)
    assert words in complaint(scripts.TRAIN_RAY_DDP, *arguments)


@pytest.mark.parametrize(
    "path", sorted(scripts.ROOT.glob("0*/train_*.py")), ids=lambda path: path.name
)
def test_an_address_is_no_path(path, tmp_path, monkeypatch, capsys):
    """In every option of every script that names a folder or file to be mounted."""
    monkeypatch.chdir(tmp_path)
    parse_args = scripts.load(path).parse_args
    options = {"--checkpoint-dir", "--text", "--export", "--ds-config"}
    options &= set(re.findall(r"--[a-z-]+", path.read_text()))
    assert "--checkpoint-dir" in options
    for option in options:
        monkeypatch.setattr(sys, "argv", [path.name, option, "gs://bucket/runs"])
        with pytest.raises(SystemExit):
            parse_args()
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"{option}: gs://bucket/runs is an address: name a path" in last
    monkeypatch.setattr(sys, "argv", [path.name, "--checkpoint-dir", "a folder"])
    assert parse_args().checkpoint_dir == tmp_path / "a folder"
    assert list(tmp_path.iterdir()) == []


@BOTH
def test_wrong_mode_names_the_three(path, complaint, monkeypatch):
    monkeypatch.setenv("WORKSHOP_MODE", "fast")
    assert "auto, smoke and full" in complaint(path)


WHOLE = {"optimizer": {}, "epoch": 0}
SPOILT = {
    "damaged": lambda file: file.write_bytes(file.read_bytes()[:1000]),
    "of another model": lambda file: torch.save(
        WHOLE | {"model": {"another.weight": torch.ones(1)}}, file
    ),
    "weights alone": lambda file: torch.save({"model": resnet18().state_dict()}, file),
}


@BOTH
@pytest.mark.parametrize("how", SPOILT)
def test_a_checkpoint_that_does_not_fit(path, how, tmp_path, complaint, monkeypatch):
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": resnet18().state_dict()} | WHOLE, file)
    SPOILT[how](file)
    before = file.read_bytes()
    if path == scripts.TRAIN_DDP:
        said = complaint(path, "--resume", "--checkpoint-dir", tmp_path)
    else:  # what a worker raises, which ends the run with this sentence
        there = Checkpoint.from_directory(tmp_path)
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: there)
        with pytest.raises(ValueError, match="start without --resume") as raised:
            scripts.load(path).load_latest(resnet18())
        said = str(raised.value)
    assert "damaged or of another model" in said
    assert "\n" not in said
    assert file.read_bytes() == before


def test_a_disk_that_fills_up_is_one_sentence(complaint, monkeypatch, tmp_path):
    """In the middle of the run; what other files hold is untouched."""
    (tmp_path / "writable").write_text("of the reader")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    arguments = ["--epochs", 1, "--batch-size", 700, "--checkpoint-dir", tmp_path]
    said = complaint(scripts.TRAIN_DDP, *arguments)
    assert "cannot be written" in said
    assert "No space left" in said
    assert (tmp_path / "writable").read_text() == "of the reader"


def test_resume_asks_for_a_writable_folder_first(complaint, monkeypatch, tmp_path):
    """Not after an epoch of work."""
    state = {"model": resnet18().state_dict()} | WHOLE
    torch.save(state, tmp_path / "checkpoint.pt")

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    said = complaint(scripts.TRAIN_DDP, "--resume", "--checkpoint-dir", tmp_path)
    assert said.endswith("cannot be written to (Read-only file system): name another.")


@pytest.mark.slow
def test_a_single_worker_of_ray_goes_on_with_the_next_order(monkeypatch, tmp_path):
    """Ray gives it no DistributedSampler; resumed, it must not repeat the first order."""
    script = scripts.load(scripts.TRAIN_RAY_DDP)

    def orders(first_epoch):
        seen = []

        def train_epoch(model, optimizer, train_loader):
            seen.append(torch.cat([labels for _, labels in train_loader]).tolist())
            return 0.0

        monkeypatch.setattr(script, "train_epoch", train_epoch)
        monkeypatch.setattr(script, "load_latest", lambda model: (None, first_epoch))

        def train_alone(config):  # Ray ends the group afterwards
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            script.train_fn(config)

        TorchTrainer(
            train_alone,
            train_loop_config={"dataset": "digits", "epochs": 2, "batch_size": 32}
            | {"lr": 1e-3},
            scaling_config=ScalingConfig(num_workers=0),  # in this process
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
        return seen

    monkeypatch.setattr(script, "evaluate", lambda *_: 0.0)
    monkeypatch.setattr(script, "report", lambda *_: None)
    first, second = orders(0)
    assert first != second
    assert orders(1) == [second]


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
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == f"Port {port} is in use: set MASTER_PORT to a free one.\n"


@pytest.mark.slow
@pytest.mark.runs("./launch_multinode_ddp.sh --epochs 3")
def test_nodes_are_launched_over_ssh(tmp_path):
    """With an `ssh` that runs the command here, as sshd would, in another folder."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done\n"
        f'echo "$1" >>{tmp_path}/hosts\necho "$2" >>{tmp_path}/commands\n'
        'cd / && exec env -i PATH=/usr/bin:/bin HOME="$HOME" bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    environment = {
        "HOSTS": "127.0.0.1 localhost",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
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


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("0 1 2 3", {"0: 0,1 full", "1: 2,3 full"}),
        ("0", {"0: smoke", "1: smoke"}),
        ("", {"0: full", "1: full"}),
    ],
)
def test_nodes_on_one_machine_share_no_gpu(gpus, expected, tmp_path):
    """With a torchrun that only tells what it was given: NCCL refuses shared GPUs."""
    for name, program in {
        "nvidia-smi": f"printf '%s\\n' {gpus}" if gpus else "exit 9",
        "torchrun": "echo ${2#--node_rank=}: $CUDA_VISIBLE_DEVICES $WORKSHOP_MODE",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC_PER_NODE": "2"}
    environment |= {"MASTER_PORT": "29734", "WORKSHOP_MODE": "full"}
    done = subprocess.run(
        [scripts.LAUNCH_MULTINODE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == expected


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
