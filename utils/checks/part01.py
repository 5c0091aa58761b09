"""Checks of the exercises of part 01: data parallelism by hand, DDP, failures, cost."""

import copy
import faulthandler
import signal
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from utils.checks.exercise import Exercise, by_ranks, cases, same_as, unfair, words
from utils.comms import count_comms


def _left_out(model) -> None:
    _average_over_ranks([p.grad for p in model.parameters()][:-1])


def _summed(model) -> None:
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
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


# Versions of "average the gradients of `model`" for the exercise "find the bug".
SUSPECTS = {"A": _left_out, "B": _summed, "C": _rounded, "D": _right}


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
        if all(each == batch for each in shares):
            return "Every worker gets the whole batch: they would all do the same work."
        if {i for each in shares for i in each} - set(batch):
            return "Give images of `batch`, not their positions."
        if problem := unfair(shares, batch):
            return f"With the images {batch} and {n} workers, {problem}"
    return True


def _blocks(share: Callable) -> bool | str:
    for n, items in ((1, 5), (2, 7), (3, 359), (4, 3)):
        blocks = [list(share(items, rank, n)) for rank in range(n)]
        problem = unfair(blocks, [*range(items)], uneven=1)
        if not problem and [i for block in blocks for i in block] != [*range(items)]:
            problem = "the blocks are not unbroken, or not in the order of ranks."
        if problem:
            return f"With {items} items on {n} ranks, {problem}"
    return True


