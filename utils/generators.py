"""The random number generators of all ranks: seeded apart, saved and restored together.

What is drawn while a model trains (dropout, augmentation) has to differ between ranks,
and to go on after a restart where it was.
"""

import torch
import torch.distributed as dist


def seed_rank(seed: int) -> None:
    """Seed this rank's default generators, each rank's differently.

    Call it after the model is built, whose weights have to be the same on all ranks.
    """
    torch.manual_seed(seed * 100_003 + dist.get_rank() + 1)  # of a GPU, too


def states() -> list[dict[str, bytes]]:
    """Return the states of all ranks' generators, by rank; every rank calls it.

    As bytes, which every kind of checkpoint takes for one value.
    """
    mine = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def restore(saved: list[dict[str, bytes]]) -> None:
    """Go on with this rank's generators where they were.

    On another number of ranks there is nothing to go on with: they stay as seeded.
    """
    if len(saved) != dist.get_world_size():
        return
    mine = {
        device: torch.frombuffer(bytearray(state), dtype=torch.uint8)
        for device, state in saved[dist.get_rank()].items()
    }
    torch.set_rng_state(mine["cpu"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
