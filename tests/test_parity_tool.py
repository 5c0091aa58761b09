"""utils.parity names the mistake, and says nothing of what is right."""

import ast
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests import odd_programs
from tests.programs import Classifier, Program, training
from tests.tools.notebooks import ROOT
from tests.waiting import TIMEOUT_S
from utils import launch, parity
from utils.parity import groups, zero
from utils.parity.comparing import Case
from utils.parity.diagnosing import TABLE
from utils.parity.recording import Run
from utils.parity.reporting import judge_case
from utils.parity.sketches import sketch
from utils.parity.training import payload

assert launch  # its server of processes has torch in memory already
BOTH = ("classifier", "language model")
# What is right, in both families unless its options name one.
RIGHT = {
    "GroupNorm or tied weights": {},
    "averaged by hand": {"averaging": "by hand"},
    "dropout seeded per rank": {"dropout": 0.3},
    "augmentation seeded per rank": {"augment": "torch"},
    "augmentation by NumPy": {"augment": "numpy"},
    "augmentation by random": {"augment": "python", "dropout": 0.1},
    "noise in the step": {"augment": "in the step"},
    "two optimizers": {"optimizer": "two"},
    "frozen backbone": {"parts": "frozen backbone"},
    "uneven last batch dropped": {"items": 14},
    "accumulation": {"accumulate": "right"},
    "accumulation with no_sync": {"accumulate": "no_sync"},
    "schedule per step": {"schedule": "per step", "optimizer": "SGD"},
    "clipped by the norm of all": {"clip": "right"},
    "clipped by hand": {"clip": "by hand"},
    "loss over N, then summed": {"averaging": "sum", "loss": "over N"},
    "frozen BatchNorm": {"norm": "batch, frozen"},
    "an averaged buffer": {"counter": "averaged"},
    "no DataLoader": {"order": "own batches", "set_epoch": False},
    "FSDP2": {"averaging": "FSDP2"},
    "FSDP2, clipped": {"averaging": "FSDP2", "clip": "right"},
    "sharded optimizer": {"optimizer": "sharded"},
    "a loss over all tokens": {"family": "language model", "loss": "of all tokens"},
    "DDP seeds the model differently": {"start": "per rank"},
}
# The names that are to be found, and what makes them.
MISTAKES = {
    "summed": ["summed", {"averaging": "sum"}],
    "no averaging": ["not averaged", {"averaging": "none"}],
    "never synced": ["not averaged", {"accumulate": "never synced"}],
    "divided twice": ["divided twice", {"loss": "over N"}],
    "FSDP2 sums": ["summed", {"averaging": "FSDP2", "loss": "times N"}],
    "every rank all": ["items", {"order": "every rank all"}],
    "own seeds": ["items", {"order": "own seeds"}],
    "padded": ["items", {"items": 13, "drop_last": False}],
    "no set_epoch": ["same order", {"set_epoch": False}],
    "batch per rank": ["global batch", {"batch": "per rank", "items": 36}],
    "blocks": ["other order", {"order": "blocks"}],
    "BatchNorm": ["batch statistics", {"norm": "batch"}],
    "BatchNorm, no statistics": [
        "batch statistics",
        {"norm": "batch, without statistics"},
    ],
    "contrastive": ["batch statistics", {"loss": "contrastive"}],
    "same dropout": ["same noise", {"dropout": 0.3, "noise_seed": "same"}],
    "same augmentation": ["same noise", {"augment": "torch", "noise_seed": "same"}],
    "same by NumPy": ["same noise", {"augment": "numpy", "noise_seed": "same"}],
    "same by random": ["same noise", {"augment": "python", "noise_seed": "same"}],
    "unseeded": ["unseeded noise", {"augment": "python", "noise_seed": "by chance"}],
    "unseeded dropout": ["unseeded noise", {"dropout": 0.3, "noise_seed": "by chance"}],
    "uneven": ["unequal batches", {"order": "uneven"}],
    "unequal steps": ["unequal batches", {"order": "unequal steps", "items": 13}],
    "own tokens": [
        "unequal batches",
        {"family": "language model", "loss": "of own tokens"},
    ],
    "own start": ["start", {"start": "per rank", "averaging": "by hand"}],
    "start by chance": ["start", {"start": "by chance"}],
    "own buffer": ["buffers", {"counter": "own"}],
    "all but one": ["parameter not averaged", {"averaging": "all but one"}],
    "made late": ["parameter not averaged", {"parts": "made late"}],
    "trained late": ["parameter not averaged", {"parts": "trained late"}],
    "schedule per rank": ["schedule", {"schedule": "per rank"}],
    "schedule on rank 0": ["schedule", {"schedule": "only rank 0"}],
    "rate by N": ["schedule", {"schedule": "by world size", "optimizer": "SGD"}],
    "clipped first": ["clipping", {"averaging": "by hand", "clip": "before averaging"}],
    "clipped first by hand": [
        "clipping",
        {"averaging": "by hand", "clip": "by hand before averaging"},
    ],
    "fake shards": ["shards nothing", {"averaging": "fake shards"}],
    "zeroed": ["accumulation", {"accumulate": "zeroed"}],
    "cut": ["accumulation", {"accumulate": "cut"}],
    "update per rank": ["accumulation", {"accumulate": "per rank"}],
}
PAIRS = {
    "summed, no set_epoch": [
        "summed", "same order", {"averaging": "sum", "set_epoch": False},
    ],
    "summed, clipped first": [
        "summed", "clipping", {"averaging": "sum", "clip": "before averaging"},
    ],
    "summed, BatchNorm": [
        "summed", "batch statistics", {"averaging": "sum", "norm": "batch"},
    ],
    "summed, padded": [
        "summed", "items", {"averaging": "sum", "items": 13, "drop_last": False},
    ],
    "no averaging, schedule": [
        "not averaged", "schedule", {"averaging": "none", "schedule": "per rank"},
    ],
    "BatchNorm, no set_epoch": [
        "batch statistics", "same order", {"norm": "batch", "set_epoch": False},
    ],
    "BatchNorm, same dropout": [
        "batch statistics", "same noise",
        {"norm": "batch", "dropout": 0.3, "noise_seed": "same"},
    ],
    "own start, all but one": [
        "start", "parameter not averaged",
        {"start": "per rank", "averaging": "all but one"},
    ],
    "zeroed, schedule": [
        "accumulation", "schedule", {"accumulate": "zeroed", "schedule": "per rank"},
    ],
    "uneven, summed": [
        "unequal batches", "summed", {"order": "uneven", "averaging": "sum"},
    ],
    "made late, same dropout": [
        "parameter not averaged", "same noise",
        {"parts": "made late", "dropout": 0.3, "noise_seed": "same"},
    ],
    "own seeds, no averaging": [
        "items", "not averaged", {"order": "own seeds", "averaging": "none"},
    ],
}  # fmt: skip
QUICK = {
    "classifier": [
        "GroupNorm or tied weights", "dropout seeded per rank",
        "augmentation seeded per rank", "two optimizers", "clipped by the norm of all",
        "summed", "no averaging", "padded", "no set_epoch", "BatchNorm", "same dropout",
        "all but one", "schedule per rank", "summed, no set_epoch",
    ],
    "language model": ["GroupNorm or tied weights", "made late", "fake shards", "zeroed"],
}  # fmt: skip


