"""Checks of the exercises of part 01: data parallelism by hand, DDP, failures, cost."""

import faulthandler
import signal
from collections.abc import Callable
from typing import Any

from utils.checks.exercise import Exercise, cases, join, stands_still
from utils.launch import run_ranks


def _left_out(model) -> None:
    _average_over_ranks([p.grad for p in model.parameters()][:-1])


def _summed(model) -> None:
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def _right(model) -> None:
    _average_over_ranks([p.grad for p in model.parameters()])


def _rounded(model) -> None:
    for parameter in model.parameters():
        sent = parameter.grad.float()
        _average_over_ranks([sent])
        parameter.grad.copy_(sent)


def _average_over_ranks(tensors: list) -> None:
    import torch.distributed as dist

    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


# Versions of "average the gradients of `model`" for the exercise "find the bug".
SUSPECTS = {"A": _left_out, "B": _summed, "C": _rounded, "D": _right}
_FOUND = {"A": "one left out", "B": "sum", "C": "rounded", "D": "right"}


def _finds_the_bug(answer: Any) -> bool | str:
    if not isinstance(answer, dict) or answer.keys() != _FOUND.keys():
        return "Give a dictionary with a word for each of A, B, C and D."
    if unknown := set(answer.values()) - set(_FOUND.values()):
        return f"{sorted(map(str, unknown))} is none of the four words."
    for version in (v for v in _FOUND if answer[v] != _FOUND[v]):
        if _FOUND[version] == "rounded" and answer[version] == "right":
            return f"{version} passes in float32. What does it do in float64?"
        if _FOUND[version] == "one left out":
            return f"{version} is something else: look at each tensor, also the last."
        return f"{version} is something else."
    return True


def _splits(share: Callable) -> bool | str:
    """Return whether `share(batch, rank, n)` gives each image to one of n, evenly."""
    for n in (2, 3, 4):
        batch = [10 * i for i in range(12)]
        returned = [share(list(batch), rank, n) for rank in range(n)]
        if any(each is None for each in returned):
            return "It returns None: is a `return` missing?"
        if any(isinstance(each, int) for each in returned):
            return "It returns one image: a worker gets a list of them."
        shares = [[int(i) for i in each] for each in returned]
        if {i for each in shares for i in each} - set(batch):
            return (
                "It returns other numbers: give images of `batch`, not their positions."
            )
        if all(each == batch for each in shares):
            return "Every worker gets the whole batch: they would all do the same work."
        dealt = [i for each in shares for i in each]
        if missing := sorted(set(batch) - set(dealt)):
            return f"With {n} workers, nobody gets images {missing} of {batch}."
        if sorted(dealt) != batch:
            return f"With {n} workers, some images are dealt more than once: {shares}."
        if len(set(map(len, shares))) > 1:
            return f"With {n} workers, the shares have different lengths: {shares}."
    return True


def _mean_loss(f: Callable) -> bool | str:
    if f([2.0, 9.0], [1, 3]) == 2.5:  # 2 / 1 and 9 / 3
        return (
            "That is the mean of the ranks' means, in which a small share weighs more."
        )
    return cases((([6.0, 2.0], [3, 1]), 2.0), (([2.0, 9.0], [1, 3]), 2.75))(f)


def _blocks(share: Callable) -> bool | str:
    for n, items in ((1, 5), (2, 7), (3, 359), (4, 3)):
        blocks = [list(share(items, rank, n)) for rank in range(n)]
        lengths = [len(block) for block in blocks]
        dealt = [i for block in blocks for i in block]
        where = f"With {items} items on {n} ranks,"
        if len(dealt) < items:
            return f"{where} nobody gets {items - len(dealt)} of the items."
        if sorted(dealt) != list(range(items)):
            return f"{where} some items are dealt more than once, or do not exist."
        if dealt != list(range(items)):
            return f"{where} the blocks are not unbroken, or not in the order of ranks."
        if max(lengths) - min(lengths) > 1:
            return f"{where} the blocks have {lengths} items."
    return True


def _averages_at_once(average: Callable) -> bool | str:
    """Return whether `average(model)` averages all gradients with one all-reduce."""
    for n in (2, 3):
        found, calls = run_ranks(_average, n, average, timeout=60)[0]
        if found == "own":
            return "Each rank still holds its own gradients: put the averages back."
        if found == "sum":
            return "That leaves the sum of the gradients: you forgot the number of workers."
        if found != "mean":
            return f"On {n} ranks, the gradients afterwards are not the averages."
        if calls != 1:
            return f"The averages are right, but it took {calls} all-reduces, not one."
    return True


