"""Write the pictures of the READMEs to docs/pictures.

`python -m tests.tools.pictures` copies four figures that lessons recorded, then trains for
minutes and draws two of its own, the proof and memory. These are white, so that they
can be read on a dark page as well as on a light one.
"""

import base64
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests import sharding
from tests.compare import relative
from tests.tools.notebooks import ROOT
from utils import memory, plots
from utils.datasets import digits
from utils.launch import run_ranks
from utils.models import resnet18
from utils.zero import zero_state_bytes

PICTURES = ROOT / "docs" / "pictures"
# The lesson, and the title that its cell gives to utils.plots.
RECORDED = {
    "overlap": (
        "01-ddp-pytorch-only/02_ddp_with_torchrun.ipynb",
        "One backward pass with DDP, rank 0",
    ),
    "killed": (
        "02-ddp-pytorch-ray/04_fault_tolerance.ipynb",
        "A worker is killed, and training goes on",
    ),
    "streamed": (
        "02-ddp-pytorch-ray/03_ray_data_streaming.ipynb",
        "What the worker of rank 0 holds, beside the model",
    ),
    "gathered": (
        "03-fsdp-deepspeed/02_fsdp2.ipynb",
        "A step of eight blocks on one of 64 ranks",
    ),
}
STEPS, GLOBAL_BATCH, RANKS = (
    20,
    12,
    4,
)  # 12 examples are shared equally by 2, 3, 4 ranks


def copy_recorded() -> None:
    """Write the figures that lessons recorded, each found by its title."""
    for name, (notebook, title) in RECORDED.items():
        cells = nbformat.read(ROOT / notebook, as_version=4).cells
        (figure,) = (
            output.data["image/png"]
            for cell in cells
            if cell.cell_type == "code" and title in cell.source
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        )
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(figure))


def average_gradients(model) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(average=average_gradients) -> list[tuple[float, torch.Tensor]]:
    """Train on this rank's shard, in float64; return each step's mean loss and weights."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = digits("train").tensors
    torch.manual_seed(1)
    batches = torch.randperm(len(images))[: STEPS * GLOBAL_BATCH].chunk(STEPS)
    torch.manual_seed(0)  # the same weights on every rank
    model = resnet18().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    history = []
    for batch in batches:
        mine = batch[rank::world_size]
        loss = F.cross_entropy(model(images[mine].double()), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # of all ranks
        # every 101st weight: all of them, of each step, would be gigabytes
        flat = torch.cat([p.detach().flatten()[::101] for p in model.parameters()])
        history.append((mean.item() / world_size, flat))
    return history


def average_nothing(model) -> None:
    """Do nothing: the mistake that the proof has to see."""


def draw_proof() -> None:
    """Draw the losses of one process and of N ranks, and the relative error of weights."""
    alone = run_ranks(train, 1)[0]
    runs = {f"{n} workers": run_ranks(train, n)[0] for n in (2, 3, 4)}
    wrong = run_ranks(train, 2, average_nothing)[0]
    steps = range(1, STEPS + 1)
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.4), layout="constrained")
    left.plot(steps, [loss for loss, _ in alone], color=plots.COLORS[7], linewidth=6)
    for number, run in enumerate(runs.values()):
        dots = {
            "color": plots.COLORS[number],
            "marker": "os^"[number],
            "ms": 7 - number,
        }
        left.plot(steps, [loss for loss, _ in run], linestyle="", **dots)
    left.set(title="They learn the same", xlabel="step", ylabel="loss")
    left.legend(["one process", *runs], loc="upper right")
    for number, (name, run) in enumerate(runs.items()):
        far = [max(relative(b, a), 1e-17) for (_, a), (_, b) in zip(alone, run)]
        assert max(far) < 1e-10, f"{name} do not train like one process: {max(far)}"
        right.plot(steps, far, color=plots.COLORS[number], label=name)
    far = [relative(b, a) for (_, a), (_, b) in zip(alone, wrong)]
    assert max(far) > 1e-3, f"The mistake is not seen: {max(far)}"
    right.plot(steps, far, "k:", label="averaging nothing")
    right.set(title="Their weights are apart by", xlabel="step")
    right.set(yscale="log", ylim=(1e-17, 10))
    right.legend(loc="center right")
    save(fig, "proof")


def state_on_ranks(name: str) -> memory.State:
    """Train a small GPT for a step; return this rank's bytes per parameter."""
    if name.startswith("ZeRO"):
        # two micro-batches: between them every stage holds the gradients it keeps
        engine = sharding.zero_engine(
            int(name[-1]), torch.float32, accumulation_steps=2
        )
        for _ in range(2):
            loss = sharding.loss_of(engine, *texts())
            engine.backward(loss)
            engine.step()
        engine.backward(sharding.loss_of(engine, *texts()))
        state = zero_state_bytes(engine)
    else:
        dist.init_process_group("gloo")
        model: Any = sharding.build_model(torch.float32)
        if name == "FSDP2":
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            model = sharding.shard(model, mesh=mesh)
        elif name == "DDP":
            model = sharding.DDP(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        sharding.loss_of(model, *texts()).backward()
        optimizer.step()
        state = memory.state_bytes(model, optimizer)
    return state


def texts() -> tuple[torch.Tensor, ...]:
    return sharding.share(0, dist.get_rank(), dist.get_world_size())


def draw_memory() -> None:
    """Draw what each of four ranks holds, by strategy, in bytes per parameter."""
    parameters = sum(
        p.numel() for p in sharding.build_model(torch.float32).parameters()
    )
    names = ["one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
    rows = {}
    for name in names:
        state = run_ranks(state_on_ranks, 1 if name == "one process" else RANKS, name)[
            0
        ]
        rows[name] = [nbytes / parameters for nbytes in state]
    assert sum(rows["one process"]) == sum(rows["DDP"]) == 16
    assert abs(sum(rows["FSDP2"]) - 16 / RANKS) < 0.1, rows
    fig, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    left = [0.0] * len(names)
    for part, color in zip(range(3), plots.COLORS):
        widths = [row[part] for row in rows.values()]
        ax.barh(names, widths, left=left, height=0.6, color=color)
        left = [start + width for start, width in zip(left, widths)]
    drawn = ax.containers[-1]
    ax.bar_label(drawn, [f"{total:.3g}" for total in left], padding=4)
    ax.legend(memory.State._fields, loc="lower right")
    ax.invert_yaxis()
    ax.set(title=f"What each of {RANKS} workers holds", xlim=(0, 18))
    ax.set_xlabel("bytes per parameter, counted in a training with Adam")
    save(fig, "memory")


def save(fig, name: str) -> None:
    """Write a figure as SVG, the same bytes for the same numbers."""
    fig.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(fig)


def main() -> None:
    copy_recorded()
    style = plots._STYLE | {"svg.hashsalt": "workshop", "figure.facecolor": "white"}
    with matplotlib.rc_context(style):
        draw_memory()
        draw_proof()


if __name__ == "__main__":
    main()
