"""Checks of the exercises of part 02: Ray, Ray Train and Ray Data."""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from utils.checks.exercise import Exercise, by_ranks, cases, unfair
from utils.checks.part01 import start, train

LABELS = (3, 3, 3, 3, 1)  # rows of each batch of a stream; the last is shorter
CORRECT = (0, 3, 1, 2, 1)  # how many of them a model gets right
POSITIONS = ((0, 12), (5, 12), (31, 12), (8, 9))  # images seen, images of an epoch
STEPS = 4


class _Add:
    """Stand for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


def _adds_in_rounds(tree_sum) -> bool | str:
    """Return whether it adds all, in as few rounds as halving takes."""
    for count, rounds in ((1, 0), (2, 1), (5, 3), (8, 3)):
        total, depth = tree_sum(_Add, [(n, 0) for n in range(count)])
        if total != sum(range(count)):
            return f"Of {count} references, it adds 0 to {count - 1} up to {total}."
        if depth != rounds:
            return f"Of {count} references, it takes {depth} rounds and not {rounds}."
    return True


def _runs_all_at_once(run_all) -> bool | str:
    """Return whether it submits every task before it waits for the first result."""
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

    with mock.patch("ray.get", get):
        results = run_all(Task, [1, 2, 3])
    if done[:2] == ["submit", "get"]:
        return "It waits for the first result before it submits the second task."
    if results == [1, 2, 3]:
        return "It returns references: what turns them into results?"
    return results == [1, 4, 9] and done[:3] == ["submit"] * 3


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
    """Return whether `__init__` makes the table, and `__call__` uses it for each batch."""
    made = []

    def make_table() -> np.ndarray:
        made.append(1)
        return np.arange(10) ** 2

    worker = lookup(make_table)
    results = [worker({"label": np.array([3, 0])})["square"] for _ in range(3)]
    if len(made) > 1:
        return f"For 3 batches, the table is made {len(made)} times."
    return all(list(found) == [9, 0] for found in results)


class _Watched(dict):
    """A batch that records whether somebody looks into it."""

    looked_at = False

    def __getitem__(self, key):
        self.looked_at = True
        return super().__getitem__(key)


def _accuracy_of_stream(accuracy: Callable) -> tuple[float | None, list[bool]]:
    """Return what it finds of the stream on a rank, and which batches it looked at."""
    batches = [
        _Watched(
            label=torch.zeros(rows, dtype=torch.long),
            digit=(torch.arange(rows) >= correct).long(),
        )
        for rows, correct in zip(LABELS, CORRECT)
    ]
    result = accuracy(iter(batches))
    looked_at = [batch.looked_at for batch in batches]
    return result if result is None else float(result), looked_at


def _counts_each_row_once(found: list) -> bool | str:
    """Return whether ranks that see one stream return its accuracy, and share the rows."""
    n, (results, looked_at) = len(found), zip(*found)
    if None in results:
        return "It has to return a number, on every rank."
    times = [sum(of_ranks) for of_ranks in zip(*looked_at)]
    if max(times) > 1:
        return f"On {n} ranks, {max(times)} of them look at the same batch."
    if min(times) < 1:
        return f"On {n} ranks, none of them looks at batch {times.index(0)}."
    if len({round(value, 6) for value in results}) > 1:
        return (
            f"The ranks return {[round(value, 2) for value in results]}: not the same."
        )
    if abs(results[0] - sum(CORRECT) / sum(LABELS)) > 1e-6:
        return (
            f"On {n} ranks it returns {results[0]:.3f}, where {sum(CORRECT)} of "
            f"{sum(LABELS)} rows are right. Does each row count as much as any other?"
        )
    return True


def _goes_on_exactly(answer: tuple[Callable, Callable]) -> bool | str:
    """Return whether what `pack` saves lets `unpack` go on training bit for bit."""
    pack, unpack = answer
    with torch.random.fork_rng():
        undisturbed, resumed = start(), start()
        train(0, *undisturbed)
        file = io.BytesIO()
        torch.save(pack(*undisturbed, 48), file)
        file.seek(0)
        seen = unpack(torch.load(file, weights_only=True), *resumed)
        weights = torch.equal(undisturbed[0].weight, resumed[0].weight)
        averages = [_averages(optimizer) for _, optimizer, _ in (undisturbed, resumed)]
        rates = zip(train(48, *undisturbed), train(seen or 0, *resumed))
    if torch.equal(undisturbed[0].weight, resumed[0].weight):
        return True
    if not weights:
        return "After the restart, the weights are not those that were saved."
    if averages[0] != averages[1]:
        return "After the restart, AdamW's averages are not those that were saved."
    for step, (without, after) in enumerate(rates, 1):
        if without != after:
            return (
                f"Step {step} after the restart has a learning rate of {after:g}; without "
                f"a restart it has {without:g}."
            )
    if seen != 48:
        return (
            f"Images 48 and following come next; after the restart, images {seen} and "
            "following."
        )
    return "Interrupted, the run ends with different weights."


def _averages(optimizer) -> list:
    states = optimizer.state_dict()["state"].values()
    return [tensor.tolist() for state in states for tensor in state.values()]


def _shares_at_positions(my_share: Callable) -> list[list[int]]:
    return [[int(image) for image in my_share(*position)] for position in POSITIONS]


def _shares_what_is_left(found: list) -> bool | str:
    """Return whether the ranks divide what is left, whoever began the epoch."""
    n = len(found)
    for (seen, images), shares in zip(POSITIONS, zip(*found)):
        left = [*range(seen % images, images)]
        if problem := unfair(shares, left, left_out=n - 1):
            return f"{n} ranks, {seen} images seen, {images} per epoch: {problem}"
    return True


def _steps_until_the_end(anyone: Callable) -> list[int]:
    """Return a rank's steps if no rank wants to end, and if rank 2 does after the first."""
    taken = []
    for who_asks in (None, 2):
        for step in range(1, STEPS + 1):
            dist.all_reduce(torch.zeros(1))  # a step, in which all ranks take part
            if anyone(dist.get_rank() == who_asks and step == 1):
                break
        taken.append(step)
    return taken