def _average(average: Callable) -> tuple[str, int]:
    """Return what `average` leaves in a rank's gradients, and its number of all-reduces."""
    import torch

    from utils.comms import count_comms

    rank, n = join()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    sizes = [p.numel() for p in model.parameters()]
    base = torch.arange(1.0, 1.0 + sum(sizes)).split(sizes)  # no number twice
    for p, numbers in zip(model.parameters(), base):
        p.grad = (rank + 1) * numbers.view_as(p).clone()
    with count_comms() as comms:
        average(model)
    # none of them is None: they were set above
    found = [p.grad.flatten() for p in model.parameters()]  # type: ignore[union-attr]
    got = torch.cat(found) / torch.cat(base)
    outcomes = {"mean": (n + 1) / 2, "sum": n * (n + 1) / 2, "own": rank + 1}
    same = [
        k for k, v in outcomes.items() if torch.allclose(got, torch.tensor(v * 1.0))
    ]
    return (same or ["else"])[0], comms.calls["allreduce"]


def _averaged_by_ddp(gradients: Callable) -> bool | str:
    """Return whether `gradients(model, x, y)` leaves the mean of all ranks, sent by DDP."""
    for n in (2, 3):
        for found, calls in run_ranks(_backward, n, gradients, timeout=60):
            if found == "own" and not calls:
                return (
                    "Nothing was all-reduced: each rank holds its own gradient. What was "
                    "called in the forward pass, the DDP model or the one inside?"
                )
            if found != "mean":
                return f"On {n} ranks, the gradients are not the averages."
            if calls != 1:
                return (
                    f"The averages are right, but it took {calls} all-reduces, not one."
                )
    return True


def _backward(gradients: Callable) -> tuple[str, int]:
    """Return what `gradients` leaves in a rank's .grad, and its number of all-reduces."""
    import torch
    from torch.nn import functional as F

    from utils.comms import count_comms

    rank, n = join()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    x, y = torch.randn(4 * n, 6), torch.randint(0, 4, (4 * n,))
    mine = slice(4 * rank, 4 * rank + 4)
    outcomes = {
        name: torch.autograd.grad(F.cross_entropy(model(x[i]), y[i]), model.weight)[0]
        for name, i in {"mean": slice(None), "own": mine}.items()
    }
    with count_comms() as comms:
        gradients(model, x[mine], y[mine])
    if (got := model.weight.grad) is None:  # nothing went backward
        return "nothing", comms.calls["allreduce"]
    same = [k for k, v in outcomes.items() if torch.allclose(got, v, atol=1e-6)]
    return (same or ["else"])[0], comms.calls["allreduce"]


def _accumulates_and_sends_once(backward_in_parts: Callable) -> bool | str:
    """Return whether `backward_in_parts(model, parts)` leaves the mean, sent only once."""
    found = run_ranks(_accumulate, 2, backward_in_parts, timeout=60)
    ratios, calls, held = zip(*found)
    if any(abs(ratio - 3) < 1e-4 for ratio in ratios):
        return "With 3 parts, the gradient is 3 times too long."
    if calls[0] == 0:
        return "Nothing was all-reduced: each rank is left with its own gradient."
    if any(abs(ratio - 1) > 1e-4 for ratio in ratios):
        return "The gradient is not that of the mean loss over all parts and ranks."
    if calls[0] > 1:
        return (
            f"The gradient is right, but it was all-reduced {calls[0]} times, not once."
        )
    if max(held) > 2:
        return (
            f"It takes {max(held)} images forward before it goes backward, and a part has "
            "2: that needs the memory which parts are there to save."
        )
    return True


def _accumulate(backward_in_parts: Callable) -> tuple[float, int, int]:
    """Return a rank's gradient in units of the right one (or -1), and its all-reduces.

    And the most images that were forward and not yet backward; each of 3 parts has 2.
    """
    import torch
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    from utils.comms import count_comms

    rank, _ = join()
    torch.manual_seed(0)
    x, y = torch.randn(12, 6), torch.randint(0, 4, (12,))
    plain = torch.nn.Linear(6, 4)
    right = torch.autograd.grad(F.cross_entropy(plain(x), y), plain.weight)[0]
    held = [0]  # images after each forward pass

    def hold(module, args, output):
        if output.requires_grad:
            held.append(held[-1] + len(output))
            output.register_hook(lambda gradient: held.append(0))

    plain.register_forward_hook(hold)
    model = DDP(plain)
    mine = list(zip(x[rank::2].chunk(3), y[rank::2].chunk(3)))
    with count_comms() as comms:
        backward_in_parts(model, mine)
    if (got := plain.weight.grad) is None:  # nothing went backward
        return -1.0, comms.calls["allreduce"], max(held)
    ratio = (got.norm() / right.norm()).item()
    along = torch.allclose(got, ratio * right, rtol=1e-4, atol=1e-6)
    return (ratio if along else -1.0), comms.calls["allreduce"], max(held)


