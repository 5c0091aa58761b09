"""Random numbers differ between ranks, and go on after a restart where they were."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests import scripts, sharding
from utils import generators
from utils.launch import run_ranks


def draw(saved: bytes | None = None) -> tuple[list[float], bytes, list[float]]:
    """Return what a rank draws first, the state after it, and what it draws then."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # as for equal weights
    generators.seed_rank(7)
    if saved:
        generators.restore(saved)
    first = torch.rand(4).tolist()
    return first, generators.states(), torch.rand(4).tolist()


def test_random_numbers_differ_between_ranks_and_go_on_after_a_restart():
    undisturbed = run_ranks(draw, 3)
    firsts = [first for first, _, _ in undisturbed]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]
    saved = undisturbed[1][1]  # of all ranks, whoever is asked
    restored = run_ranks(draw, 3, saved)
    assert [first for first, _, _ in restored] == [then for _, _, then in undisturbed]


def test_a_restart_on_another_number_of_ranks_begins_with_those_of_the_seed():
    saved = run_ranks(draw, 2)[0][1]
    assert [f for f, _, _ in run_ranks(draw, 3, saved)] == [
        f for f, _, _ in run_ranks(draw, 3)
    ]


class Augmented:
    """Four items that are random numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _) -> float:
        return torch.rand(()).item()


def test_augmentation_by_a_loader_differs_by_rank_epoch_and_first_step(
    monkeypatch,
):
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
def test_a_run_with_fsdp2_goes_on_with_more_or_fewer_ranks_and_the_same_settings(
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
