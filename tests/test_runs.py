"""A run: what it goes on from, what it saves and keeps, and that its folder is its own."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests import scripts
from tests.waiting import TIMEOUT_S, wait_until
from utils import runs
from utils.errors import BadInput
from utils.launch import run_ranks
from utils.runs import ResumableSampler, Run

ONES = itertools.repeat(1.0)


@pytest.fixture
def alone():
    """Join a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def save(checkpoint: Path, numbers: list) -> None:
    (checkpoint / "numbers.json").write_text(json.dumps(numbers))


def load(checkpoint: Path, numbers: list) -> None:
    numbers[:] = json.loads((checkpoint / "numbers.json").read_text())


def a_run(folder: Path | None, numbers: list, **options) -> Run:
    run = Run(folder, "train", save, load, **options)
    run.resume(numbers)
    return run


def take_steps(folder: Path, total: int, losses=ONES, **options) -> Run:
    """Train by steps, each of which notes its number; save every second one."""
    numbers: list[int] = []
    run = a_run(folder, numbers, **options)
    for step in run.each_step(total, save_every=2):
        numbers.append(step)
        run.stepped(torch.tensor(next(losses)))
    assert run.stopped or numbers == [*range(total)]
    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.usefixtures("alone")
def test_a_run_goes_on_after_its_newest_checkpoint_and_keeps_two(tmp_path, capsys):
    for total, line in (
        (7, "starts anew: 'D' holds no checkpoint yet"),
        (9, "goes on after step 7 of 'D'"),
        (9, "nothing is left to train after step 9 of 'D': ask for more"),
    ):
        take_steps(tmp_path / "D", total)
        assert capsys.readouterr().out.splitlines()[0] == line
    assert names(tmp_path / "D") == {"train-000008", "train-000009"}


@pytest.mark.usefixtures("alone")
def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    take_steps(None, 3)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_the_newest_is_that_of_the_highest_number(tmp_path):
    assert runs.newest(tmp_path) is None
    for name in (
        "train-999950",
        "train-1000000",
        "other-2000000",
        ".train-3000000.part",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "train-4000000").touch()  # no folder
    assert runs.newest(tmp_path, "train").name == "train-1000000"
    assert runs.newest(tmp_path).name == "other-2000000"
    (tmp_path / "train-1000000-universal").mkdir()  # what DeepSpeed's converter made
    assert runs.newest(tmp_path, "train").name == "train-1000000-universal"
    assert runs.steps(tmp_path / "train-1000000-universal") == 1000000


