"""What the exercises on ranks share: joining, and telling who waits."""

from datetime import timedelta


def join(seconds: float = 20) -> tuple[int, int]:
    """Join the process group of this run; returns rank and world size.

    Ends once all ranks are there: else one that has nothing to send might be gone before
    the others have found it, and they would blame the network. Waiting for another rank
    ends in an error after `seconds`.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def stands_still(error: RuntimeError) -> bool:
    """Whether it is gloo's: the others are elsewhere, or have ended."""
    return "Timed out" in str(error) or "by peer" in str(error)
