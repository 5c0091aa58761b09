"""N workers train like one process: same losses, gradients and parameters.

Two criteria, as float32 rounding of 1e-7 grows to 1e-3 within ten AdamW steps: float64
decides "same algorithm" over all steps, float32 decides "same code path" on the first
gradient. ResNet-18 is trained where every rank has the whole model, a GPT where it is
sharded.
"""

from functools import cache

import pytest
import torch

from tests import parity, sharding, two_dimensions
from tests.compare import relative
from utils import memory
from utils.launch import run_ranks

FLOAT64, FLOAT32 = 1e-10, 1e-5
# DeepSpeed reduces gradients of float64 models in float32, and keeps float32 copies.
FLOAT64_ZERO = 1e-6
WORKERS = (1, 2, 3)


def marks(num_workers: int, strategies: dict) -> list[pytest.MarkDecorator]:
    """Return when a test with so many workers runs, as marks.

    Three cut a tensor into unequal shards, so they gate a change where it is sharded.
    """
    if num_workers == 2:
        return []
    gates = num_workers == 3 and strategies is sharding.STRATEGIES
    return [pytest.mark.slow if gates else pytest.mark.weekly]


def runs(*strategies: dict) -> pytest.MarkDecorator:
    """Return each strategy with 1, 2 and 3 workers; `make test` runs those with 2."""
    chosen = [
        pytest.param(n, name, id=f"{n} workers-{name}", marks=marks(n, names))
        for n in WORKERS
        for names in strategies
        for name in names
    ]
    return pytest.mark.parametrize(("num_workers", "name"), chosen)


def reference(**options) -> parity.Both:
    """Return what one process does: no wrap, no averaging."""
    step = parity.step_without_averaging
    return parity.alone(parity.Strategy(lambda model: model, step, **options))


@cache
def reference_for(norm: str, steps: int) -> parity.Both:
    return reference(norm=norm, steps=steps)


@cache
def reference_of_sharding() -> dict[str, torch.Tensor]:
    return sharding.train_all({"alone": sharding.one_process})["alone"]


def compared(
    strategies: dict[str, parity.Strategy], found: dict[str, list[parity.Both]]
) -> dict[str, dict[str, float]]:
    return {
        name: parity.compare(reference_for(s.norm, s.steps), found[name])
        for name, s in strategies.items()
    }


@cache
def with_ranks(num_workers: int) -> dict[str, dict[str, float]]:
    """Run in processes with torchrun's environment, without its seconds of imports."""
    chosen = dict(parity.STRATEGIES)
    if num_workers == 2:
        chosen |= parity.CONTROLS
    found = run_ranks(parity.in_a_group, num_workers, parity.train_all, chosen)[0]
    return compared(chosen, found)


@cache
def with_shards(num_workers: int) -> dict[str, dict[str, float]]:
    found = run_ranks(sharding.train_all, num_workers, sharding.STRATEGIES)[0]
    return {n: parity.distances(r, reference_of_sharding()) for n, r in found.items()}


@cache
def on_a_grid() -> dict[str, dict[str, float]]:
    """Return distances of all layouts and mistakes on 2 x 2 ranks, and rank 0's "state"."""
    whole_run = two_dimensions.LAYOUTS | {
        "shards nothing": two_dimensions.shards_nothing
    }
    chosen = {n: (lay_out, 10) for n, lay_out in whole_run.items()}
    chosen |= {n: (lay_out, 1) for n, lay_out in two_dimensions.CONTROLS.items()}
    found = {}
    for name, ours in run_ranks(two_dimensions.train_all, 4, chosen)[0].items():
        state = {"state": ours.pop("state")}
        theirs = {n: t for n, t in reference_of_sharding().items() if n in ours}
        if name in two_dimensions.CONTROLS:  # which take one step
            theirs = {n: t for n, t in theirs.items() if n.startswith("gradient")}
        found[name] = parity.distances(ours, theirs) | state
    return found


@pytest.fixture
def distance(name: str, num_workers: int) -> dict[str, float]:
    """Return it from the results of one process, by what is compared."""
    if name in sharding.STRATEGIES:
        return with_shards(num_workers)[name]
    return with_ranks(num_workers)[name]


@runs(parity.STRATEGIES, sharding.STRATEGIES)
def test_float64_equals_one_process_after_ten_steps(name, distance):
    tolerance = FLOAT64_ZERO if name.startswith("ZeRO") else FLOAT64
    assert distance["losses"] < tolerance
    assert distance["gradient"] < tolerance
    assert distance["parameters"] < tolerance


