"""Checks of the exercises in the electives of part 02."""

from collections.abc import Callable

from utils.checks.exercise import Exercise, by_ranks, cases

# (step, time, value): a first attempt has logged steps 0 and 1, a second one 1 and 2.
KILLED = [(0, 1.0, 3.0), (1, 2.0, 2.25), (1, 5.0, 2.5), (2, 6.0, 2.0)]

# What LightGBM calls learning from the rows of all workers, and the aliases of these.
ALL_ROWS = {"data", "data_parallel", "voting", "voting_parallel"}


def _spares_biases_and_norms(groups: Callable) -> bool | str:
    """Return whether it splits a model's parameters as Transformers' `Trainer` does."""
    import torch  # here, not above: importing it takes 2 s
    from torch import nn

    decay = 0.25
    block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(2, 2, bias=False)})
    model.register_parameter("token", nn.Parameter(torch.ones(1)))
    found: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups(model, decay):
        for parameter in group["params"]:
            found[names[id(parameter)]].append(group["weight_decay"])
    for name, decays in found.items():
        wanted = decay if name in ("block.0.weight", "head.weight", "token") else 0
        if len(decays) != 1:
            return f"The parameter {name} is in {len(decays)} groups."
        if decays != [wanted]:
            return f"The decay of {name} is {decays[0]}, and should be {wanted}."
    return True


def _trains_together(for_all_workers) -> bool | str:
    """Return whether workers get one model by it, and an error without a network."""
    network = {"machines": "10.0.0.1:4000,10.0.0.2:4000", "num_machines": 2}
    network |= {"local_listen_port": 4000}
    params = for_all_workers({"objective": "binary"}, dict(network))
    if params.get("objective") != "binary":
        return "The parameters that came are lost."
    if not network.items() <= params.items():
        return "The workers do not find each other: the network is not in it."
    if params.get("tree_learner") not in ALL_ROWS:
        return "The workers are connected, and each still grows its own trees."
    try:
        alone = for_all_workers({"objective": "binary"}, {})
    except ValueError:
        return True
    return f"Without a network it returns {alone!r}: every worker would train alone."


# Target tokens of each text, by rank: of two ranks, and of three.
TARGETS = ([[2, 4, 8], [5]], [[3], [1, 6], [4, 2, 2]])


def _scales_on_this_rank(text_scales: Callable) -> tuple[list, list]:
    """Return the target tokens of this rank's texts, and what the answer makes of them."""
    import torch.distributed as dist

    own = TARGETS[dist.get_world_size() - 2][dist.get_rank()]
    scales = text_scales(list(own))
    return own, [float(scale) for scale in scales]


def _each_text_counts_the_same(found: list) -> bool | str:
    """Return whether the gradient, averaged over ranks, is the mean of the texts' own."""
    n, texts = len(found), sum(len(own) for own, _ in found)
    for rank, (own, scales) in enumerate(found):
        if len(scales) != len(own):
            return f"Rank {rank} has {len(own)} texts and gets {len(scales)} numbers."
    # how much a text counts in the averaged gradient, in units of what it should
    counts = [
        [scale * targets / n * texts for targets, scale in zip(own, scales)]
        for own, scales in found
    ]
    flat = [count for each in counts for count in each]
    if max(flat) - min(flat) < 1e-6 * max(map(abs, flat)):
        if abs(flat[0] - 1) < 1e-6:
            return True
        return (
            f"On {n} ranks all texts count the same, and {flat[0]:.2g} times too much."
        )
    if all(max(each) - min(each) < 1e-6 * abs(max(each)) for each in counts):
        each = ", ".join(f"{counted[0]:.2f}" for counted in counts)
        return f"On {n} ranks a text counts {each} times what it should, by its rank."
    return f"On {n} ranks, two texts of the same rank count differently."


# Beside the checkpoints of a run in a bucket.
RAYS_LIST = "checkpoint_manager_snapshot.json"


def _all_that_is_not_listed(objects: list[str], listed: list[str]) -> list[str]:
    return sorted({name.split("/")[0] for name in objects} - set(listed))


def _newer_than_the_list(objects: list[str], listed: list[str]) -> list[str]:
    names = {name.split("/")[0] for name in objects if "/" in name}
    return sorted(name for name in names if not listed or name > max(listed))


def _one_per_object(objects: list[str], listed: list[str]) -> list[str]:
    names = [name.split("/")[0] for name in objects if "/" in name]
    return sorted(name for name in names if name not in listed)


