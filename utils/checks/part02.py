"""Checks of the exercises of part 02: Ray, Ray Train and Ray Data."""

from unittest import mock

import numpy as np

from utils.checks import ranks02
from utils.checks.exercise import Exercise, cases
from utils.checks.ranks import join


class _Add:
    """Stands for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


def _finds_the_other_folder(all_share) -> bool | str:
    """Whether three ranks agree on whether one of them has a folder of its own."""
    import tempfile

    from utils.launch import run_ranks

    for odd in (None, 0, 1, 2):
        with (
            tempfile.TemporaryDirectory() as shared,
            tempfile.TemporaryDirectory() as own,
        ):
            folders = [own if rank == odd else shared for rank in range(3)]
            said = run_ranks(_shares, 3, all_share, folders, timeout=60)
        if [bool(answer) for answer in said] != [odd is None] * 3:
            which = (
                "a folder that all share" if odd is None else f"rank {odd} elsewhere"
            )
            return f"With {which}, the three ranks say {said}."
    return True


def _shares(all_share, folders: list[str]) -> bool:
    from pathlib import Path

    import torch.distributed as dist

    join()
    said = all_share(Path(folders[dist.get_rank()]))
    dist.destroy_process_group()
    return said


def _runs_all_at_once(run_all) -> bool | str:
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
    if done[:2] == ["submit", "get"]:
        return "It waits for the first result before it submits the second task."
    if results == [1, 2, 3]:
        return "It returns references: what turns them into results?"
    return results == [1, 4, 9] and done[:3] == ["submit"] * 3


def _adds_in_rounds(tree_sum) -> bool | str:
    """Whether it adds all, in as few rounds as halving takes."""
    for count, rounds in ((1, 0), (2, 1), (5, 3), (8, 3)):
        total, depth = tree_sum(_Add, [(n, 0) for n in range(count)])
        if total != sum(range(count)):
            return f"Of {count} references, it adds 0 to {count - 1} up to {total}."
        if depth != rounds:
            return f"Of {count} references, it takes {depth} rounds and not {rounds}."
    return True


def _is_mean_of_two_ranks(returned) -> bool | str:
    found = [list(map(float, of_rank)) for of_rank in returned]
    if found == [[2, 1]] * 2:
        return "That is the sum over both ranks."
    if found == [[1, 0], [1, 1]]:
        return "Each rank returns its own tensor: nothing has been sent."
    return found == [[1, 0.5]] * 2


def _fits_the_line(returned) -> bool | str:
    if returned is None:
        return "The result has no return_value: does your function return something?"
    weight, bias = returned["weight"], returned["bias"]
    if abs(weight - 3) < 0.01 and abs(bias - 1) < 0.01:
        return True
    if abs(bias - 1) < 0.01:
        return "That fits the example of rank 0 alone: the ranks do not train together."
    if abs(weight + bias - 4) < 0.01:
        return (
            "That fits the example of rank 1 alone. Which of them should rank 0 have?"
        )
    return f"At x = 0 that line is at {bias:.2f}, and at x = 1 at {weight + bias:.2f}."


def _counts_labels(label_counts) -> bool | str:
    counts = label_counts({"label": np.array([3, 0, 3])})["counts"]
    if np.shape(counts) != (1, 10):
        return f"The shape of counts is {list(np.shape(counts))} and not [1, 10]."
    return np.array_equal(counts, [[1, 0, 0, 2, 0, 0, 0, 0, 0, 0]])


def _looks_up_once(lookup) -> bool | str:
    """Whether `__init__` makes the table, and `__call__` uses it for every batch."""
    made = []

    def make_table() -> np.ndarray:
        made.append(1)
        return np.arange(10) ** 2

    worker = lookup(make_table)
    results = [worker({"label": np.array([3, 0])})["square"] for _ in range(3)]
    if len(made) > 1:
        return f"For 3 batches, the table is made {len(made)} times."
    return all(list(found) == [9, 0] for found in results)


EXERCISES = {
    # 02-ddp-pytorch-ray/01_ray_core.ipynb
    "all at once": Exercise(
        _runs_all_at_once,
        (
            "`.remote` returns at once, `ray.get` waits: which of them may stand in the "
            "loop?",
            "First a list of references, one for each input; then one `ray.get` of it.",
        ),
    ),
    "seconds for 20 tasks": Exercise(
        lambda answer: answer == 5,
        (
            "How many tasks with 2 CPUs run at once?",
            "And how many rounds of so many tasks does it take for 20?",
        ),
        {
            2.5: "That would be 8 tasks at once: each of them takes 2 CPUs.",
            20: "That is one task after the other.",
            10: "That would be 2 tasks at once: how many times do 2 CPUs go into 8?",
        },
    ),
    "count after restart": Exercise(
        lambda answer: answer == 2,
        (
            "Where was the 5: in the actor's process, or somewhere that outlives it?",
            "A restarted actor runs __init__ again, and then the call.",
        ),
        {7: "The 5 was in the memory of the process that died."},
    ),
    "tree sum": Exercise(
        _adds_in_rounds,
        (
            "In each round add neighbours, two by two, until one reference is left.",
            "Of an odd number, the last one waits for the next round.",
        ),
    ),
    "mean of ranks": Exercise(
        _is_mean_of_two_ranks,
        (
            "all_reduce leaves the sum on every rank, in the tensor itself: what makes a "
            "mean of it?",
            "A tensor has a method that makes a list of it.",
        ),
    ),
    # 02-ddp-pytorch-ray/02_ray_train_ddp.ipynb
    "workers that fit": Exercise(
        lambda answer: answer == 4,
        (
            "One worker has to fit one node.",
            "How many workers of 2 GPUs fit the first node, how many the second?",
        ),
        {8: "You forgot that each worker asks for two.", 2: "That is one node."},
    ),
    "epochs after failure": Exercise(
        lambda answer: answer == 3,
        (
            "The last checkpoint is that of the last finished epoch: which one is it?",
            "Of ten epochs, seven are in that checkpoint.",
        ),
        {
            10: "They go on from the last checkpoint, not from the start.",
            2: "The eighth epoch was not finished: it is trained again.",
            7: "That is how many are in the checkpoint.",
        },
    ),
    "your train_fn": Exercise(
        _fits_the_line,
        (
            "Both examples together give 3x + 1. Which of the three changes lets rank 0 "
            "learn from the example of rank 1?",
            "Are your numbers those of the trained model, inside what prepare_model wraps?",
        ),
    ),
    # 02-ddp-pytorch-ray/03_ray_data_streaming.ipynb
    "steps per worker": Exercise(
        lambda answer: answer == 1003 // 4 // 16,
        (
            "How many rows does each worker get, if all get equally many?",
            "And how many whole batches of 16 are in these?",
        ),
        {
            16: "The last batch is not whole, and drop_last drops it.",
            62: "You forgot that 4 workers share the rows.",
            250: "Those are the rows of each worker.",
        },
    ),
    "each row once": Exercise(
        ranks02.counts_each_row_once,
        (
            "`enumerate` numbers the batches: which numbers are those of this rank?",
            "Not all ranks have the same number of batches, nor all batches the same "
            "number of rows: what can be summed over the ranks, once, at the end?",
        ),
    ),
    "label counts": Exercise(
        _counts_labels,
        (
            "np.bincount counts. How many numbers does it return for labels 0 to 3?",
            "It takes the least number of counts, too. And what adds an axis of length 1?",
        ),
    ),
    "made once": Exercise(
        _looks_up_once,
        (
            "__init__ runs once per actor, and __call__ once per batch.",
            "NumPy looks up all labels at once, if one array is the index of another.",
        ),
    ),
    # 02-ddp-pytorch-ray/04_fault_tolerance.ipynb
    "steps trained twice": Exercise(
        lambda answer: answer == 16,
        (
            "After which steps of the epoch has it saved before step 75?",
            "From which step does the last checkpoint go on? Count from there to step 75.",
        ),
        {
            15: "Step 75 had begun, and is trained again too.",
            76: "It saved within the epoch, too.",
            46: "There was a later save than that after step 29.",
        },
    ),
    "seconds between saves": Exercise(
        lambda answer: abs(answer - (2 * 2 * 36_000) ** 0.5) < 1,
        (
            "Both times have to be in one unit.",
            "How many seconds are 10 hours? And what stands under the root?",
        ),
        {
            (2 * 2 * 10) ** 0.5: "10 is in hours, 2 in seconds.",
            (2 * 2 * 600) ** 0.5: "10 hours are 600 minutes: how many seconds?",
            (2 * 36_000) ** 0.5: "The formula has a 2 besides the 2 seconds.",
        },
    ),
    "whole checkpoint": Exercise(
        ranks02.goes_on_exactly,
        (
            "Which objects, and which number, change from step to step?",
            "Whatever has a state_dict has something to save. And what must unpack return?",
        ),
    ),
    # 02-ddp-pytorch-ray/05_elastic_training.ipynb
    "share what is left": Exercise(
        ranks02.shares_what_is_left,
        (
            "How many images of this epoch are done? And which are left?",
            "Deal them out like cards, and end when there is not one more for each rank.",
        ),
    ),
    "seconds to spare": Exercise(
        lambda answer: answer == 30 - 5 - 4 - 15,
        (
            "At worst, when is the notice heard: right before Ray asks, or right after?",
            "The notice may come right after Ray asked, and be heard right after a step "
            "began.",
        ),
        {
            11: "The notice may come right after Ray asked.",
            10: "A step may have just begun when the notice is heard.",
            15: "What has to happen between the notice and the saving?",
        },
    ),
    "stop together": Exercise(
        ranks02.stops_together,
        (
            "Every rank needs the flags of all ranks, before any of them decides.",
            "Which collective, and which operation, brings a 1 to all ranks if one has it?",
        ),
    ),
    # 02-ddp-pytorch-ray/06_more_than_one_machine.ipynb
    "workers on nodes": Exercise(
        lambda answer: answer == 6,
        ("One worker has to fit one node.", "How many fit a single node of 8 CPUs?"),
        {
            8: "24 CPUs are enough for 8, but a worker cannot stand on two nodes.",
            2: "That is one node.",
        },
    ),
    "runtime env": Exercise(
        cases(
            (
                ("/code", "/shared"),
                {"working_dir": "/code", "env_vars": {"WORKSHOP_STORAGE": "/shared"}},
            )
        ),
        (
            "`shipped`, in the section on code, has both keys.",
            "working_dir is a folder, and env_vars a dictionary.",
        ),
    ),
    "all share": Exercise(
        _finds_the_other_folder,
        (
            "One rank writes a file; the others can look for it once it is there.",
            "Every rank needs the answers of all ranks before it returns: which "
            "collective, and which operation, brings False to all if one has it?",
        ),
    ),
}
