"""Which examples a rank trains on in which step."""

import torch
from torch.utils.data import TensorDataset

from utils.errors import BadInput


def share_of_batch(
    dataset: TensorDataset,
    step: int,
    global_batch: int,
    rank: int,
    world_size: int,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return what `rank` gets of a step's batch: `global_batch / world_size` examples.

    Depends on nothing else: a run that is resumed, also on another number of ranks, sees
    the same batches. Every epoch has an order of its own, by `seed`; its last, short batch
    is left out. Returns the tensors of the dataset, each [global_batch / world_size, ...].

    Raises:
        BadInput: the ranks cannot share the batch equally, or it exceeds the dataset.
    """
    if global_batch % world_size:
        raise BadInput(
            f"{world_size} ranks cannot share a batch of {global_batch} equally: choose "
            f"a multiple of {world_size}."
        )
    steps_per_epoch = len(dataset) // global_batch
    if steps_per_epoch == 0:
        raise BadInput(
            f"The global batch of {global_batch} exceeds the {len(dataset)} examples: "
            "lower the batch size or the number of workers."
        )
    epoch, step = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(dataset), generator=generator)
    return dataset[
        order[step * global_batch : (step + 1) * global_batch][rank::world_size]
    ]


def check_batch_size(batch_size: int, num_rows: int, num_workers: int) -> None:
    """Check that every worker gets at least one whole batch.

    Raises:
        BadInput: its shard, a `num_workers`-th of the rows, is smaller.
    """
    shard = num_rows // num_workers
    if batch_size > shard:
        raise BadInput(
            f"The batch size is {batch_size}, but each of {num_workers} workers gets "
            f"{shard} of the {num_rows} rows: lower --batch-size or the number of "
            "workers, or use more data."
        )
