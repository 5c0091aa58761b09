"""Checks of the exercises of part 02: Ray, Ray Train and Ray Data."""

from unittest import mock

import numpy as np

from utils.checks.exercise import Exercise


class _Add:
    """Stands for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


def _runs_all_at_once(run_all) -> bool:
    """Whether it submits every task before it waits for the first result."""
    import ray  # here, not above: part 01 has no need of it

    done = []

    class Task:
        @staticmethod
        def remote(x: int) -> int:  # a number stands for the reference to its square
            done.append("submit")
            return x

    def get(references, **_):
        done.append("get")
        several = isinstance(references, list)
        return [x * x for x in references] if several else references**2

    with mock.patch.object(ray, "get", get):
        results = run_all(Task, [1, 2, 3])
    return results == [1, 4, 9] and done[:3] == ["submit"] * 3


def _is_mean_of_two_ranks(returned) -> bool:
    return [list(map(float, of_rank)) for of_rank in returned] == [[1, 0.5]] * 2


def _fits_the_line(returned) -> bool:
    return abs(returned["weight"] - 3) < 0.01 and abs(returned["bias"] - 1) < 0.01


def _counts_labels(label_counts) -> bool:
    counts = label_counts({"label": np.array([3, 0, 3])})["counts"]
    return np.array_equal(counts, [[1, 0, 0, 2, 0, 0, 0, 0, 0, 0]])


def _looks_up_once(lookup) -> bool:
    """Whether `__init__` makes the table, and `__call__` uses it for every batch."""
    made = []

    def make_table() -> np.ndarray:
        made.append(1)
        return np.arange(10) ** 2

    worker = lookup(make_table)
    results = [worker({"label": np.array([3, 0])})["square"] for _ in range(3)]
    return len(made) == 1 and all(list(found) == [9, 0] for found in results)


EXERCISES = {
    # 02-ddp-pytorch-ray/01_ray_core.ipynb
    "all at once": Exercise(
        _runs_all_at_once,
        "`.remote` returns at once, `ray.get` waits: which of them may stand in the loop?",
    ),
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
    "mean of ranks": Exercise(
        _is_mean_of_two_ranks,
        "all_reduce leaves the sum on every rank, in the tensor itself: what makes a mean "
        "of it, and what turns a tensor into a list?",
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
    "your train_fn": Exercise(
        _fits_the_line,
        "Both examples together give 3x + 1. Which of the three changes lets rank 0 learn "
        "from the example of rank 1, and are your numbers those of the trained model?",
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
        _counts_labels,
        "np.bincount(labels, minlength=10) counts; a leading axis makes it one row.",
    ),
    "made once": Exercise(
        _looks_up_once,
        "__init__ runs once per actor, and __call__ once per batch.",
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
