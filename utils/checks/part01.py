"""Checks of the exercises of part 01: data parallelism by hand, and DDP."""

from utils.checks.exercise import Exercise

EXERCISES = {
    # 01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb
    "global batch": Exercise(
        lambda answer: answer == 8 * 32,
        "batch_size counts the images of one worker, and all workers step together.",
    ),
    "bytes per step": Exercise(
        lambda answer: abs(answer - 2 * 7 / 8 * 4 * 11_175_370) < 1,
        "Take 2 (N - 1) / N times the bytes of all gradients.",
    ),
    "mean loss": Exercise(
        lambda f: f([6.0, 2.0], [3, 1]) == 2.0 and f([2.0, 9.0], [1, 3]) == 2.75,
        "Add up the sums, and divide once, by the number of all images.",
    ),
    # 01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb
    "accumulation": Exercise(
        lambda answer: answer == 4096 // (8 * 64),
        "One backward pass on all GPUs covers 8 * 64 images.",
    ),
    "traffic saved": Exercise(
        lambda answer: abs(answer - 7 / 8) < 0.006,
        "Of the passes of one step, only the last one sends.",
    ),
    "share": Exercise(
        lambda share: all(
            [i for rank in range(n) for i in share(items, rank, n)]
            == list(range(items))
            and {len(share(items, rank, n)) for rank in range(n)}
            <= {items // n, -(-items // n)}
            for n, items in ((1, 5), (2, 7), (3, 359), (4, 3))
        ),
        "Block r starts at r * num_items // world_size, and ends where the next starts.",
    ),
}
