"""Checks of the exercises of part 02: Ray, Ray Train and Ray Data."""

from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from utils.checks.exercise import Exercise, cases, join, stands_still
from utils.launch import run_ranks

LABELS = (3, 3, 3, 3, 1)  # rows of each batch of a stream; the last is shorter
CORRECT = (0, 3, 1, 2, 1)  # how many of them a model gets right


class _Add:
    """Stand for a Ray task that adds: of (value, depth), it returns a deeper one."""

    @staticmethod
    def remote(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], max(a[1], b[1]) + 1


def _finds_the_other_folder(all_share) -> bool | str:
    """Return whether three ranks agree on whether one of them has a folder of its own."""
    import tempfile

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


def _runs_to_the_end(run: Callable) -> bool | str:
    """Return whether it submits anew after a failure alone, once the job has ended."""
    for ends, tries, jobs, succeeds in (
        (("SUCCEEDED",), 3, 1, True),
        (("FAILED", "SUCCEEDED"), 3, 2, True),
        (("FAILED", "FAILED", "SUCCEEDED"), 2, 2, False),
        (("STOPPED", "SUCCEEDED"), 3, 1, False),
    ):
        cluster = _Jobs(ends)
        case = f"If jobs end as {', '.join(ends)}, with {tries} tries"
        try:
            with mock.patch("time.sleep"):
                said = run(cluster.submit, cluster.status, tries)
        except TimeoutError as error:
            return f"{case}, {error}."
        if cluster.running:
            return f"{case}: job {cluster.running[0]} still runs, and is left alone."
        if (len(cluster.asked), said) != (jobs, succeeds):
            return f"{case}, it submits {len(cluster.asked)} and returns {said!r}."
    return True


class _Jobs:
    """Stand for a cluster: the first job ends as the first of `ends`, and so on."""

    def __init__(self, ends: tuple[str, ...]):
        self.ends = ends
        self.asked: list[int] = []  # how often, of each job
        self.running: list[int] = []  # jobs that nobody has seen end

    def submit(self) -> int:
        self.asked.append(0)
        self.running.append(len(self.asked) - 1)
        return len(self.asked) - 1

    def status(self, job: int) -> str:
        self.asked[job] += 1
        if self.asked[job] > 100:
            raise TimeoutError(f"it asks for job {job} a hundred times")
        if self.asked[job] <= 2:
            return ("PENDING", "RUNNING")[self.asked[job] - 1]
        self.running = [other for other in self.running if other != job]
        return self.ends[min(job, len(self.ends) - 1)]


def _runs_all_at_once(run_all) -> bool | str:
    """Return whether it submits every task before it waits for the first result."""
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
    """Return whether it adds all, in as few rounds as halving takes."""
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


def _counts_each_row_once(accuracy: Callable) -> bool | str:
    """Return whether ranks that see one stream return its accuracy, and share the rows."""
    right = sum(CORRECT) / sum(LABELS)
    for n in (2, 3):
        found = run_ranks(_accuracy_of_stream, n, accuracy, timeout=60)
        if "stands still" in found:
            return f"On {n} ranks, a rank stands in a collective that not all call."
        said, looked_at = zip(*found)
        if any(value is None for value in said):
            return "It has to return a number, on every rank."
        times = [
            sum(batch in seen for seen in looked_at) for batch in range(len(LABELS))
        ]
        if max(times) > 1:
            return f"On {n} ranks, {max(times)} of them look at the same batch."
        if min(times) < 1:
            return f"On {n} ranks, none of them looks at batch {times.index(0)}."
        if len({round(value, 6) for value in said}) > 1:
            return (
                f"The ranks return {[round(value, 2) for value in said]}: not the same."
            )
        if abs(said[0] - right) > 1e-6:
            return (
                f"On {n} ranks it returns {said[0]:.3f}, where {sum(CORRECT)} of "
                f"{sum(LABELS)} rows are right. Does each row count as much as any other?"
            )
    return True


class _Watched(dict):
    """A batch that notes when somebody looks into it."""

    looked_at = False

    def __getitem__(self, key):
        self.looked_at = True
        return super().__getitem__(key)


def _accuracy_of_stream(accuracy: Callable) -> tuple[float | None, list[int]] | str:
    """Return what it finds of the stream on a rank, and the batches that it looked at."""
    import torch

    join(seconds=5)
    batches = [
        _Watched(
            label=torch.zeros(rows, dtype=torch.long),
            digit=(torch.arange(rows) >= correct).long(),
        )
        for rows, correct in zip(LABELS, CORRECT)
    ]
    try:
        said = accuracy(iter(batches))
    except RuntimeError as error:
        if stands_still(error):
            return "stands still"
        raise
    looked_at = [number for number, batch in enumerate(batches) if batch.looked_at]
    return said if said is None else float(said), looked_at