def expected(family: str) -> dict[str, tuple[Program, set[str]]]:
    """Return by name each program of a family and what is to be found."""
    table = {name: [options] for name, options in RIGHT.items()} | MISTAKES | PAIRS
    return {
        name: (Program(**{"family": family} | options), set(names))
        for name, (*names, options) in table.items()
        if options.get("family", family) == family
    }


@cache
def reports(family: str, quick: bool, sizes=(2,)) -> dict[str, parity.Report]:
    """Run all programs in a start of processes for one process, and one for each size."""
    chosen = QUICK[family] if quick else [*set(expected(family)) - set(QUICK[family])]
    programs = {name: training(expected(family)[name][0]) for name in sorted(chosen)}
    return parity.check_all(programs, world_sizes=sizes)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(
            family, name, marks=[] if name in QUICK[family] else [pytest.mark.weekly]
        )
        for family in BOTH
        for name in expected(family)
    ],
)
def test_each_mistake_is_named_and_nothing_else(family, name):
    report = reports(family, name in QUICK[family])[name]
    names = expected(family)[name][1]
    assert set(report.names) == names, str(report)
    evidence = {finding.name: finding.evidence for finding in report.findings}
    assert all(evidence.values())
    if names == {"summed"}:
        said = re.search(r"is (\S+) times the mean on (\d) ranks", evidence["summed"])
        assert said and float(said[1]) == int(said[2])
    # noise, and an order that no epoch changes, are wrong although N workers equal one
    if names and names <= {
        "same noise",
        "unseeded noise",
        "same order",
        "shards nothing",
    }:
        assert not report.ok
    else:
        # a batch may be cut on two ranks, and whole on three
        assert all(report.equal.values()) == (not names), str(report)


