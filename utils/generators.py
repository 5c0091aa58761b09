"""The random number generators of all ranks: seeded by rank, saved and restored together.

What is drawn while a model trains (dropout, augmentation) has to differ between ranks,
and to go on after a restart where it was. Not so in processes of a DataLoader, which draw
ahead: for what is left of an epoch they draw other numbers than for its first part.
"""

import io
import random

import torch
import torch.distributed as dist


def seed_rank(seed: int) -> None:
    """Seed this rank's default generators, each rank's differently.

    Call it after the model is built, whose weights have to be the same on all ranks.
    """
    torch.manual_seed(seed * 100_003 + dist.get_rank() + 1)  # of a GPU, too


def seed_loader(loader, seed: int, epoch: int, first: int = 0) -> None:
    """Seed the generator of a DataLoader by rank and epoch; call it before each epoch.

    It seeds the loader's processes, which augment. A new generator always starts with the
    same number, so that all ranks would augment alike.

    Args:
        loader: made with `generator=torch.Generator()`, and without persistent workers.
        seed: of the training.
        epoch: from 0 on.
        first: the step at which it begins, or goes on.
    """
    mine = f"{seed} {dist.get_rank()} {epoch} {first}"
    loader.generator.manual_seed(random.Random(mine).getrandbits(62))


def states() -> bytes:
    """Return the states of all ranks' generators; every rank calls it.

    As one value: a distributed checkpoint takes a list apart, and does not find its end
    again on more ranks.
    """
    mine = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def restore(saved: bytes) -> None:
    """Go on with this rank's generators where they were.

    On another number of ranks there is nothing to go on with: they stay as seeded.
    """
    file = io.BytesIO(saved)
    by_rank = torch.load(file, map_location="cpu", weights_only=True)
    if len(by_rank) != dist.get_world_size():
        return
    mine = by_rank[dist.get_rank()]
    torch.set_rng_state(mine["cpu"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
