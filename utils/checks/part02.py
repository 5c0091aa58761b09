"""Checks of the exercises of part 02: Ray, Ray Train and Ray Data."""

import numpy as np

from utils.checks.exercise import Exercise


class _Add:
    """Stands for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


_COUNTS_303 = np.array([[1, 0, 0, 2, 0, 0, 0, 0, 0, 0]])


EXERCISES = {
    # 02-ddp-pytorch-ray/01_ray_core_in_ten_minutes.ipynb
    "seconds for 20 tasks": Exercise(
        lambda answer: answer == 5,
        "How many tasks with 2 CPUs run at once, and how many rounds does that make?",
    ),
    "count after restart": Exercise(
        lambda answer: answer == 2,
        "A restarted actor runs __init__ again.",
    ),
    "tree sum": Exercise(
        lambda tree_sum: all(
            tree_sum(_Add, [(n, 0) for n in range(count)]) == (sum(range(count)), depth)
            for count, depth in ((1, 0), (2, 1), (5, 3), (8, 3))
        ),
        "In each round add neighbours, two by two, until one reference is left; of an "
        "odd number, the last one waits for the next round.",
    ),
    # 02-ddp-pytorch-ray/02_ray_train_ddp.ipynb
    "workers that fit": Exercise(
        lambda answer: answer == 4,
        "One worker has to fit one node: how many fit the first, how many the second?",
    ),
    "epochs after failure": Exercise(
        lambda answer: answer == 3,
        "The last checkpoint is that of the last finished epoch: what is not in it?",
    ),
    # 02-ddp-pytorch-ray/03_ray_data_streaming.ipynb
    "steps per worker": Exercise(
        lambda answer: answer == 1003 // 4 // 16,
        "First the rows of one worker, all equal; then the whole batches in them.",
    ),
    "safe buffer": Exercise(
        lambda answer: answer == 128,
        "At least two batches have to fit in.",
    ),
    "label counts": Exercise(
        lambda f: np.array_equal(
            f({"label": np.array([3, 0, 3])})["counts"], _COUNTS_303
        ),
        "np.bincount(labels, minlength=10) counts; a leading axis makes it one row.",
    ),
    # 02-ddp-pytorch-ray/04_fault_tolerance_and_elasticity.ipynb
    "steps trained twice": Exercise(
        lambda answer: answer == 16,
        "From which step does the last checkpoint go on? Count from there to step 75.",
    ),
    "seconds between saves": Exercise(
        lambda answer: abs(answer - (2 * 2 * 36_000) ** 0.5) < 1,
        "sqrt(2 * c * f), with both in seconds.",
    ),
    "elastic batch": Exercise(
        lambda f: f([3, 2, 3], 32) == [96, 64, 96] and f([], 8) == [],
        "The batch of one worker times the workers, for each epoch.",
    ),
}