@pytest.mark.weekly
@pytest.mark.parametrize("family", BOTH)
def test_with_three_workers_as_well(family):
    found = reports(family, False, (2, 3))
    names = {name: set(report.names) for name, report in found.items()}
    assert names == {name: expected(family)[name][1] for name in names}


@cache
def odd_reports() -> dict[str, parity.Report]:
    wrong = {name: program for name, (_, program) in odd_programs.WRONG.items()}
    programs = odd_programs.RIGHT | odd_programs.UNJUDGED | wrong
    return parity.check_all(programs, world_sizes=(2,))


@pytest.mark.weekly
@pytest.mark.parametrize(
    "name", odd_programs.RIGHT | odd_programs.UNJUDGED | odd_programs.WRONG
)
def test_programs_of_many_styles(name):
    report = odd_reports()[name]
    if name in odd_programs.RIGHT:
        assert report.ok, str(report)
    elif name in odd_programs.UNJUDGED:
        assert (report.status, report.names) == (3, []), str(report)
        assert 'Say `PARITY = {"shared_noise": True}`' in str(report)
    else:
        assert report.names == odd_programs.WRONG[name][0].split(", "), str(report)
        assert report.status == 1


def records_of(*programs: parity.Training) -> list[list[parity.Record]]:
    """Return what all ranks did, by program; the group is of another launcher."""
    dist.init_process_group("gloo")
    found = []
    for program in programs:
        found.append([None] * dist.get_world_size())
        dist.all_gather_object(found[-1], parity.record(program))
    return found


@pytest.mark.slow
def test_records_of_another_launcher_are_judged():
    plain = odd_programs.PLAIN
    name, wrong = odd_programs.WRONG["a sum"]
    alone = [ranks[0] for ranks in launch.run_ranks(records_of, 1, plain, wrong)[0]]
    right, bad = launch.run_ranks(records_of, 2, plain, wrong)[0]
    report = parity.judge(alone[0], right)
    assert report.ok and report.equal == {2: True}, str(report)
    report = parity.judge(alone[1], bad)
    assert report.equal == {2: False} and report.names == [name], str(report)
    unlike = parity.judge(alone[1], right)
    assert unlike.equal == {2: False} and unlike.findings