def _two_efficiencies(efficiencies: Callable) -> bool | str:
    """Return whether it returns strong and weak scaling, in this order."""
    share, together, many, n = 0.1, 0.28, 0.125, 4  # seconds of a step, workers
    strong, weak = together / many / n, share / many
    got = [round(float(each), 6) for each in efficiencies(share, together, many, n)]
    if got == [round(weak, 6), round(strong, 6)]:
        return "Strong scaling comes first, then weak scaling."
    if got[0] == round(together / many, 6):
        return "That is the speed-up: divide it by the number of workers."
    if got[1:] == [round(weak / n, 6)]:
        return "In weak scaling the many workers do N times the work already."
    expected = (0.5, 1.0)  # one worker's step takes as long, whatever its images
    if tuple(efficiencies(0.1, 0.1, 0.1, 2)) != expected:
        return "If all three steps take 0.1 s, two workers reach 50% and 100%."
    return got == [round(strong, 6), round(weak, 6)]


def a_job_that_hangs() -> None:
    """Train on this rank until all ranks stand still; an exercise asks for the reason."""
    import torch
    import torch.distributed as dist

    def train_step():
        dist.all_reduce(torch.zeros(8))  # the gradients

    def save_checkpoint():
        dist.barrier()

    def train():
        for _ in range(3):
            train_step()
        if dist.get_rank() == 0:
            save_checkpoint()
        train_step()

    faulthandler.register(signal.SIGUSR1)
    dist.init_process_group("gloo")
    train()


def _reads_stacks(answer: Any) -> bool | str:
    name = str(answer).strip("()").lower()
    if name == "train_step":
        return (
            "All ranks call its all-reduce equally often, or would. Which of the two "
            "collectives is called by some ranks only?"
        )
    if name in ("train", "barrier", "all_reduce", "a_job_that_hangs"):
        return (
            f"Name the function that calls the collective, below `train`, not {name}."
        )
    return name == "save_checkpoint"


def _resumes_undisturbed(save: Callable) -> bool | str:
    """Return whether training goes on from what `save` returns, and ends the same."""
    import torch

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        # a schedule that counts its own steps; others go on from the optimizer's rate
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return model, optimizer, schedule

    def train(model, optimizer, scheduler):
        for step in range(2):
            optimizer.zero_grad()
            (model(torch.arange(4.0) + step) - 1).square().sum().backward()
            optimizer.step()
            scheduler.step()

    undisturbed, first, second = build(), build(), build()
    train(*undisturbed), train(*undisturbed), train(*first)
    state = save(*first)
    names = ("model", "optimizer", "scheduler")
    for name, part in zip(names, second):
        if name in state:
            part.load_state_dict(state[name])
    train(*second)
    if torch.equal(second[0].weight, undisturbed[0].weight):
        return True
    if "model" not in state:
        return "The weights are not in it, under the name 'model'."
    if "optimizer" not in state:
        return "The weights are there, but AdamW starts again with empty averages."
    if "scheduler" not in state:
        return "AdamW goes on, but the schedule of the learning rate starts again."
    return "Resumed, the run ends with different weights."


def _ends_on_all_ranks(mean_over_ranks: Callable) -> bool | str:
    """Return whether `mean_over_ranks(value)` ends everywhere: the mean on 0, else None."""
    for n in (2, 3):
        results = run_ranks(_call, n, mean_over_ranks, timeout=60)
        if "stands still" in results:
            rank = results.index("stands still")
            return f"Rank {rank} stands in a collective that not all ranks call."
        first, *others = results
        if first is None:
            return "Rank 0 returns nothing."
        if first == sum(range(1, n + 1)):
            return "Rank 0 returns the sum: you forgot the number of workers."
        if first != (n + 1) / 2:
            return f"On {n} ranks with values 1 to {n}, rank 0 returns {first}."
        if any(other is not None for other in others):
            return "Only rank 0 should return the mean, and the others None."
    return True


def _call(mean_over_ranks: Callable) -> Any:
    import torch

    rank, _ = join(seconds=5)
    try:
        result = mean_over_ranks(torch.tensor([rank + 1.0]))
    except RuntimeError as error:
        if stands_still(error):
            return "stands still"
        raise
    return result if result is None else float(result)


