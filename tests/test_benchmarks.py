"""The benchmark's statistics, and its table: no timing is tested here."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import ray.train
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests import sharding
from tests.patience import PATIENCE
from tests.tools import notebooks, seconds
from tests.tools.benchmarks import __main__ as benchmark
from tests.tools.benchmarks import (
    allocator,
    commands,
    exact,
    executing,
    loop,
    predicting,
    report,
    start,
    steps,
    streaming,
)
from tests.tools.benchmarks.__main__ import FOLDER, main
from tests.tools.benchmarks.ratios import (
    MET,
    MISSED,
    NOT_DECIDED,
    Ratio,
    interleave,
    ratio,
)
from tests.tools.benchmarks.rows import Row
from utils import memory, timing
from utils.launch import run_ranks
from utils.models import GPT, SMOKE


def noisy(factor: float, noise: float, pairs: int = 12):
    """Return pairs of seconds whose ratio is `factor`, on a machine that slows by half."""
    generator = np.random.default_rng(0)
    drift = np.repeat(np.linspace(1, 1.5, pairs), 2).reshape(pairs, 2)
    seconds = drift * np.exp(noise * generator.standard_normal([pairs, 2]))
    return seconds[:, 0], factor * seconds[:, 1]


def test_variants_alternate_and_keep_their_places():
    order = []
    a, b = interleave(
        lambda: order.append("A") or 1.0, lambda: order.append("B") or 2.0, pairs=4
    )
    assert "".join(order) == "BA" + "ABBAABBA"  # a pair to warm up
    assert (a.tolist(), b.tolist()) == ([1.0] * 4, [2.0] * 4)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_a_ratio_is_found_although_the_machine_slows_down(factor):
    found = ratio(*noisy(factor, noise=0.02))
    assert found.low <= factor <= found.high
    assert found.value == pytest.approx(factor, rel=0.03)
    assert 1 < found.spread < 1.15  # the drift between two neighbours, and the noise
    inverse = found.inverse()
    assert inverse.low <= inverse.value <= inverse.high
    assert inverse.value == pytest.approx(1 / factor, rel=0.03)


def test_the_control_compares_neighbours_only():
    """In B A A B the A's are neighbours: a factor between variants is not in it."""
    a, b = [1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]
    assert ratio(a, b).spread == pytest.approx(1)
    # pair 0 ends with B and pair 1 begins with it: this step of A is no neighbour's
    a, b = [5.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]
    assert ratio(a, b).spread == pytest.approx(1)


@pytest.mark.parametrize(
    ("low", "value", "high", "spread", "verdict"),
    [
        (0.90, 0.95, 0.99, 1.01, MET),
        (1.10, 1.15, 1.20, 1.01, MISSED),
        (0.90, 0.95, 1.20, 1.01, NOT_DECIDED),  # the interval contains the bar
        (0.90, 0.95, 0.99, 1.20, NOT_DECIDED),  # the control is wider than the distance
    ],
)
def test_a_bar_is_met_only_if_the_whole_interval_clears_it(
    low, value, high, spread, verdict
):
    found = Ratio(value, low, high, spread, pairs=10)
    assert found.verdict(at_most=1.0) == verdict
    other = {MET: MISSED, MISSED: MET, NOT_DECIDED: NOT_DECIDED}
    assert found.verdict(at_least=1.0) == other[verdict]


def test_cells_that_only_import_or_start_ray_are_start_up():
    assert executing.is_start_up("import ray\nfrom a import (\n    b,\n)")
    assert executing.is_start_up("start_ray(2)\ntrainer = TorchTrainer(train)")
    assert not executing.is_start_up("def again():\n    start_ray(2)")
    assert not executing.is_start_up("start_ray(2)\nresult = fit()")
    assert not executing.is_start_up("print(1)")


