"""Checks of the exercises on Lightning, Accelerate and Transformers."""

from collections.abc import Callable

from utils.checks.exercise import Exercise


def _spares_biases_and_norms(groups: Callable) -> bool | str:
    """Return whether it parts a model's parameters as Transformers' `Trainer` does."""
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


EXERCISES: dict[str, Exercise] = {
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
}