def loop(call) -> list[list[parity.Record]]:
    """Train in a loop that knows nothing of the tool, and return what all ranks did."""
    dist.init_process_group("gloo")
    plain = odd_programs.PLAIN
    model = torch.nn.parallel.DistributedDataParallel(plain.build_model().double())
    optimizer = plain.build_optimizer(model)
    with parity.watch(model) as found:
        for inputs, targets in plain.make_loader(
            dist.get_rank(), dist.get_world_size(), 0
        ):
            loss = (call(model)(inputs.double()) - targets.double()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    records = [None] * dist.get_world_size()
    dist.all_gather_object(records, found)
    return records


@pytest.mark.slow
def test_any_loop_is_watched():
    right, bypassed = (lambda model: model), (lambda model: model.module)
    alone = launch.run_ranks(loop, 1, right)[0][0]
    assert len(alone.steps) == 4
    together = launch.run_ranks(loop, 2, right)[0]
    assert parity.judge(alone, together).ok
    report = parity.judge(alone, launch.run_ranks(loop, 2, bypassed)[0])
    assert report.names == ["not averaged"], str(report)


@pytest.mark.slow
def test_records_of_lower_precision_are_lifted():
    """A policy of bfloat16 rounds nothing here, so a gradient of 1.001 times it is seen."""
    rounds = odd_programs.RIGHT["FSDP2 in bf16"]
    alone = launch.run_ranks(records_of, 1, rounds)[0][0][0]
    together = launch.run_ranks(records_of, 2, rounds)[0][0]
    assert parity.judge(alone, together).equal == {2: True}
    for rank in together:
        gradients = rank.updates[0].gradients
        for name, numbers in gradients.items():
            gradients[name] = [1.001 * number for number in numbers]
    assert parity.judge(alone, together).equal == {2: False}


class OnTheCpu(TorchFunctionMode):
    """Put what is asked for on a GPU on the CPU, and note which GPUs were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def here(self, device):
        is_gpu = isinstance(device, (str, torch.device)) and "cuda" in str(device)
        self.asked |= {str(device)} if is_gpu else set()
        return "cpu" if is_gpu else device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: self.here(value) for name, value in (kwargs or {}).items()}
        return func(*map(self.here, args), **kwargs)


def rank_of_gpus(path, folder):
    """Be a rank of `--device cuda` on a faked GPU: what it says last, and asked for."""
    messages, asked, group = [], [], dist.init_process_group
    pipe = SimpleNamespace(send_bytes=messages.append, recv_bytes=lambda: None)

    def init_process_group(backend, **options):
        asked.append(backend)
        group("gloo", **options)

    job = groups.Job([payload(path)], Run(device="cuda"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(torch.cuda, "set_device", asked.append),
        OnTheCpu() as devices,
    ):
        groups._be_rank(rank, size, folder, job, 60, pipe)
    return *pickle.loads(messages[-1]), asked, devices.asked


@pytest.mark.slow
def test_a_rank_of_gpus_takes_its_own_gpu_and_nccl(tmp_path):
    runs = {}
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        given = ROOT / "docs" / "my_training.py", tmp_path / str(size)
        for rank, said in enumerate(launch.run_ranks(rank_of_gpus, size, *given)):
            kind, found, asked, devices = said
            assert kind == "done", found
            assert asked == [rank, "nccl"] and f"cuda:{rank}" in devices
            assert f"cuda:{1 - rank}" not in devices
            runs[size] = [*runs.get(size, []), found[0]]
    case = Case(runs[1][0], runs[2])
    assert judge_case(case)[0] == "equal", judge_case(case)


def test_an_engine_is_left_as_it_was():
    calls = []
    kind = type("Engine", (), {"_take_model_step": lambda self: calls.append("step")})
    engine = kind()
    hook = zero.on_update(engine, lambda: calls.append("before"), lambda: None)
    engine._take_model_step()
    hook.remove()
    engine._take_model_step()
    assert calls == ["before", "step", "step"]


DEEPSPEED = (ROOT / "docs" / "frameworks" / "with_deepspeed.py").read_text()
BF16 = ("config = {", 'config = {"bf16": {"enabled": True},')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (3, ()),
        *(
            pytest.param(stage, changes, marks=pytest.mark.weekly)
            for stage in range(4)
            for changes in (
                (),
                (BF16, ("engine(batch[0])", "engine(batch[0].bfloat16())")),
            )
            if (stage, changes) != (3, ())
        ),
    ],
)
def test_deepspeeds_engine_is_judged_at_every_stage(tmp_path, capsys, stage, changes):
    program, text = tmp_path / "with_deepspeed.py", DEEPSPEED
    for old, new in (("STAGE = 3", f"STAGE = {stage}"), *changes):
        assert old in text
        text = text.replace(old, new)
    program.write_text(text)
    status = parity.main([str(program), "--world-sizes", "2", "3"])
    out = capsys.readouterr().out
    assert status == 0 and "2 epochs in float64" in out, out
    before, after = map(
        int, re.findall(r"([\d,]+) (?:in one|on 2)", out.replace(",", ""))
    )
    assert after == before if stage == 0 else after < 0.7 * before, out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("6 // torch.distributed.get_world_size()", "3", ["global batch"]),
        # DeepSpeed divides by their number already
        (
            "backward(loss)",
            "backward(loss / engine.gradient_accumulation_steps())",
            ["unknown"],
        ),
    ],
)
def test_a_mistake_beside_deepspeeds_engine_is_seen(tmp_path, old, new, names):
    assert old in DEEPSPEED
    (tmp_path / "with_deepspeed.py").write_text(DEEPSPEED.replace(old, new))
    report = parity.check(tmp_path / "with_deepspeed.py", world_sizes=(2,))
    assert report.equal == {2: False} and report.names == names, str(report)


@pytest.mark.slow
def test_fsdp2_that_shards_over_one_rank_is_seen():
    """It claims to shard by what it is, and each rank keeps all, and steps alone."""
    program = replace(odd_programs.PLAIN, wrap=odd_programs.shard_alone)
    assert "shards nothing" in parity.check(program, world_sizes=(2,)).names


# What a reader begins with; some of the tests below need more names in it.
FILE = (ROOT / "docs" / "my_training.py").read_text()
FILE = FILE.replace("\nimport torch\n", "\nimport os\nimport time\n\nimport torch\n", 1)
FILE = FILE.replace(
    "import torch\n", "import torch\nimport torch.distributed as dist\n", 1
)


PAGE = (ROOT / "docs" / "parity.md").read_text()


def blocks(kind: str) -> list[str]:
    """Return the blocks of code of docs/parity.md."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


EXAMPLES = dict(
    re.findall(
        r"^### `([^`]+)`$[^#]*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
)


@pytest.mark.weekly
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_finding_has_an_example_on_the_page(name, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(f"{FILE}\n{EXAMPLES[name]}")
    report = parity.check(path, world_sizes=(2,))
    assert report.names == [name], str(report)


def test_the_page_has_all_findings():
    assert EXAMPLES.keys() == {row.name for row in TABLE} | {"not saved"}


@pytest.fixture
def judge(tmp_path, capsys):
    """Judge FILE with a line changed: the status, what is printed, and said of errors."""

    def judge(old: str = "", new: str = "", *options: str) -> tuple[int, str, str]:
        assert old in FILE
        path = tmp_path / "my_training.py"
        path.write_text(FILE.replace(old, new) if old else FILE)
        status = parity.main([str(path), "--world-sizes", "2", *options])
        return status, *capsys.readouterr()

    return judge


def test_a_file_that_is_right_has_status_0(judge):
    status, out, err = judge()
    assert (status, err) == (0, "")
    assert "2 workers train like one process: in 4 steps of 2 epochs" in out
    first, last = re.findall(
        r" ([\d.e+-]+)[, :]", re.findall(r"In float32, .*", out)[0]
    )
    assert 0 < float(first) < 1e-5 and 0 < float(last) < 1e-3
    assert "only rounding" in out and "Looks like" not in out


def test_a_file_with_a_mistake_has_status_1(judge):
    status, out, _ = judge("    sampler.set_epoch(epoch)\n", "")
    assert status == 1
    assert "2 workers train like one process" in out  # as it makes the same mistake
    assert "Looks like: items come in the same order in every epoch" in out
    assert "Evidence: rank 0 of 2 sees items" in out


def test_a_batch_that_cannot_be_shared_equally_is_no_other_mistake(judge):
    status, out, _ = judge("6 // world_size", "5 // world_size")
    assert status == 1 and out.count("Looks like") == 1
    assert "Looks like: ranks cannot share the batch equally" in out
    assert "takes 5 items in one process, and 4 on 2 ranks" in out


SHAKEN = """
from random import uniform


def shake(inputs):
    return inputs + uniform(-0.1, 0.1)


class Shaken:
    def __init__(self, data, shake):
        self.data, self.shake = data, shake

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, targets = self.data[index]
        return self.shake(inputs), targets


def make_loader("""


@pytest.mark.slow
def test_a_function_of_random_that_nobody_seeds_is_seen(tmp_path):
    """It is a method of the generator of the whole program."""
    changed = FILE.replace("def make_loader(", SHAKEN.lstrip())
    changed = changed.replace("DataLoader(data,", "DataLoader(Shaken(data, shake),")
    (path := tmp_path / "shaken.py").write_text(changed)
    report = parity.check(path, world_sizes=(2,))
    assert report.names == ["unseeded noise"], str(report)


@pytest.mark.slow
def test_a_run_that_is_cut_short_says_so(judge):
    status, out, _ = judge("", "", "--steps", "1")
    assert status == 0
    assert "Trained were the first 1 steps of each epoch." in out


BAD = {
    "def build_model(": ("def build_net(", "defines no build_model: add `def build"),
    "train_step(model, optimizer, batch)": (
        "train_step(model, batch)",
        "takes other arguments: make it `def train_step(model, optimizer, batch)`.",
    ),
    "torch.nn.Linear(3, 1)": ("3", "returned a int: let it return a module."),
    "return torch.nn.Linear(3, 1": (
        "return torch.nn.Linear(3, 1, dtype=torch.cfloat",
        "`weight` is complex, which the tool does not compare",
    ),
    "import os": ("import no_such_thing", "cannot be imported: ModuleNotFoundError"),
    "import time": ("raise SystemExit(2)", "cannot be imported: SystemExit: 2. What a"),
    "((model(batch[0])": (
        "((model(batch[0].cuda())",
        "This tool trains on CPUs: take the device from the model",
    ),
    "    return DataLoader": ("    DataLoader", "make_loader(...) returned a NoneType"),
    "torch.randn(12, 3": ("torch.randn(0, 3", "make_loader(0, 1, 0) gives no batch"),
    "model(batch[0])": ("model(batch[2])", "(my_training.py, line "),
    "    loss.backward": (
        "    loss.backwards",
        "rank 0 of 1 raised at step 0 of epoch 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("old", BAD)
def test_what_cannot_be_judged_has_status_2_and_a_sentence(judge, old):
    new, sentence = BAD[old]
    status, out, err = judge(old, new)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_missing_file_has_status_2_and_a_sentence(capsys):
    assert parity.main(["no/such/file.py"]) == 2
    said = (
        "parity: There is no file no/such/file.py: name the file with your training.\n"
    )
    assert capsys.readouterr().err == said


FAILS = {
    "dies": (
        "os._exit(3)",
        "Evidence: rank 1 of 2 died with exit code 3 at step 0 of epoch 1 (float64)",
    ),
    "raises": ("raise ValueError('no')", "rank 1 of 2 raised at step 0 of epoch 1"),
    "hangs": ("time.sleep(3600)", "rank 1 of 2 is at step 0 of epoch 1 (float64)"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(h, marks=[pytest.mark.weekly] * (h == "hangs")) for h in FAILS]
)
def test_a_rank_that_fails_ends_all_and_is_reported(judge, how):
    does, sentence = FAILS[how]
    stop = "    if epoch == 1 and rank == 1:\n        WHEN = True\n    data = torch.r"
    stop = stop.replace("WHEN = True", "make_loader.late = True")
    path_of_step = f"    if hasattr(make_loader, 'late'):\n        {does}\n    loss = "
    old = FILE[FILE.index("    data = torch.r") : FILE.index("    loss = ((") + 11]
    new = old.replace("    data = torch.r", stop).replace("    loss = ", path_of_step)
    status, out, _ = judge(old, new, "--timeout", "30" if how == "hangs" else "300")
    assert status == 1
    assert sentence in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "part"), [("unused", "spare"), ("frozen late", "features")]
)
def test_a_parameter_without_a_gradient_is_named_from_what_ddp_says(parts, part):
    report = parity.check(training(Program(parts=parts)), world_sizes=(2,))
    assert report.names == ["parameter not averaged"]
    assert "that gets none: it is unused, or was frozen after the wrap" in str(report)
    names = [n for n, _ in Classifier(Program(parts=parts)).named_parameters()]
    places = [str(i) for i, name in enumerate(names) if part in name]
    assert report.findings[0].evidence.endswith(
        f"; numbers {' '.join(places)} of `parameters()`"
    )


def test_it_imports_torch_and_nothing_else_that_is_installed():
    package = Path(parity.__file__).parent
    names = {
        name.name if isinstance(node, ast.Import) else node.module
        for path in package.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) or getattr(node, "level", 1) == 0
        for name in node.names
    }
    modules = {name.partition(".")[0] for name in names}
    # cloudpickle is taken if it is there
    assert modules - sys.stdlib_module_names == {"torch", "cloudpickle"}


# A training with all that people forget to save; `{}` stands for what is left out.
RESTARTS = """
def build_model():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(3, 32), torch.nn.Linear(32, 1)
    return torch.nn.Sequential(first, torch.nn.Dropout(), last)


class State:
    def __init__(self, model):
        torch.manual_seed(dist.get_rank())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        decay = lambda step: 0.9**step
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)
        self.average = torch.optim.swa_utils.AveragedModel(model)
        self.calls = 0


build_optimizer = State


def train_step(model, state, batch):
    ((model(batch[0]) - batch[1]) ** 2).mean().backward()
    state.calls += 1
    if state.calls % 2:
        return
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.schedule.step()
    state.average.update_parameters(model)


def save(folder, model, state, epoch, step):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "schedule": state.schedule.state_dict(),
            "average": state.average.state_dict(),
            "calls": state.calls,
            "noise": torch.get_rng_state(),
            "place": (epoch, step),
        },
        f"{folder}/{dist.get_rank()}.pt",
    )


def load(folder, model, state):
    own = f"{folder}/{dist.get_rank()}.pt"
    own = own if os.path.exists(own) else f"{folder}/0.pt"
    saved = torch.load(own, weights_only=True)
    model.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"])
    state.schedule.load_state_dict(saved["schedule"])
    state.average.load_state_dict(saved["average"])
    state.calls = saved["calls"]
    torch.set_rng_state(saved["noise"])
    return saved["place"]
"""
FORGOTTEN = {
    "nothing": ("", ""),
    "the weights": ('    model.load_state_dict(saved["model"])\n', "the weights are"),
    "momentum": ('    state.optimizer.load_state_dict(saved["optimizer"])\n', ""),
    "the schedule": ('    state.schedule.load_state_dict(saved["schedule"])\n', ""),
    "the average": (
        '    state.average.load_state_dict(saved["average"])\n',
        "what is held beside the model is",
    ),
    "the noise": ('    torch.set_rng_state(saved["noise"])\n', "the noise is"),
    "the place": ('saved["place"]', "the items are"),
}
FORGOTTEN["momentum"] = FORGOTTEN["momentum"][0], "the learning rate is"
FORGOTTEN["the schedule"] = FORGOTTEN["the schedule"][0], "the learning rate is"


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(
            w, marks=[] if w in ("nothing", "momentum") else [pytest.mark.weekly]
        )
        for w in FORGOTTEN
    ],
)
def test_what_a_restart_forgets_is_named(what, tmp_path):
    line, named = FORGOTTEN[what]
    code = (
        RESTARTS.replace(line, "(0, 0)" if what == "the place" else "")
        if line
        else RESTARTS
    )
    (path := tmp_path / "restarts.py").write_text(FILE + code)
    report = parity.check(path, world_sizes=(2,), epochs=4)
    text = str(report)
    if what == "nothing":
        assert report.ok and "Begun anew, 1 workers end as if undisturbed" in text, text
    else:
        assert report.names == ["not saved"], text
        assert f"after a restart, {named} not as if nothing" in text, text