@runs(parity.STRATEGIES, sharding.STRATEGIES)
def test_float32_first_gradient_equals_one_process(name, distance):
    assert distance["gradient32"] < FLOAT32


@runs(sharding.STRATEGIES)
def test_evaluation_of_shards_equals_one_process(name, distance):
    """Over seven texts, which neither 2 nor 3 ranks can share equally."""
    assert distance["test loss"] < 1e-6


def test_one_process_takes_ten_steps_and_one_in_float32():
    """The references, to whose steps all else is held."""
    double, single = reference_for("group", parity.STEPS)
    assert (len(double.steps), len(double.updates)) == (10, 10)
    assert (len(single.steps), len(single.updates)) == (1, 1)
    # bytes of weights, gradients and the state of AdamW, but for its counts of steps
    assert double.state_bytes / single.state_bytes == pytest.approx(2, rel=1e-4)
    sharded = reference_of_sharding()
    assert len(sharded["losses"]) == 10
    assert sharded["parameters"].dtype == torch.float64
    assert sharded["gradient32"].dtype == torch.float32


@pytest.mark.parametrize("name", parity.CONTROLS)
def test_a_mistake_is_seen(name):
    """A negative control: each mistake is at least a million times the tolerance off."""
    distance = with_ranks(2)[name]
    assert distance["parameters"] > 1e6 * FLOAT64
    if name != "no set_epoch":  # which is right in the first step
        assert distance["gradient"] > 1e6 * FLOAT64
        assert distance["gradient32"] > 1e3 * FLOAT32


def mistakes_of_sharding() -> dict[str, torch.Tensor]:
    """Return the first gradient where it is summed; a weight, and what its shards are."""
    summed = sharding.fsdp2(torch.float64, steps=1, sum_gradients=True)["gradients"]
    with torch.device("meta"):
        model = sharding.GPT(sharding.CONFIG)
    sharding.shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return {
        "summed": torch.cat([gradient.flatten() for gradient in summed]),
        "shards": model.head.weight.full_tensor(),
        "weight": sharding.build_model(torch.float32).head.weight.detach(),
    }


def test_mistakes_of_sharding_are_seen():
    """Negative controls: no division by the world size; `init_weights` on a CPU mesh,
    which gives all ranks the shard of rank 0."""
    found = run_ranks(mistakes_of_sharding, 2)[0]
    theirs = reference_of_sharding()["gradient"]
    assert relative(found["summed"], theirs) > 1e6 * FLOAT64
    assert relative(found["summed"] / 2, theirs) < FLOAT64
    assert torch.equal(*found["shards"].chunk(2))
    assert relative(found["shards"], found["weight"]) > 1e6 * FLOAT64


def sharded_state(name: str) -> float:
    """Return bytes of state per rank in float32, by the formula."""
    model = sharding.build_model(torch.float32)
    here = sum(p.numel() for p in model.parameters())
    if name == "tensor parallel":  # half of what is cut, and all else
        for block in model.blocks:
            cut = [block.out.weight, block.down.weight]
            cut += [*block.qkv.parameters(), *block.up.parameters()]
            here -= sum(p.numel() for p in cut) / 2
    return memory.predict(here, 2, stage=3).total


@pytest.mark.weekly  # 03/04 proves layouts, and breaks one, in every change
@pytest.mark.parametrize("name", two_dimensions.LAYOUTS)
def test_a_grid_of_ranks_equals_one_process(name):
    distance = on_a_grid()[name]
    for key in ("losses", "gradient", "parameters"):
        assert distance[key] < FLOAT64
    assert distance["gradient32"] < FLOAT32
    assert distance["state"] == pytest.approx(sharded_state(name), rel=0.01)


@pytest.mark.weekly
@pytest.mark.parametrize("name", two_dimensions.CONTROLS)
def test_a_mistake_on_a_grid_is_seen(name):
    assert on_a_grid()[name]["gradient"] > 1e6 * FLOAT64
    assert on_a_grid()[name]["gradient32"] > 1e3 * FLOAT32


@pytest.mark.weekly
def test_sharding_that_shards_nothing_is_seen_by_its_bytes_alone():
    """A negative control: a model that stays whole trains like one process, too."""
    fake = on_a_grid()["shards nothing"]
    for key in ("losses", "gradient", "parameters"):
        assert fake[key] < FLOAT64
    assert fake["state"] == 2 * sharded_state("HSDP")
