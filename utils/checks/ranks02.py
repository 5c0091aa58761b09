"""Exercises of part 02 that run on ranks: each judges a function by what it does there.

torch is imported where it is needed: `utils.checks` is imported by every notebook.
"""

from collections.abc import Callable, Iterator

from utils.checks.ranks import join, stands_still
from utils.launch import run_ranks

LABELS = (3, 3, 3, 3, 1)  # rows of each batch of a stream; the last is shorter
CORRECT = (0, 3, 1, 2, 1)  # how many of them a model gets right


def counts_each_row_once(accuracy: Callable) -> bool | str:
    """Whether ranks that see one stream return its accuracy, and share the rows."""
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
    """On a rank: what it returns of the stream, and the batches that it looked at."""
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


def goes_on_exactly(answer: tuple[Callable, Callable]) -> bool | str:
    """Whether what `pack` saves and `unpack` loads continues a training bit for bit."""
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
    """On a rank: 3 steps, a restart and 3 more, against 6 steps.

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

    def train(model, optimizer, schedule, seen):
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
    train(*run, 0)
    seen = 3 * 16 * dist.get_world_size()
    file = io.BytesIO()
    torch.save(pack(*run, seen), file)
    file.seek(0)
    again = start()
    seen_again = unpack(torch.load(file, weights_only=True), *again)
    same = [_same(tensors(a), tensors(b)) for a, b in zip(run[:2], again[:2])]
    rates = train(*run, seen), train(*again, seen_again or 0)
    ends = _same(tensors(run[0]), tensors(again[0]))
    return ends, *same, rates, (seen, seen_again)


def _averages(state: dict) -> Iterator:
    for of_parameter in state["state"].values():
        yield from of_parameter.values()


def _same(ours: list, theirs: list) -> bool:
    import torch

    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def shares_what_is_left(share: Callable) -> bool | str:
    """Whether any number of ranks divides what is left of an epoch, whoever began it."""
    positions = ((0, 12), (5, 12), (31, 12), (8, 9))  # images seen, images of an epoch
    for n in (2, 3):
        for (seen, images), shares in zip(
            positions, zip(*run_ranks(_shares_at, n, share, positions, timeout=60))
        ):
            if problem := _problem(shares, [*range(seen % images, images)]):
                return f"{n} ranks, {seen} images seen, {images} per epoch: {problem}"
    return True


def _problem(shares: tuple[list[int], ...], left: list[int]) -> str | None:
    """What is wrong with the shares of all ranks, if anything is."""
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


def stops_together(anyone: Callable) -> bool | str:
    """Whether three ranks end after the same step, if one of them wants to, or none."""
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
    """On a rank: steps of a training that ends once `anyone(flag)` says so."""
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