def _gradient_left_by(use: Callable, answer: Callable) -> tuple[str, int, int]:
    """Return which gradient an answer leaves in a model on this rank, and what it took.

    Args:
        use: gets the answer, a model without gradients, and six images and labels.

    Returns:
        A word for the gradient; the number of all-reduces; the largest number of images
        that were forward and not yet backward.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    x, y = torch.randn(6 * n, 6), torch.randint(0, 4, (6 * n,))
    mine = slice(6 * rank, 6 * rank + 6)

    def gradient(images: slice) -> torch.Tensor:
        loss = F.cross_entropy(model(x[images]), y[images])
        each = torch.autograd.grad(loss, [*model.parameters()])
        return torch.cat([tensor.flatten() for tensor in each])

    mean = gradient(slice(None))
    known = {"mean": mean, "own": gradient(mine), "sum": n * mean, "3 times": 3 * mean}
    waiting = [0]  # images, after each forward pass

    def count(module, args, output):
        if output.requires_grad:
            waiting.append(waiting[-1] + len(output))
            output.register_hook(lambda gradient: waiting.append(0))

    model.register_forward_hook(count)
    with count_comms() as comms:
        use(answer, model, x[mine], y[mine])
    left = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    got = torch.cat([*left, torch.empty(0)])
    found = [
        word
        for word, tensor in known.items()
        if len(got) == len(tensor) and torch.allclose(got, tensor, rtol=1e-4, atol=1e-6)
    ]
    return (found or ["another"])[0], comms.calls["allreduce"], max(waiting)


def _sent_once(named: Mapping[str, str], at_once: int = 6) -> Callable:
    """Return a judge of gradients on all ranks: their mean, sent once.

    Args:
        named: what to say of other gradients.
        at_once: how many images may be forward and not yet backward.
    """

    def judge(found: list) -> bool | str:
        for word, calls, waiting in found:
            if word in named:
                return named[word]
            if word != "mean":
                return f"On {len(found)} ranks, the gradients are not the averages."
            if calls != 1:
                return f"The gradients are right, but it took {calls} all-reduces, not one."
            if waiting > at_once:
                return (
                    f"It takes {waiting} images forward before it goes backward, and a "
                    f"part has {at_once}: that needs the memory which parts are there "
                    "to save."
                )
        return True

    return judge


def _average(average, model, x, y) -> None:
    F.cross_entropy(model(x), y).backward()
    average(model)


def _in_parts(backward_in_parts, model, x, y) -> None:
    backward_in_parts(DDP(model), list(zip(x.chunk(3), y.chunk(3))))


def a_job_that_hangs() -> None:
    """Train on this rank until all ranks stand still; an exercise asks for the reason."""

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


def start() -> tuple:
    """Return a model, its optimizer and its schedule, before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # a schedule that counts its own steps; others go on from the optimizer's rate
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(seen: int, model, optimizer, schedule) -> list[float]:
    """Take three steps, from `seen` images on; returns the learning rate of each."""
    rates = []
    for step in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        torch.manual_seed(seen + 16 * step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return rates


def _resumes_undisturbed(save: Callable) -> bool | str:
    """Return whether training goes on from what `save` returns, and ends the same."""
    with torch.random.fork_rng():
        undisturbed, resumed = start(), start()
        train(0, *undisturbed)
        state = copy.deepcopy(save(*undisturbed))
        for name, part in zip(("model", "optimizer", "scheduler"), resumed):
            if name in state:
                part.load_state_dict(state[name])
        train(48, *undisturbed), train(48, *resumed)
    if torch.equal(resumed[0].weight, undisturbed[0].weight):
        return True
    if "model" not in state:
        return "The weights are not in it, under the name 'model'."
    if "optimizer" not in state:
        return "The weights are there, but AdamW starts again with empty averages."
    if "scheduler" not in state:
        return "AdamW goes on, but the schedule of the learning rate starts again."
    return "Resumed, the run ends with different weights."


def _rank_plus_1(mean_over_ranks: Callable) -> float | None:
    result = mean_over_ranks(torch.tensor([dist.get_rank() + 1.0]))
    return result if result is None else float(result)


def _mean_on_rank_0(found: list) -> bool | str:
    first, *others = found
    n = len(found)
    if first is None:
        return "Rank 0 returns nothing."
    if first == sum(range(1, n + 1)):
        return "Rank 0 returns the sum: you forgot the number of workers."
    if first != (n + 1) / 2:
        return f"On {n} ranks with values 1 to {n}, rank 0 returns {first}."
    if any(other is not None for other in others):
        return "Only rank 0 should return the mean, and the others None."
    return True


_NAME_THE_FUNCTION = "Name the function that calls the collective, below `train`."


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
        words(
            {"A": "one left out", "B": "sum", "C": "rounded", "D": "right"},
            others=set(),
            clues={
                "A": "Look at each tensor, also the last.",
                "C": "It passes in float32. What does it do in float64?",
            },
        ),
        (
            "Count in float64 and in float32: no two versions give the same two numbers.",
            "What is twice as long is off in both types, in every tensor; what is rounded, "
            "in float64 alone.",
        ),
    ),
    "mean loss": Exercise(
        cases((([6.0, 2.0], [3, 1]), 2.0), (([2.0, 9.0], [1, 3]), 2.75)),
        (
            "One image should count as much as any other, whichever rank it is on.",
            "What would one process compute that had all the images?",
        ),
        mistakes={
            lambda sums, counts: sum(s / c for s, c in zip(sums, counts)) / 2: (
                "That is the mean of the ranks' means, in which a small share weighs more."
            )
        },
    ),
    "one all-reduce": Exercise(
        by_ranks(
            partial(_gradient_left_by, _average),
            _sent_once(
                {
                    "own": "Each rank still holds its own gradients: put the averages "
                    "back.",
                    "sum": "That leaves the sum of the gradients: you forgot the number "
                    "of workers.",
                }
            ),
            *(2, 3),
        ),
        (
            "Which tensor holds all gradients? torch.cat makes one of many.",
            "Afterwards go through the parameters again, and take as many numbers for "
            "each as it has (numel).",
        ),
    ),
    # 01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb
    "averaged by DDP": Exercise(
        by_ranks(
            partial(_gradient_left_by, lambda answer, *given: answer(*given)),
            _sent_once(
                {
                    "own": "Nothing was all-reduced: each rank holds its own gradient. "
                    "What was called in the forward pass, the DDP model or the one "
                    "inside?"
                }
            ),
            *(2, 3),
        ),
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
        same_as(
            lambda share, together, many, n: (together / many / n, share / many),
            (0.125, 0.375, 0.25, 4),  # seconds of a step, and workers
            (0.1, 0.1, 0.1, 2),
        ),
        (
            "Strong scaling: how much faster are N workers with the same images in all, "
            "and how much of that is each worker's part?",
            "Weak scaling: the step of one worker with its own share, over the step of "
            "all together.",
        ),
        mistakes={
            lambda share, together, many, n: (share / many, together / many / n): (
                "Strong scaling comes first, then weak scaling."
            ),
            lambda share, together, many, n: (together / many, share / many): (
                "That is the speed-up: divide it by the number of workers."
            ),
            lambda share, together, many, n: (together / many / n, share / many / n): (
                "In weak scaling the many workers do N times the work already."
            ),
        },
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
            "The global batch is workers times images of each times accumulation steps.",
        ),
        mistakes={
            4096 / 64: "You forgot that 8 GPUs do each step together.",
            4096
            / 8: "Those are the images of one GPU: how many accumulation steps are they?",
        },
    ),
    "traffic saved": Exercise(
        lambda answer: abs(answer - 7 / 8) < 0.006,
        (
            "In how many of the accumulation steps does DDP still send?",
            "no_sync covers all accumulation steps but the last one.",
        ),
        mistakes={
            1 / 8: "That is the fraction which is still sent.",
            87.5: "87.5 is a percentage: give the fraction.",
            1: "The last step does send.",
        },
    ),
    "send once": Exercise(
        by_ranks(
            partial(_gradient_left_by, _in_parts),
            _sent_once(
                {
                    "3 times": "With 3 parts, the gradient is 3 times too long.",
                    "own": "Nothing was all-reduced: each rank is left with its own "
                    "gradient.",
                },
                at_once=2,
            ),
            2,
        ),
        (
            "The gradient of a mean over all parts is the mean of the parts' gradients.",
            "All steps but the last belong inside model.no_sync(), with their forward.",
        ),
    ),
    # 01-ddp-pytorch-only/03_failures_and_hangs.ipynb
    "reading stacks": Exercise(
        lambda answer: str(answer).strip("()") == "save_checkpoint",
        (
            "All ranks wait in a collective. Is it the same one?",
            "Which call stands behind an `if rank == 0:`, by what the stacks say?",
        ),
        mistakes={
            "train_step": "All ranks call its all-reduce equally often, or would. Which "
            "of the two collectives is called by some ranks only?",
            "train": _NAME_THE_FUNCTION,
            "barrier": _NAME_THE_FUNCTION,
            "all_reduce": _NAME_THE_FUNCTION,
        },
    ),
    "complete checkpoint": Exercise(
        _resumes_undisturbed,
        (
            "What else changes from step to step, besides the weights?",
            "Everything with a state_dict() that `step()` is called on has to be there.",
        ),
    ),
    "a run that ends": Exercise(
        by_ranks(_rank_plus_1, _mean_on_rank_0, 2, 3, seconds=5),
        (
            "A collective is called by all ranks, or by none.",
            "What may differ between the ranks is what they do with its result.",
        ),
    ),
}
