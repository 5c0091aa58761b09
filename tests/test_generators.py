"""Noise that is drawn while training: other on each rank, and after a restart the next."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests import scripts, sharding
from utils import generators
from utils.launch import run_ranks

pytestmark = [pytest.mark.part01, pytest.mark.part02, pytest.mark.part03]


def draw(saved: bytes | None = None) -> tuple[list[float], bytes, list[float]]:
    """Return what a rank draws first, the state after it, and what it draws then."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # as for equal weights
    generators.seed_rank(7)
    if saved:
        generators.restore(saved)
    first = torch.rand(4).tolist()
    return first, generators.states(), torch.rand(4).tolist()


def test_every_rank_draws_other_noise_and_goes_on_with_it():
    undisturbed = run_ranks(draw, 3)
    firsts = [first for first, _, _ in undisturbed]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]
    saved = undisturbed[1][1]  # of all ranks, whoever is asked
    restored = run_ranks(draw, 3, saved)
    assert [first for first, _, _ in restored] == [then for _, _, then in undisturbed]


def test_on_another_number_of_ranks_there_is_nothing_to_go_on_with():
    saved = run_ranks(draw, 2)[0][1]
    assert [f for f, _, _ in run_ranks(draw, 3, saved)] == [
        f for f, _, _ in run_ranks(draw, 3)
    ]


class Augmented:
    """Four items that are nothing but noise."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _) -> float:
        return torch.rand(()).item()


def test_the_processes_of_a_loader_draw_by_rank_epoch_and_first_step(monkeypatch):
    def drawn(rank: int, epoch: int | None, first: int = 0) -> tuple[float, ...]:
        monkeypatch.setattr(generators.dist, "get_rank", lambda: rank)
        new = torch.Generator()
        loader = DataLoader(Augmented(), 4, num_workers=1, generator=new)
        if epoch is not None:
            generators.seed_loader(loader, 7, epoch, first)
        (batch,) = loader
        return tuple(batch.tolist())

    assert drawn(0, None) == drawn(1, None)  # what new generators lead to
    places = itertools.product((0, 1), (0, 1), (0, 5))
    found = {drawn(*place) for place in places}
    assert len(found) == 8 and drawn(1, 1, 5) in found


@pytest.mark.parametrize("ranks", [1, 3])
def test_fsdp2_goes_on_with_other_numbers_of_ranks_and_the_same_settings(
    ranks, tmp_path
):
    """What is the same on all ranks is one value each; dcp would take it apart."""
    script, run = scripts.load(sharding.TRAIN_FSDP2), {"script": "a", "--lr": 0.1}

    def trained():
        dist.init_process_group("gloo")
        model = sharding.shard(sharding.build_model(torch.float32))
        return model, torch.optim.AdamW(model.parameters())

    def save() -> None:
        script.save_checkpoint(*trained(), 5, 12, tmp_path, run)

    def load(settings: dict) -> int | str:
        try:
            return script.load_checkpoint(
                *trained(), 12, tmp_path / "step-000005", settings
            )
        except Exception as error:
            return str(error)

    run_ranks(save, 2)
    assert run_ranks(load, ranks, run) == [5] * ranks
    for said in run_ranks(load, ranks, {"script": "a", "--clip": 2}):
        assert (
            "with --clip None, --lr 0.1, and this one has --clip 2, --lr None" in said
        )