EXERCISES = {
    # 01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb
    "split a batch": Exercise(
        _splits,
        (
            "Like dealing cards: one for each worker, then the next round.",
            "A slice can take every second element: [start::step].",
        ),
    ),
    "bytes per step": Exercise(
        lambda answer: abs(answer - 2 * 7 / 8 * 4 * 11_175_370) < 1,
        (
            "Which fraction of the tensor does a rank send in each of the two phases?",
            "Each phase has N - 1 rounds, and in each round one chunk is sent.",
        ),
        mistakes={
            4 * 11_175_370: "That is the size of the gradients, not what a ring sends.",
            2 * 4 * 11_175_370: "That is the limit for many workers; here there are 8.",
            2 * 7 / 8 * 11_175_370: "You counted numbers: how many bytes has each?",
            7 / 8 * 4 * 11_175_370: "That is one of the two phases of the ring.",
            2 * 7 * 4 * 11_175_370: "A round sends one chunk, not the whole tensor.",
        },
    ),
    "find the bug": Exercise(
        _finds_the_bug,
        (
            "Count in float64 and in float32: no two versions give the same two numbers.",
            "What is twice as long is off in both types, in every tensor; what is rounded, "
            "in float64 alone.",
        ),
    ),
    "mean loss": Exercise(
        _mean_loss,
        (
            "One image should count as much as any other, whichever rank it is on.",
            "What would one process compute that had all the images?",
        ),
    ),
    "one all-reduce": Exercise(
        _averages_at_once,
        (
            "Which tensor holds all gradients? torch.cat makes one of many.",
            "Afterwards go through the parameters again, and take as many numbers for "
            "each as it has (numel).",
        ),
    ),
    # 01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb
    "global batch": Exercise(
        lambda answer: answer == 8 * 32,
        (
            "Whose images does the batch_size of a DataLoader count?",
            "Each worker has a DataLoader of its own, and all take the step together.",
        ),
        mistakes={
            32: "That is the batch of one worker: you forgot the number of workers.",
            4: "batch_size is not divided among the workers: each takes all of it.",
        },
    ),
    "averaged by DDP": Exercise(
        _averaged_by_ddp,
        (
            "DDP gets ready to send in its own forward pass.",
            "`wrapped.module` is the plain model: good to save, and no more than that.",
        ),
    ),
    "share": Exercise(
        _blocks,
        (
            "If block r ends where block r + 1 starts, none is left out or repeated.",
            "Find one formula for the start of block r: it is 0 for r = 0 and num_items "
            "for r = world_size.",
        ),
    ),
    # 01-ddp-pytorch-only/04_when_does_a_second_worker_pay.ipynb
    "two efficiencies": Exercise(
        _two_efficiencies,
        (
            "Strong scaling: how much faster are N workers with the same images in all, "
            "and how much of that is each worker's part?",
            "Weak scaling: the step of one worker with its own share, over the step of "
            "all together.",
        ),
    ),
    "where it pays": Exercise(
        lambda answer: answer == 40,
        (
            "Weak scaling: one worker's step over the step of two, at equally many images "
            "per worker.",
            "Both are a fixed part and a part for the images; two workers also average. "
            "Set the quotient to 0.8, and solve for the images.",
        ),
        mistakes={
            90: "That is strong scaling, which asks for more.",
            60: "That would be without what the step costs before the first image.",
        },
    ),
    "accumulation": Exercise(
        lambda answer: answer == 4096 // (8 * 64),
        (
            "How many images does one backward pass cover, over all GPUs together?",
            "The global batch is the workers, times the images of each, times the passes.",
        ),
        mistakes={
            4096 / 64: "You forgot that 8 GPUs do each pass together.",
            4096
            / 8: "That is the number of images for each GPU: how many passes is it?",
        },
    ),
    "traffic saved": Exercise(
        lambda answer: abs(answer - 7 / 8) < 0.006,
        (
            "In how many of the passes does DDP still send?",
            "no_sync covers all passes but the last one.",
        ),
        mistakes={
            1 / 8: "That is the fraction which is still sent.",
            87.5: "87.5 is a percentage: give the fraction.",
            1: "The last pass does send.",
        },
    ),
    "send once": Exercise(
        _accumulates_and_sends_once,
        (
            "The gradient of a mean over all parts is the mean of the parts' gradients.",
            "All passes but the last belong inside model.no_sync(), with their forward.",
        ),
    ),
    # 01-ddp-pytorch-only/03_failures_and_hangs.ipynb
    "work lost": Exercise(
        lambda answer: answer == 100 % 12,
        (
            "After how many minutes was the last checkpoint saved?",
            "What was done since then is gone, and nothing else.",
        ),
        mistakes={
            12: "A whole epoch would be the worst case: when was the last one saved?",
            96: "That much is in the checkpoint, and not lost.",
            100: "The checkpoint keeps all finished epochs.",
        },
    ),
    "reading stacks": Exercise(
        _reads_stacks,
        (
            "All ranks wait in a collective. Is it the same one?",
            "Which call stands behind an `if rank == 0:`, by what the stacks say?",
        ),
    ),
    "complete checkpoint": Exercise(
        _resumes_undisturbed,
        (
            "What else changes from step to step, besides the weights?",
            "Everything with a state_dict() that `step()` is called on has to be there.",
        ),
    ),
    "a run that ends": Exercise(
        _ends_on_all_ranks,
        (
            "A collective is called by all ranks, or by none.",
            "What may differ between the ranks is what they do with its result.",
        ),
    ),
}