@pytest.mark.parametrize(
    ("kept", "spilled", "verdict"),
    [(0.01, 0, MET), (0.9, 0, MISSED), (0.1, 0, NOT_DECIDED), (0.01, 5, MISSED)],
)
def test_memory_that_is_kept_is_seen(kept, spilled, verdict):
    noise = 5e6 * np.random.default_rng(0).standard_normal([2, 10])
    small, large = np.add(noise, [[20e6], [20e6 + kept * 252e6]])
    row = streaming.memory_row(
        small.astype(int), large.astype(int), 252_000_000, spilled
    )
    assert json.loads(json.dumps(vars(row))) == vars(row)  # as it goes into the file
    assert row.verdict == verdict
    assert float(row.value) == pytest.approx(kept, abs=0.03)
    assert f"{spilled} bytes spilled" in row.note
    assert "with D = 84 MB" in row.note


def notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells.insert(0, nbformat.v4.new_markdown_cell("# Title"))
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.fixture
def three_notebooks(tmp_path, monkeypatch):
    """Write two lessons and a notebook of solutions, each of two cells."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(executing, "ROOT", tmp_path)
    monkeypatch.setattr(seconds, "CELLS", tmp_path / "build" / "seconds.json")
    for name in ("a", "b", "solutions"):
        notebook(
            tmp_path / "01-part" / f"{name}.ipynb", "import torch", f"print('{name}')"
        )
    monkeypatch.setattr(executing, "FIRST", "01-part/a.ipynb")
    return tmp_path / "01-part"


def took(name, *seconds):
    return {f"01-part/{name}.ipynb::Cell {i}": s for i, s in enumerate(seconds)}


def test_seconds_of_notebooks_are_kept_until_they_change(three_notebooks):
    seconds.note_cells(took("a", 1.0, 3.0) | took("solutions", 9.0, 9.0))
    seconds.note_cells(took("b", 2.0, 2.0) | {"tests/test_a.py::test": 5.0})
    seconds.note_cells(took("a", 7.0))  # a run that was cut short, or failed
    first, second = executing.rows()  # and not the solutions
    assert (first.value, first.note) == ("1.33", "4 s under nbval, 25% of it start-up")
    assert (second.value, second.note) == (
        "2.00",
        "4 s under nbval, 50% of it start-up",
    )
    notebook(three_notebooks / "b.ipynb", "import torch", "print('changed')")
    kept, missing = executing.rows()
    assert kept == first
    assert (missing.value, missing.bar, missing.verdict) == ("1", "", "")
    assert "were not executed under nbval since they changed" in missing.what


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_an_exponent_is_found_although_the_machine_slows_down(power):
    generator, slower = np.random.default_rng(0), iter(np.linspace(1, 1.5, 1000))

    def step(size: int):
        return lambda: (
            size**power * next(slower) * np.exp(0.02 * generator.standard_normal())
        )

    sizes = [1, 4, 16]
    row = steps.growth_of("x", sizes, [step(size) for size in sizes])
    assert json.loads(json.dumps(vars(row))) == vars(row)
    low, high = map(float, row.interval.split(" to "))
    assert low - 0.005 <= power <= high + 0.005  # as it is rounded
    assert high - low < 0.05
    control = row.control.removesuffix(", of 0").split(" to ")
    assert max(abs(float(end)) for end in control) < 0.03


def test_gpt2_is_the_same_training_tuned_and_naive():
    tuned, naive = steps.gpt2(texts=2, tokens=32, config=SMOKE)
    assert len(tuned) == len(naive) == 10
    assert (tuned > 0).all()
    # model FLOPs: flash attention computes some of them twice, which is no merit
    math = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, math:
        GPT(SMOKE)(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
    assert steps.flops(2, 32, SMOKE) == counter.get_total_flops()


def test_the_value_before_stands_beside_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    for value in ("1.20", "1.10"):
        found = [Row(10, "executing a", "falling", value)]
        monkeypatch.setattr(executing, "rows", lambda found=found: found)
        assert main(["executing"]) == 0
    assert (
        "| 10 | executing a | falling | 1.10 |  |  |  | 1.20 |  |"
        in (tmp_path / "RESULTS.md").read_text()
    )


def test_a_run_that_is_interrupted_keeps_the_earlier_results(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    monkeypatch.setattr(benchmark, "PARTS", ("steps", "executing"))
    monkeypatch.setattr(steps, "rows", lambda: [Row(8, "speed", "", "1")])
    monkeypatch.setattr(executing, "rows", lambda: [Row(10, "executing", "", "2")])
    assert main([]) == 0
    monkeypatch.setattr(executing, "rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main([])
    numbers = [row["number"] for row in report.all_rows(report.read(tmp_path))]
    assert numbers == [8, 10]


def test_every_part_names_its_own_machine_and_minutes():
    """A part that is measured later, elsewhere, says nothing about the others."""
    machine = {"cores": 2, "processor": "a", "python": "3", "torch": "2", "ray": "1"}
    other = machine | {"cores": 64}
    parts = {
        "exact": {
            "machine": machine,
            "seconds": 60,
            "rows": [vars(Row(6, "", "", ""))],
        },
        "steps": {"machine": other, "seconds": 90, "rows": [vars(Row(8, "", "", ""))]},
    }
    table = report.markdown({"parts": parts})
    assert "| exact | 6 | 1.0 | 2 cores (a), Python 3, torch 2, Ray 1 |" in table
    assert "| steps | 8 | 1.5 | 64 cores (a), Python 3, torch 2, Ray 1 |" in table


def test_the_table_says_what_the_json_file_says():
    results = report.read(FOLDER)
    assert (FOLDER / "RESULTS.md").read_text() == report.markdown(results)
    assert report.all_rows(results)


def test_a_row_has_one_of_three_verdicts():
    with pytest.raises(ValueError, match="verdict of row 1"):
        Row(1, "speed", "at most 1", "2", verdict="nearly met")


@pytest.mark.slow
@pytest.mark.covers("make bench")
@pytest.mark.parametrize(
    ("what", "factor", "verdicts"),
    [
        ("sent", 1.005, [MET, MET]),
        ("sent", 1.02, [MISSED, MET]),
        ("state", 0.99, [MET, MET]),
        ("state", 0.97, [MET, MISSED]),
    ],
)
def test_bytes_of_one_strategy_on_one_rank_decide(monkeypatch, what, factor, verdicts):
    """The rows that are exact; that the bytes are so is in test_sharding.py."""
    model = sharding.build_model(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())

    def ranks(measure, num_workers):
        found = [{}, {}]
        for name, stage in exact.STRATEGIES.items():
            kind = memory.DEEPSPEED_FP32 if name.startswith("zero") else memory.FP32
            state = memory.predict(parameters, num_workers, stage, kind)
            sent = sharding.predict_sent(name, num_workers)
            for rank in found:
                held = {"state": [state.total], "between": [1.01 * state.total]}
                rank[name] = {"sent": sent} | held
        off = found[1]["zero3"]
        off[what] = (
            [n * factor for n in off[what]] if what == "state" else sent * factor
        )
        return found

    monkeypatch.setattr(exact, "run_ranks", ranks)
    rows = exact.rows()
    assert [row.number for row in rows] == [6, 7]
    assert [row.verdict for row in rows] == verdicts
    assert rows[what == "state"].value == f"{factor:.4f}"
    assert "Between two passes zero2 is at 1.0100" in rows[1].note


@pytest.mark.weekly
def test_the_rows_that_are_exact_are_met(tmp_path, monkeypatch):
    """As `make bench` measures and writes them; each byte is tested in test_sharding.py."""
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    assert main(["exact"]) == 0
    rows = report.all_rows(report.read(tmp_path))
    assert [(row["number"], row["verdict"]) for row in rows] == [(6, MET), (7, MET)]
    assert all(len(row["data"]) == 6 for row in rows)  # strategies
    assert "| 6 | bytes sent per step" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    ("seconds", "fit", "verdict"),
    [
        (400, 7.5, MET),
        (700, 14.0, NOT_DECIDED),  # a slow machine: 50 fits of 213
        (440, 7.0, NOT_DECIDED),  # a fast one: 63 fits
        (500, 8.0, MISSED),
    ],
)
def test_test_commands_are_judged_in_seconds_and_in_fits(
    monkeypatch, seconds, fit, verdict
):
    noted = {"test": {"seconds": seconds, "fit": fit, "tests": 900}}
    monkeypatch.setattr(commands, "noted_runs", lambda: noted)
    test, test_all = commands.rows()
    assert test.verdict == verdict
    assert float(test.value) == pytest.approx(seconds / fit / (1599 / 7.5), abs=0.005)
    assert (test_all.value, test_all.verdict) == ("", "")
    assert "no run of `make test-all` passed" in test_all.note


def test_a_report_is_compared_per_megabyte_with_a_plain_save():
    saves, reports = noisy(2.5, noise=0.02)
    row = start.per_megabyte(saves, reports, size=100)
    assert float(row.value) == pytest.approx(2.5, rel=0.03)
    assert row.verdict == MET
    assert f"{np.median(saves) * 10:.2f}, of 100 MB" in row.note


def test_what_the_allocator_is_worth_is_per_step_and_rank():
    """Neither variant's seconds and page faults are taken for the other's."""

    class Group:
        def __init__(self, seconds: float, faults: int):
            self.seconds, self.faults, self.steps = seconds, faults, 0

        def ask(self, order: str):
            if order == "usage":
                return self.faults * self.steps, 0.01 * self.steps
            self.steps += loop.STEPS
            return self.seconds * loop.STEPS, []

    found, said = allocator.compare(Group(0.2, 9000), Group(0.15, 0))
    assert found.value == pytest.approx(0.75)
    assert said == (
        "150 ms per step with 0 page faults and 10 ms in the kernel, against "
        "200 ms per step with 9,000 page faults and 10 ms in the kernel"
    )


def test_an_unknown_part_is_named(capsys):
    assert main(["everything"]) == 1
    assert "There is no part everything: choose from exact" in capsys.readouterr().out


@pytest.mark.weekly
def test_what_torchrun_starts_imports_no_more_than_a_script_does():
    """Else Ray Train's start would be compared with one that imports Ray as well."""
    loaded = "import sys, tests.tools.benchmarks.loop; print(*sys.modules)"
    done = subprocess.check_output(
        [sys.executable, "-c", loaded], cwd=notebooks.ROOT, text=True, timeout=PATIENCE
    )
    names = {name.partition(".")[0] for name in done.split()}
    assert "torch" in names
    assert not names & {"ray", "scipy", "pandas", "matplotlib"}


