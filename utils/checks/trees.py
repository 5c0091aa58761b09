"""Checks of the exercises of the elective on gradient-boosted trees."""

from utils.checks.exercise import Exercise

ALL_ROWS = {"data", "data_parallel", "voting", "voting_parallel"}  # and their aliases


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


EXERCISES: dict[str, Exercise] = {
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
}