def _goes_on_exactly(answer: tuple[Callable, Callable]) -> bool | str:
    """Return whether what `pack` saves lets `unpack` go on training bit for bit."""
    pack, unpack = answer
    same, weights, averages, rates, seen = run_ranks(
        _interrupted_and_undisturbed, 2, pack, unpack, timeout=60
    )[0]
    if same:
        return True
    if not weights:
        return "After the restart, the weights are not those that were saved."
    if not averages:
        return "After the restart, AdamW's averages are not those that were saved."
    for step, (without, after) in enumerate(zip(*rates), 1):
        if without != after:
            return (
                f"Step {step} after the restart has a learning rate of {after:g}; without "
                f"a restart it has {without:g}."
            )
    if seen[0] != seen[1]:
        return (
            f"Images {seen[0]} and following come next; after the restart, images "
            f"{seen[1]} and following."
        )
    return "Interrupted, the run ends with different weights."


def _interrupted_and_undisturbed(pack: Callable, unpack: Callable) -> tuple:
    """Train a rank for 3 steps, restart it and train 3 more; and for 6 steps.

    Returns whether they end with the same weights; whether weights and averages after the
    restart are those saved; the learning rates of both from there on; both positions.
    """
    import io

    import torch
    import torch.distributed as dist
    from torch.optim.lr_scheduler import StepLR

    def start():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, StepLR(optimizer, 2, gamma=0.5)

    def train(seen, model, optimizer, schedule):
        rates = []
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            torch.manual_seed(seen + dist.get_rank())  # each rank has its own images
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            optimizer.step()
            schedule.step()
            seen += 16 * dist.get_world_size()
        return rates

    def tensors(part):
        found = part.state_dict()
        return [*found.values()] if "state" not in found else [*_averages(found)]

    join()
    run = start()
    train(0, *run)
    seen = 3 * 16 * dist.get_world_size()
    file = io.BytesIO()
    torch.save(pack(*run, seen), file)
    file.seek(0)
    again = start()
    seen_again = unpack(torch.load(file, weights_only=True), *again)
    same = [_same(tensors(a), tensors(b)) for a, b in zip(run[:2], again[:2])]
    rates = train(seen, *run), train(seen_again or 0, *again)
    ends = _same(tensors(run[0]), tensors(again[0]))
    return ends, *same, rates, (seen, seen_again)


def _averages(state: dict) -> Iterator:
    for of_parameter in state["state"].values():
        yield from of_parameter.values()


def _same(ours: list, theirs: list) -> bool:
    import torch

    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _shares_what_is_left(share: Callable) -> bool | str:
    """Return whether any number of ranks divides what is left, whoever began the epoch."""
    positions = ((0, 12), (5, 12), (31, 12), (8, 9))  # images seen, images of an epoch
    for n in (2, 3):
        for (seen, images), shares in zip(
            positions, zip(*run_ranks(_shares_at, n, share, positions, timeout=60))
        ):
            if problem := _problem(shares, [*range(seen % images, images)]):
                return f"{n} ranks, {seen} images seen, {images} per epoch: {problem}"
    return True


def _problem(shares: tuple[list[int], ...], left: list[int]) -> str | None:
    """Return what is wrong with the shares of all ranks, if anything is."""
    dealt = [image for each in shares for image in each]
    if strange := sorted(set(dealt) - set(left)):
        return f"image {strange[0]} is not left in this epoch."
    if len(set(dealt)) < len(dealt):
        return f"some images are trained twice: {list(shares)}."
    if len(set(map(len, shares))) > 1:
        return (
            f"the ranks get {[len(each) for each in shares]} images, and not "
            "equally many. In the last step, some would wait for the others."
        )
    if (out := len(left) - len(dealt)) >= len(shares):
        return f"{out} images are left out, enough for one more on each rank."
    return None


def _shares_at(share: Callable, positions: tuple) -> list[list[int]]:
    join()
    return [[int(image) for image in share(*position)] for position in positions]


def _stops_together(anyone: Callable) -> bool | str:
    """Return whether three ranks end after the same step, if one wants to, or none."""
    asked = [[False] * 4, [False, False, True, False], [True, False, False, False]]
    none_asks = run_ranks(_steps_until, 3, anyone, [[False] * 4] * 3, timeout=60)
    if none_asks != [4, 4, 4]:
        return f"If no rank asks, they end after steps {none_asks} and not 4."
    one_asks = run_ranks(_steps_until, 3, anyone, asked, timeout=60)
    if "stands still" in one_asks:
        return "Rank 2 asks in its first step and ends, and another waits for it."
    return (
        one_asks == [1, 1, 1]
        or f"Rank 2 asks in its first step; they end after {one_asks}."
    )


def _steps_until(anyone: Callable, asked: list[list[bool]]) -> int | str:
    """Return a rank's steps of a training that ends once `anyone(flag)` says so."""
    import torch
    import torch.distributed as dist

    join(seconds=5)
    steps = 0
    try:
        for flag in asked[dist.get_rank()]:
            dist.all_reduce(torch.zeros(1))  # a step, in which all ranks take part
            steps += 1
            if anyone(flag):
                break
    except RuntimeError as error:
        if stands_still(error):
            return "stands still"
        raise
    return steps


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
        _counts_each_row_once,
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
        _shares_what_is_left,
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
        _stops_together,
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
        _finds_the_other_folder,
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