def saved_and_reported() -> tuple[int, int]:
    """Return the bytes of the plain save, and of the checkpoint for Ray Train."""
    dist.init_process_group("gloo")
    sizes = []

    def keep(metrics, checkpoint):
        with checkpoint.as_directory() as folder:
            sizes.extend(path.stat().st_size for path in Path(folder).iterdir())

    ray.train.report = keep  # of this rank, which ends with this function
    measured = loop.Loop(lambda model: model)
    assert measured.report() > 0
    return measured.save()[1], sum(sizes)


@pytest.mark.weekly
def test_a_report_of_the_script_is_measured_and_saves_what_the_plain_save_does():
    [(plain, reported)] = run_ranks(saved_and_reported, 1)
    assert plain < reported < 1.001 * plain  # the report has the generators, too


@pytest.mark.parametrize(("error", "verdict"), [(0.1, MET), (0.5, MISSED)])
def test_a_step_is_judged_by_the_size_that_is_predicted_worst(error, verdict):
    laptop = timing.Machine(flops=4e10, bandwidth=1e9, latency=3e-4, group=1e-3)
    keys = [*predicting.keys_of(True), *predicting.keys_of(False)]
    works = {key: predicting.work_of(*key) for key in keys}
    seconds = {key: timing.predict(work, laptop).exposed for key, work in works.items()}
    seconds[16, 64, "fsdp2", True] *= (
        1 + error
    )  # one of nine, outside of the fitted range
    row, without = predicting.rows_of([seconds] * 10)
    assert row.verdict == verdict
    assert float(row.value) == pytest.approx(1 / (1 + error), rel=0.01)
    assert row.note.startswith("16 layers, width 64, fsdp2; ")
    if error == 0.1:  # ddp sends as much in fewer messages: nothing else can explain it
        assert abs(float(without.value) - 1) > abs(float(row.value) - 1)
