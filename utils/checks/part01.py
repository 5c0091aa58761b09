"""Checks of the exercises of part 01: data parallelism by hand, DDP, and failures."""

from collections.abc import Callable

from utils.checks import ranks01
from utils.checks.exercise import Exercise, cases


def _splits(share: Callable) -> bool | str:
    """Whether `share(batch, rank, n)` gives each image to one rank, equally many to all."""
    for n in (2, 3, 4):
        batch = [10 * i for i in range(12)]
        shares = [[int(i) for i in share(list(batch), rank, n)] for rank in range(n)]
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


EXERCISES = {
    # 01-ddp-pytorch-only/01_data_parallelism_by_hand.ipynb
    "split a batch": Exercise(
        _splits,
        (
            "Like dealing cards: one for each worker, then the next round.",
            "A slice can take every second element: [start::step].",
        ),
    ),
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
    "mean loss": Exercise(
        _mean_loss,
        (
            "One image should count as much as any other, whichever rank it is on.",
            "What would one process compute that had all the images?",
        ),
    ),
    "one all-reduce": Exercise(
        ranks01.averages_at_once,
        (
            "Which tensor holds all gradients? torch.cat makes one of many.",
            "Afterwards go through the parameters again, and take as many numbers for "
            "each as it has (numel).",
        ),
    ),
    # 01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb
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
    "share": Exercise(
        _blocks,
        (
            "If block r ends where block r + 1 starts, none is left out or repeated.",
            "Find one formula for the start of block r: it is 0 for r = 0 and num_items "
            "for r = world_size.",
        ),
    ),
    "send once": Exercise(
        ranks01.accumulates_and_sends_once,
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
    "complete checkpoint": Exercise(
        ranks01.resumes_undisturbed,
        (
            "What else changes from step to step, besides the weights?",
            "Everything with a state_dict() that `step()` is called on has to be there.",
        ),
    ),
    "a run that ends": Exercise(
        ranks01.ends_on_all_ranks,
        (
            "A collective is called by all ranks, or by none.",
            "What may differ between the ranks is what they do with its result.",
        ),
    ),
}
