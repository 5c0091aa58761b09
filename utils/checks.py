"""Checks of the exercises: a wrong answer gets a hint, not a traceback."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Exercise:
    """is_right: tells whether an answer is right. hint: what to think of next."""

    is_right: Callable[[Any], bool]
    hint: str


class _Add:
    """Stands for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


_COUNTS_303 = np.array([[1, 0, 0, 2, 0, 0, 0, 0, 0, 0]])

# One entry per exercise, named after its notebook; the solutions are in solutions.ipynb.
EXERCISES: dict[str, Exercise] = {
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
    # 03-fsdp-deepspeed/01_where_memory_goes.ipynb
    "state of 70B": Exercise(
        lambda answer: abs(answer - 4.375) < 0.05,
        "16 bytes per parameter, and at stage 3 all of them are divided by 256.",
    ),
    "floor of stage 1": Exercise(
        lambda answer: abs(answer - 280) < 1,
        "Parameters and gradients stay whole, and take 2 bytes each.",
    ),
    "sgd": Exercise(
        lambda f: all(
            abs(
                f(stage, n) - sum(4 / n if stage >= first else 4 for first in (1, 2, 3))
            )
            < 1e-9
            for stage in range(4)
            for n in (1, 2, 8)
        ),
        "Three times 4 bytes; the stage says which of them are divided by world_size.",
    ),
    # 03-fsdp-deepspeed/02_fsdp2.ipynb
    "all-gathers": Exercise(
        lambda answer: answer == 2 * (32 + 1),
        "Each group is gathered for forward and again for backward; the model is one.",
    ),
    "bytes of FSDP2": Exercise(
        lambda answer: abs(answer - 2 * 7 / 8 * 4e9) < 1e6,
        "One all-gather and one reduce-scatter, each (N - 1) / N of 4e9 bytes.",
    ),
    "rows per rank": Exercise(
        lambda f: all(
            list(f(rows, n))
            == [max(0, min(-(-rows // n), rows - r * -(-rows // n))) for r in range(n)]
            for rows, n in ((8, 2), (10, 4), (256, 3), (3, 4))
        ),
        "A piece has ceil(rows / world_size) rows; the last ranks get what is left.",
    ),
    # 03-fsdp-deepspeed/03_deepspeed_zero.ipynb
    "DeepSpeed batch": Exercise(
        lambda answer: answer == 4 * 8 * 16,
        "Texts per pass, times passes per step, times GPUs.",
    ),
    "lowest stage": Exercise(
        lambda answer: answer == 1,
        "Work out 2 + 2 + 12 bytes with the last part, or more, divided by 4.",
    ),
    "stage 2 config": Exercise(
        lambda f: (
            f({"zero_optimization": {"stage": 3, "reduce_bucket_size": 9}, "a": 1})
            == {
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 9},
                "a": 1,
                "gradient_clipping": 0.5,
            }
        ),
        "Change zero_optimization.stage and gradient_clipping, and keep all the rest.",
    ),
    # 03-fsdp-deepspeed/04_choosing_a_strategy.ipynb
    "which row": Exercise(
        lambda answer: answer in ("fsdp2", "zero3"),
        "Call choose(13e9, 16, 40). At stage 2, what do 2 bytes per parameter take?",
    ),
    "traffic ratio": Exercise(
        lambda answer: abs(answer - 1.5) < 1e-6,
        "Count trips over the network: the number of GPUs is in both, and cancels.",
    ),
    "smallest": Exercise(
        lambda f: (
            [f(7e9, 80e9), f(7e9, 56e9), f(7e9, 8e9), f(1e9, 16e9)] == [2, 2, 16, 1]
        ),
        "16 * parameters / gpus has to be at most the budget: try 1, 2, 4, ...",
    ),
}


def check(name: str, answer: Any) -> None:
    """Print whether `answer` solves the exercise `name`, with a hint where it does not.

    Raises:
        ValueError: there is no exercise of that name.
    """
    if name not in EXERCISES:
        raise ValueError(f"No exercise {name!r}: choose from {', '.join(EXERCISES)}.")
    exercise = EXERCISES[name]
    if answer is ... or _does_nothing(answer):
        print(f"Exercise {name}: replace the three dots by your answer.")
        return
    try:
        right = bool(exercise.is_right(answer))
    except Exception as error:  # a wrong answer may be of any type, or raise anything
        print(f"Not yet ({type(error).__name__}: {error}). {exercise.hint}")
        return
    print("Right!" if right else f"Not yet. {exercise.hint}")


def _does_nothing(answer: Any) -> bool:
    """Whether it is a function whose body is still `...`, which does what `None` does."""
    code, empty = getattr(answer, "__code__", None), (lambda: None).__code__
    return code is not None and (code.co_code, code.co_consts) == (
        empty.co_code,
        empty.co_consts,
    )