@pytest.mark.weekly
def test_the_command_of_the_readme():
    command = ["python", "-m", "utils.parity", "docs/my_training.py"]
    out = subprocess.check_output(command, cwd=ROOT, text=True, timeout=TIMEOUT_S)
    assert "2 workers train like one process" in out
    assert "3 workers train like one process" in out


@pytest.mark.weekly
def test_the_commands_that_make_one_file_of_it(tmp_path):
    """It runs without this repository, beside a training that has a `utils` of its own."""
    shutil.copytree(Path(parity.__file__).parent, tmp_path / "utils" / "parity")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "my_training.py", tmp_path / "docs")
    commands = next(block for block in blocks("bash") if "zipapp" in block)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    out = subprocess.check_output(
        ["bash", "-ec", commands], cwd=tmp_path, text=True, env=env, timeout=TIMEOUT_S
    )
    assert "3 workers train like one process" in out
    wrong = FILE.replace("    sampler.set_epoch(epoch)\n", "")
    (tmp_path / "wrong.py").write_text(wrong)
    command = [sys.executable, "parity.pyz", "wrong.py", "--world-sizes", "2"]
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == 1
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "utils.py").write_text("import os, time\n")
    (tmp_path / "alone" / "my_training.py").write_text("import utils\n" + FILE)
    command = [sys.executable, "parity.pyz", "alone/my_training.py"]
    out = subprocess.check_output(
        command, cwd=tmp_path, text=True, env=env, timeout=TIMEOUT_S
    )
    assert "3 workers train like one process" in out


def test_a_sketch_keeps_lengths_and_adds_up():
    """Mistakes of one number in a million, and of all, are seen at their size."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 100_000, dtype=torch.float64)
    tensor = torch.tensor
    whole = tensor(sketch(a + 3 * b))
    assert torch.allclose(whole, tensor(sketch(a)) + 3 * tensor(sketch(b)))
    assert whole.norm().item() == pytest.approx((a + 3 * b).norm().item(), rel=0.3)
    one = torch.zeros(1_000_000)
    one[123_456] = 5
    assert tensor(sketch(one)).norm() == 5