def _stops_together(found: list) -> bool | str:
    """Return whether all ranks end after the same step, if one wants to, or none."""
    none_asks, one_asks = map(list, zip(*found))
    if none_asks != [STEPS] * len(found):
        return f"If no rank asks, they end after steps {none_asks} and not {STEPS}."
    if one_asks != [1] * len(found):
        return f"Rank 2 asks in its first step; they end after {one_asks}."
    return True


def _share_a_folder(all_share: Callable) -> list[bool]:
    """Return what it says of a folder for all, and if rank 0, 1 or 2 has another one."""
    temporary = tempfile.TemporaryDirectory
    with temporary() as of_rank, temporary() as own:
        names = [of_rank]
        dist.broadcast_object_list(names)  # from rank 0
        answers = [
            bool(all_share(Path(own if dist.get_rank() == other else names[0])))
            for other in (None, 0, 1, 2)
        ]
        dist.barrier()  # the folders stay until all ranks have looked
        return answers


def _finds_the_other_folder(found: list) -> bool | str:
    for other, answers in zip((None, 0, 1, 2), zip(*found)):
        if answers != (other is None,) * 3:
            where = "a folder for all"
            if other is not None:
                where = f"a folder of its own for rank {other}"
            return f"With {where}, the three ranks say {list(answers)}."
    return True


def _runs_to_the_end(run: Callable) -> bool | str:
    """Return whether it submits anew after a failure alone, once the job has ended."""
    for ends, tries, submitted, succeeds in (
        (["SUCCEEDED"], 3, 1, True),
        (["FAILED", "SUCCEEDED"], 3, 2, True),
        (["FAILED", "FAILED", "SUCCEEDED"], 2, 2, False),
        (["STOPPED", "SUCCEEDED"], 3, 1, False),
    ):
        case = f"If jobs end as {', '.join(ends)}, with {tries} tries"
        try:
            asked, result = _submit_jobs(run, ends, tries)
        except TimeoutError as error:
            return f"{case}, {error}."
        if any(times < 3 for times in asked):
            return f"{case}, a job still runs, and is left alone."
        if (len(asked), result) != (submitted, succeeds):
            return f"{case}, it submits {len(asked)} and returns {result!r}."
    return True