@pytest.mark.usefixtures("alone")
def test_what_a_killed_save_has_left_goes_and_what_others_keep_there_stays(tmp_path):
    stays = {"other-000009", ".other-000010.part", "train_more-000008", "notes"}
    for name in (*stays, ".train-000008.part", ".train-000001.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"half")
    take_steps(tmp_path, 4)
    assert names(tmp_path) == stays | {"train-000002", "train-000004"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("damage", ["a file is gone", "no JSON", "cut"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_next(damage, tmp_path):
    take_steps(tmp_path, 4)
    newest = tmp_path / "train-000004"
    if damage == "a file is gone":
        (newest / "numbers.json").unlink()
    elif damage == "no JSON":
        (newest / "run.json").write_bytes(b"\xff\xfe")
    else:
        whole = (newest / "random.pt").read_bytes()
        (newest / "random.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        BadInput, match="delete it to go on from the one before"
    ) as said:
        take_steps(tmp_path, 6)
    assert str(newest) in str(said.value) and "\n" not in str(said.value)
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert take_steps(tmp_path, 6).found.name == "train-000002"


@pytest.mark.usefixtures("alone")
def test_a_run_with_other_settings_changes_nothing(tmp_path):
    take_steps(tmp_path, 2, settings={"--lr": 0.1, "--text": Path("a")})
    for settings, sentence in (
        ({"--lr": 0.2, "--text": "a"}, "with --lr 0.1, and this one has --lr 0.2: use"),
        ({"--lr": 0.1}, "with --text a, and this one has --text None: use"),
    ):
        with pytest.raises(BadInput, match=sentence):
            take_steps(tmp_path, 4, settings=settings)
    assert names(tmp_path) == {"train-000002"}
    take_steps(tmp_path, 4, settings={"--lr": 0.1, "--text": "a"})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(loss, tmp_path):
    losses = iter([1.0, 1.0, 1.0, loss, 1.0])
    with pytest.raises(BadInput, match=f"The loss is {loss} in step 4: .* Lower the"):
        take_steps(tmp_path / "steps", 5, losses)
    assert names(tmp_path / "steps") == {"train-000002"}

    run = a_run(tmp_path / "epochs", [])
    epochs = run.epochs(2)
    next(epochs)
    run.done(1.0)
    next(epochs)
    with pytest.raises(BadInput, match=f"The loss is {loss}"):
        run.done(loss)
    assert names(tmp_path / "epochs") == {"train-000000"}


@pytest.mark.usefixtures("alone")
def test_what_is_written_meanwhile_has_its_name_once_it_is_there(tmp_path):
    futures = []

    def later(checkpoint: Path, numbers: list) -> Future:
        save(checkpoint, numbers)
        futures.append(Future())
        return futures[-1]

    run = Run(tmp_path, "train", later, load)
    run.resume([])
    for step in run.each_step(6, save_every=4):
        run.stepped(torch.tensor(1.0))
        if step == 4:
            assert names(tmp_path) == {".train-000004.part"}
            futures[0].set_result(None)
        if step == 5:
            assert "train-000004" in names(tmp_path)
            futures[1].set_result(None)
    assert names(tmp_path) == {"train-000004", "train-000006"}


@pytest.mark.usefixtures("alone")
def test_a_run_that_diverges_keeps_what_is_still_being_written(tmp_path):
    written = Future()
    written.set_result(None)
    run = Run(tmp_path, "train", lambda *_: written, load)
    run.resume()
    steps = run.each_step(2, save_every=1)
    next(steps)
    run.stepped(torch.tensor(1.0))
    next(steps)
    assert names(tmp_path) == {".train-000001.part"}
    with pytest.raises(BadInput, match="The loss is nan in step 2"):
        run.stepped(torch.tensor(float("nan")))
    assert names(tmp_path) == {"train-000001"}


HOLDER = """
import sys, time
from pathlib import Path
from utils import runs
runs.lock(Path(sys.argv[1]))
print("has it", flush=True)
time.sleep(1000)
"""


def test_a_folder_is_of_one_process_until_that_is_gone(tmp_path):
    """As where a scheduler starts a run again that still goes on."""
    (tmp_path / ".train-000001.part").mkdir()
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "has it\n"
        says = (
            rf"in use by process {holder.pid} on host \S+ since .*Nothing was changed"
        )
        with pytest.raises(BadInput, match=says):
            runs.lock(tmp_path, wait_s=0.0)
        assert names(tmp_path) == {".train-000001.part"}
        holder.kill()
    runs.lock(tmp_path)  # a lock has no more life than its process
    runs.lock(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot be written to \(Not a directory\)"):
        runs.lock(tmp_path / "file" / "folder")


def test_all_ranks_say_what_rank_0_finds(tmp_path):
    """Else the others wait for it in the next collective."""

    def start() -> str:
        dist.init_process_group("gloo")
        (tmp_path / "file").touch()
        with pytest.raises(BadInput) as said:
            Run(tmp_path / "file" / "folder", "train", save, load)
        return str(said.value)

    first, second = run_ranks(start, 2)
    assert first == second and "cannot be written to" in first


def test_a_folder_that_not_all_ranks_see_is_refused_at_the_start(tmp_path):
    """Rank 1 is on another node, which has a disk of its own."""

    def start() -> str:
        dist.init_process_group("gloo")
        runs.time.monotonic = itertools.count(0, 6).__next__
        with pytest.raises(BadInput) as said:
            take_steps(tmp_path / os.environ["RANK"], 2)
        return str(said.value)

    first, second = run_ranks(start, 2)
    assert "0 is not seen by all ranks: name one that all nodes share" in first
    assert "1 is not seen by all ranks" in second
    assert not (tmp_path / "1").exists()


@pytest.mark.usefixtures("alone")
def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    """The loss was finite: it is that of before the step."""
    model = torch.nn.Linear(2, 2)
    run = Run(tmp_path, "train", save, load)
    run.resume(model)
    run._save_parts = lambda *_: None
    for step in run.each_step(2, save_every=1):
        if step == 1:
            model.weight.data[0, 0] = float("inf")
            with pytest.raises(BadInput, match="A weight is no number after step 2"):
                run.stepped(torch.tensor(1.0))
            break
        run.stepped(torch.tensor(1.0))
    assert names(tmp_path) == {"train-000001"}


@pytest.mark.usefixtures("alone")
def test_a_stream_goes_on_at_a_notice_and_a_loader_saves(tmp_path):
    """What a stream trained of an epoch cannot be joined again in its middle."""
    for batches, expected in (
        (iter(range(4)), {"train-000004"}),
        (DataLoader(range(4), 1, sampler=ResumableSampler(range(4))), None),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        run, answers = a_run(folder, []), [0, runs.SAVE, 0, 0]
        run._stop.agreed = lambda answers=answers: answers.pop(0)
        for _ in run.epochs(1):
            list(run.batches(batches))
            run.done(1.0)
        assert not answers and run.epoch == 1
        assert names(folder) == (expected or {"train-000002", "train-000004"})


def test_a_checkpoint_has_its_name_only_when_all_ranks_have_written(tmp_path):
    def start() -> list[str]:
        dist.init_process_group("gloo")
        rank, seen = dist.get_rank(), []

        def slowly(checkpoint: Path) -> None:
            time.sleep(rank)
            seen.extend(names(tmp_path))
            (checkpoint / f"shard-{rank}").touch()

        run = Run(tmp_path, "train", slowly, load)
        run.resume()
        for _ in run.each_step(1, save_every=1):
            run.stepped(torch.tensor(1.0))
        return seen, sorted(path.name for path in tmp_path.glob("train-*/*"))

    for seen, files in run_ranks(start, 2):
        assert seen == [".train-000001.part"]
        assert files == ["random.pt", "run.json", "shard-0", "shard-1"]


class Augmented:
    """Items that are random numbers."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, torch.rand(()).item()


def epochs_of_batches(folder: Path, stop_in: int | None, total: int = 2) -> list:
    """Return the items of each step on this rank; rank 1 is asked to stop in one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    runs.seed_rank(7)
    data = Augmented(24)
    sampler = ResumableSampler(data, seed=3)
    loader = DataLoader(data, 2, sampler=sampler, drop_last=True)
    run, found = a_run(folder, []), []
    for epoch in run.epochs(total):
        sampler.set_epoch(epoch)
        for numbers, drawn in run.batches(loader):
            found.append(
                (epoch, numbers.tolist(), drawn.tolist(), torch.rand(()).item())
            )
            if len(found) == stop_in and dist.get_rank() == dist.get_world_size() - 1:
                signal.raise_signal(signal.SIGTERM)
        run.done(1.0)
    return found


@pytest.mark.parametrize("stop_in", [1, 5, 6, 7])
def test_a_run_stopped_after_any_step_trains_on_the_same_items(stop_in, tmp_path):
    """Six steps an epoch: in its middle, after its last step, in the next one's first."""

    def train() -> tuple:
        whole = epochs_of_batches(tmp_path / "whole", None)
        first = epochs_of_batches(tmp_path / "stopped", stop_in)
        return whole, first, epochs_of_batches(tmp_path / "stopped", None)

    for whole, first, second in run_ranks(train, 2):
        assert len(whole) == 12 and len(first) == stop_in
        assert [(e, n, r) for e, n, _, r in first + second] == [
            (e, n, r) for e, n, _, r in whole
        ]


def test_a_run_goes_on_in_mid_epoch_on_another_number_of_ranks(tmp_path):
    """With the items that nobody had; where an epoch ends unevenly, some twice."""
    started = run_ranks(epochs_of_batches, 2, tmp_path, 3, 1)
    went_on = run_ranks(epochs_of_batches, 1, tmp_path, None, 1)
    had = [n for rank in started + went_on for _, items, *_ in rank for n in items]
    assert sorted(had) == [*range(24)]


@pytest.mark.usefixtures("alone")
def test_a_stream_that_has_no_middle_begins_its_epoch_anew(tmp_path):
    run = a_run(tmp_path, [])
    for _ in run.epochs(3):
        for batch in run.batches(iter(range(4))):
            if run.epoch == 1 and batch == 2:
                signal.raise_signal(signal.SIGTERM)
        run.done(1.0)
    said = run.summary()["says"]
    assert said == "stopped in epoch 2 of 3: the same command begins that epoch anew"
    assert (run.epoch, run.interrupted) == (1, True)
    assert names(tmp_path) == {"train-000004"}


def draw(saved: list | None = None) -> tuple[list, list, list]:
    """Return what a rank draws first, the states after it, and what it draws then."""

    def some() -> list[float]:
        return [*torch.rand(2).tolist(), random.random(), np.random.rand()]

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # as for equal weights
    runs.seed_rank(7)
    if saved:
        runs.set_random_states(saved)
    return some(), runs.random_states(), some()


def test_random_numbers_differ_between_ranks_and_go_on_after_a_restart(tmp_path):
    undisturbed = run_ranks(draw, 3)
    firsts = [first for first, _, _ in undisturbed]
    assert all(len({*each}) == 3 for each in zip(*firsts))  # of each source
    torch.save(undisturbed[1][1], tmp_path / "saved")  # of all ranks, whoever is asked
    saved = torch.load(tmp_path / "saved", weights_only=True)
    restored = run_ranks(draw, 3, saved)
    assert [first for first, _, _ in restored] == [then for _, _, then in undisturbed]


def test_a_restart_on_another_number_of_ranks_begins_with_those_of_the_seed():
    saved = run_ranks(draw, 2)[0][1]
    assert [f for f, _, _ in run_ranks(draw, 3, saved)] == [
        f for f, _, _ in run_ranks(draw, 3)
    ]


@pytest.mark.usefixtures("alone")
def test_augmentation_by_a_loader_differs_by_rank_epoch_and_first_step(monkeypatch):
    """A new generator always starts with the same number: all ranks would augment alike."""

    def drawn(batches) -> tuple[float, ...]:
        return tuple(next(iter(batches))[1].tolist())

    data = Augmented(8)
    alike = DataLoader(data, 4, num_workers=1, generator=torch.Generator())
    assert drawn(alike) != drawn(alike)
    alike.generator.manual_seed(0)
    first = drawn(alike)
    alike.generator.manual_seed(0)
    assert drawn(alike) == first
    run = Run(None, "train", save, load)
    loader = DataLoader(data, 2, sampler=ResumableSampler(data), num_workers=1)
    found = []
    for rank, run.epoch, run.items in itertools.product((0, 1), (0, 1), (0, 4)):
        monkeypatch.setattr(runs.dist, "get_rank", lambda rank=rank: rank)
        found.append(drawn(run.batches(loader)))
    assert len({*found}) == 8


FOLDER = scripts.ROOT / "01-ddp-pytorch-only"
MINE = """
import torch
from torch.utils.data import TensorDataset

labels = torch.arange(64) % 2
data = TensorDataset(torch.eye(2)[labels], labels)


def model():
    return torch.nn.Linear(2, 2)
"""


def take_along(folder: Path) -> Path:
    """Do in an empty folder what the head of train_ddp.py says; returns the script."""
    (folder / "utils").mkdir(parents=True)
    (folder / "utils" / "runs.py").write_text(
        (scripts.ROOT / "utils/runs.py").read_text()
    )
    (folder / "mine.py").write_text(MINE)
    text = (FOLDER / "train_ddp.py").read_text()
    for old, new in (
        (
            r"from utils import .*",
            "import os\nfrom argparse import Namespace\nimport mine",
        ),
        (r"settings\.set_device\(.*\)", 'torch.device("cpu")'),
        (r"settings\.backend\(device\)", '"gloo"'),
        (r'datasets\.load\(dataset, "(train|test)"\)', "mine.data"),
        (r"models\.resnet18\(.*?\)\.to", "mine.model().to"),
        (r"command_line\.chosen\(.*\)", '{"--lr": args.lr}'),
        (r"command_line\.parse_images\(__doc__\)", "parse_args()"),
        (r"command_line\.run\(main\)", "main()"),
        (
            r"\ndef main",
            "\ndef parse_args():\n    from pathlib import Path\n    return Namespace("
            "dataset='', batch_size=4, seed=0, lr=0.1, bf16=False, keep=2, epochs=40, "
            "smoke_test=True, checkpoint_dir=Path('run'))\n\n\ndef main",
        ),
    ):
        text, count = re.subn(old, new, text)
        assert count, old
    script = folder / "train_mine.py"
    # this environment finds the workshop's own `utils` from everywhere
    away = "sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]"
    script.write_text(f"import sys\n{away}\n{text}")
    return script


@pytest.mark.slow
def test_a_script_taken_along_is_killed_and_goes_on(tmp_path):
    """In an empty folder, with torch, one file and a model of one's own."""
    script = take_along(tmp_path / "whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", script.name]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def start(folder: Path) -> subprocess.Popen:
        return subprocess.Popen(command, cwd=folder, **options)

    undisturbed = start(tmp_path / "whole")
    said, _ = undisturbed.communicate(timeout=TIMEOUT_S)
    assert undisturbed.returncode == 0, said
    take_along(tmp_path / "killed")
    killed = start(tmp_path / "killed")
    saved = tmp_path / "killed" / "run"
    wait_until(lambda: saved.exists() and runs.newest(saved), killed)
    killed.kill()  # its ranks lose their parent, and end
    killed.communicate(timeout=TIMEOUT_S)
    again = start(tmp_path / "killed")
    said, _ = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, said
    assert re.search("goes on after epoch|nothing is left", said), said
    ours, theirs = (
        torch.load(runs.newest(folder / "run") / "checkpoint.pt", weights_only=True)
        for folder in (tmp_path / "killed", tmp_path / "whole")
    )
    assert all(torch.equal(ours["model"][n], w) for n, w in theirs["model"].items())