EXERCISES: dict[str, Exercise] = {
    # 02-ddp-pytorch-ray/electives/01_old_recipes.ipynb
    "epochs that save": Exercise(
        cases(
            ((7, 3, True), [3, 6, 7]),
            ((7, 3, False), [3, 6]),
            ((6, 3, True), [3, 6]),
            ((4, 0, True), [4]),
            ((4, 0, False), []),
            ((3, 1, True), [1, 2, 3]),
        ),
        (
            "Go through the epochs: when is one due, and when is it the last?",
            "`epoch % 0` raises: ask for the frequency first.",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/02_hyperparameter_search.ipynb
    "epochs best first": Exercise(
        lambda answer: answer == 16 + 15 * 1,
        (
            "How far does the first trial go, and after which epoch do the others end?",
            "One trial runs to its end. Each of the others reaches one rung.",
        ),
        {
            16 * 16: "That is the whole training, without ASHA.",
            16 + 4 * 3 + 12: "That is what it trains if every rung waits for all.",
            16 + 16: "There are only fifteen others.",
        },
    ),
    "epochs if all wait": Exercise(
        cases(
            ((12, 9, (1, 3), 3), 26),
            ((16, 16, (1, 4), 4), 40),
            ((2, 9, (1,), 3), 10),
        ),
        (
            "From one rung to the next, all trials that are left train the same epochs: "
            "how many trials, and how many epochs?",
            "The last stretch ends at max_epochs. At least one trial is left.",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/03_experiment_tracking.ipynb
    "steps logged twice": Exercise(
        lambda answer: answer == 173 - 150,
        (
            "After which step was the last checkpoint saved? Steps are counted from 0.",
            "Count from the first step of the second attempt to the last of the first.",
        ),
        {
            22: "Are the first and the last of them both counted?",
            27: "Those are the steps from the kill to the next checkpoint.",
            150: "Those are the steps that the checkpoint has: they are logged once.",
            173: "Those are all steps of the first attempt: where does the second begin?",
        },
    ),
    "one curve": Exercise(
        cases(
            ((KILLED,), [3.0, 2.5, 2.0]),
            ((KILLED[::-1],), [3.0, 2.5, 2.0]),  # in any order
            (([*KILLED, (1, 9.0, 1.75)],), [3.0, 1.75, 2.0]),  # killed twice
            (([(7, 1.0, 0.5), (4, 0.5, 0.75)],), [0.75, 0.5]),  # steps are missing
        ),
        (
            "Which points of a step count? Sort by what tells attempts apart.",
            "A dictionary keeps the last value that it gets for a key.",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/04_frameworks.ipynb
    "sharded twice": Exercise(
        lambda answer: answer == 1200 / 4 / 4,
        (
            "How many images does the sampler leave to a rank, and how many batches?",
            "Accelerate deals these batches out to the ranks again.",
        ),
        {
            1200 / 4: "That is what the sampler leaves: Accelerate deals it out again.",
            1200 / 2: "There are 4 ranks.",
            3: "Those are the batches.",
        },
    ),
    "what decays": Exercise(
        _spares_biases_and_norms,
        (
            "`model.modules()` finds the norms, `model.named_parameters()` the names.",
            "Compare parameters by `id`: `==` would compare their values.",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/05_gradient_boosted_trees.ipynb
    "bins for equal trees": Exercise(
        lambda answer: answer == 6_000 / 8,
        (
            "What has to fit into what?",
            "The sketch keeps several values per bin: where is the edge in the picture?",
        ),
        {
            6_000: "A bin for each value is more than enough.",
            12_500: "Rows do not count: a value that comes twice is one value.",
            94: "The values count over all workers, however many there are.",
            2_048: "That is the edge of the default, in values. What is asked are bins.",
        },
    ),
    "one model of all workers": Exercise(
        _trains_together,
        (
            "Which parameter says that each rank has rows of its own?",
            "What should happen where `network` is empty?",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/06_fine_tuning.ipynb
    "adapter state": Exercise(
        lambda answer: answer == 32 * 16 * (4096 + 4096 + 4096 + 1024) * 8 / 4,
        (
            "How many numbers has A, of shape [r, in], and how many has B, [out, r]?",
            "Two layers in each of 32. AdamW keeps two averages of 4 bytes per number.",
        ),
        {
            32
            * 16
            * (4096 + 4096 + 4096 + 1024): "Those are the adapters' parameters.",
            32 * 16 * (4096 + 4096 + 4096 + 1024) * 8: "FSDP2 shards it over 4 GPUs.",
            32 * 16 * (4096 + 4096 + 4096 + 1024) * 4 / 4: "AdamW keeps two averages.",
            32 * (4096 * 4096 + 4096 * 1024) * 8 / 4: "Those are W's: it is frozen.",
            32 * 16 * (4096 + 4096) * 8 / 4: "That is `q_proj` alone.",
        },
    ),
    "each text the same": Exercise(
        by_ranks(_scales_on_this_rank, _each_text_counts_the_same, 2, 3),
        (
            "How many texts are there on all ranks? Each rank knows its own only.",
            "Add up the counts of texts by `dist.all_reduce`, and mind FSDP2's average.",
        ),
    ),
    # 02-ddp-pytorch-ray/electives/07_buckets.ipynb
    "leftovers in a bucket": Exercise(
        cases(
            (
                (
                    ["checkpoint_1/a.pt", "checkpoint_2/a.pt", RAYS_LIST],
                    ["checkpoint_1"],
                ),
                ["checkpoint_2"],
            ),
            (
                (
                    ["checkpoint_1/a.pt", "checkpoint_2/a.pt", RAYS_LIST],
                    ["checkpoint_2"],
                ),
                ["checkpoint_1"],  # cut off, and then the run went on
            ),
            ((["checkpoint_1/a.pt", "checkpoint_1/b.pt"], []), ["checkpoint_1"]),
            ((["logs/0.txt", "checkpoint_1/a.pt", RAYS_LIST], ["checkpoint_1"]), []),
        ),
        (
            "What stands before the `/` is a checkpoint, if it begins with `checkpoint_`.",
            "Which of them does the list not name? Several objects have the same one.",
        ),
        {
            _all_that_is_not_listed: "You would delete Ray's list, too: it is an object "
            "whose name begins with `checkpoint_`, and no checkpoint.",
            _newer_than_the_list: "A rest may be older than what is listed: after it was "
            "cut off, the run went on.",
            _one_per_object: "Name each of them once: it has several objects.",
        },
    ),
}