def _submit_jobs(run: Callable, ends: list[str], tries: int) -> tuple[list, object]:
    """Return how often it asks for the state of each job, and what it returns.

    Raises:
        TimeoutError: it asks without end for the state of one job.
    """
    asked: list[int] = []

    def submit() -> int:
        asked.append(0)
        return len(asked) - 1

    def status(job: int) -> str:
        asked[job] += 1
        if asked[job] > 100:
            raise TimeoutError(f"it asks for job {job} a hundred times")
        end = ends[min(job, len(ends) - 1)]
        return ("PENDING", "RUNNING", end)[min(asked[job], 3) - 1]

    with mock.patch("time.sleep"):
        return asked, run(submit, status, tries)


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
            "How many workers of 2 GPUs fit one node, and how many such nodes are there?",
        ),
        {
            6: "That adds up the GPUs of different nodes: may a worker have one on each?",
            12: "You forgot that each worker asks for two.",
            1: "That is one node.",
        },
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
        by_ranks(_accuracy_of_stream, _counts_each_row_once, 2, 3, seconds=5),
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
        _goes_on_exactly,
        (
            "Which objects, and which number, change from step to step?",
            "Whatever has a state_dict has something to save. And what must unpack return?",
        ),
    ),
    # 02-ddp-pytorch-ray/05_elastic_training.ipynb
    "share what is left": Exercise(
        by_ranks(_shares_at_positions, _shares_what_is_left, 2, 3),
        (
            "How many images of this epoch are done? And which are left?",
            "Deal them out like cards, and end when there is not one more for each rank.",
        ),
    ),
    "seconds to spare": Exercise(
        lambda answer: answer == 30 - 5 - 4 * 2 - 15,
        (
            "At worst, when is the notice heard: right before Ray asks, or right after?",
            "The notice may come right after Ray asked, and reach Ray right after the "
            "training asked.",
        ),
        {
            7: "The notice may come right after Ray asked.",
            10: "The training may have just asked when the notice is heard.",
            8: "A single step may pass? It asks after every fourth one only.",
            15: "What has to happen between the notice and the saving?",
        },
    ),
    "stop together": Exercise(
        by_ranks(
            _steps_until_the_end,
            _stops_together,
            3,
            seconds=5,
            hangs="Rank 2 asks in its first step and ends, and another waits for it.",
        ),
        (
            "Every rank needs the flags of all ranks, before any of them decides.",
            "Which collective, and which operation, brings a 1 to all ranks if one has it?",
        ),
    ),
    # 02-ddp-pytorch-ray/06_more_than_one_machine.ipynb
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
        by_ranks(_share_a_folder, _finds_the_other_folder, 3),
        (
            "One rank writes a file; the others can look for it once it is there.",
            "Every rank needs the answers of all ranks before it returns: which "
            "collective, and which operation, brings False to all if one has it?",
        ),
    ),
    # 02-ddp-pytorch-ray/07_run_on_a_cluster.ipynb
    "drivers at once": Exercise(
        lambda answer: answer == 3 * 8 - 2,
        (
            "If all drivers start first, how many CPUs do they leave?",
            "How many CPUs have to be left, so that the workers of one run start?",
        ),
        {
            8: "That many train side by side. More may be submitted: the others wait.",
            24: "Then each CPU has a driver, and no worker ever starts.",
            23: "Then one CPU is left, and a run has two workers.",
            12: "You forgot the drivers.",
        },
    ),
    "run to the end": Exercise(
        _runs_to_the_end,
        (
            "Which of the five states are the end of a job? Ask until it is in one.",
            "After which single end is there a next job?",
        ),
    ),
}
