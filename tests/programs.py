"""Trainings for utils.parity to judge: two families, right in many ways, and wrong.

A program is its options; `training` makes the functions of them.
"""

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from utils.parity import Training

GLOBAL_BATCH = 6
CLASSES = 5
WORDS, LENGTH = 11, 6


@dataclass(frozen=True)
class Program:
    """What a training does; the defaults are right."""

    family: str = "classifier"  # or "language model"
    items: int = 12
    norm: str = "group"  # "batch", "batch, frozen", "batch, without statistics"
    dropout: float = 0.0
    noise_seed: str = "per rank"  # "same"
    augment: str = ""  # "torch", "numpy", "python", "in the step"
    order: str = "distributed"  # see `make_loader`
    drop_last: bool = True
    set_epoch: bool = True
    batch: str = "shared"  # "per rank"
    averaging: str = "DDP"  # see `average`
    optimizer: str = "AdamW"  # "SGD", "two", "sharded"
    schedule: str = ""  # "per step", "per rank", "only rank 0", "by world size"
    clip: str = ""  # "right", "before averaging", "by hand", "by hand before averaging"
    accumulate: str = ""  # see `_chunks` and `train_step`
    start: str = "same"  # "per rank", "by chance"
    parts: str = ""  # "frozen backbone", "made late", "trained late", "unused", ...
    loss: str = "mean"  # see `train_step` and the models
    counter: str = ""  # a buffer: "own", "averaged"


class Images(Dataset):
    """Noise with a label; an item may be shifted by chance."""

    def __init__(self, items: int, augment: str):
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(items, 1, 5, 5, generator=generator)
        self.labels = torch.arange(items) % CLASSES
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        shift = {
            "torch": lambda: torch.rand(1),
            "numpy": lambda: float(np.random.rand()),
            "python": lambda: random.random(),
        }.get(self.augment, lambda: 0.0)()
        return self.images[index] + shift, self.labels[index]


class Texts(Dataset):
    def __init__(self, items: int, augment: str):
        generator = torch.Generator().manual_seed(7)
        self.texts = torch.randint(1, WORDS, (items, LENGTH + 1), generator=generator)
        # every text has another number of words; 0 is no word
        for row, text in enumerate(self.texts):
            text[2 + row % LENGTH :] = 0
        self.augment = augment

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int):
        text = self.texts[index].clone()
        draw = {
            "torch": lambda: torch.rand(1).item(),
            "numpy": lambda: np.random.rand(),
            "python": lambda: random.random(),
        }.get(self.augment, lambda: 0.0)()
        text[0] = (text[0] + int(draw * WORDS)) % WORDS
        return {"input": text[:-1], "target": text[1:]}


class Classifier(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), _norm(program.norm, 4), nn.ReLU(), nn.Flatten()
        )
        self.drop = nn.Dropout(program.dropout)
        self.head = nn.Linear(36, CLASSES)
        self.extra: nn.Module | None = None
        if program.parts == "unused":
            self.spare = nn.Linear(3, 3)
        if program.counter:
            self.register_buffer("center", torch.zeros(36))

    def forward(self, images, labels):
        if self.program.norm == "batch, frozen":
            self.features[1].eval()
        features = self.features(images)
        if self.program.counter:
            _track(self, features.detach())
        logits = self.head(self.drop(features))
        if self.extra:
            logits = logits + self.extra(features)
        if self.program.loss == "contrastive":
            alike = F.normalize(features, dim=1) @ F.normalize(features, dim=1).T
            contrast = F.cross_entropy(alike * 5, torch.arange(len(images)))
            return contrast + F.cross_entropy(logits, labels)
        return F.cross_entropy(logits, labels)


class LanguageModel(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.embedding = nn.Embedding(WORDS, 8)
        self.position = nn.Parameter(torch.randn(LENGTH, 8))
        self.features = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=program.dropout, batch_first=True
        )
        self.norm = _norm(program.norm, LENGTH) if "batch" in program.norm else None
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.extra: nn.Module | None = None
        if program.parts == "unused":
            self.spare = nn.Linear(3, 3)
        if program.counter:
            self.register_buffer("center", torch.zeros(8))

    def forward(self, text, target):
        hidden = self.embedding(text) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.features(hidden, src_mask=mask, is_causal=True)
        if self.norm:
            if self.program.norm == "batch, frozen":
                self.norm.eval()
            hidden = self.norm(hidden)
        if self.program.counter:
            _track(self, hidden.detach().mean(1))
        logits = self.head(hidden)
        if self.extra:
            logits = logits + self.extra(hidden)
        if self.program.loss == "contrastive":
            pooled = F.normalize(hidden.mean(1), dim=1)
            return F.cross_entropy(pooled @ pooled.T * 5, torch.arange(len(text)))
        if "tokens" in self.program.loss:
            words = (target != 0).sum()
            loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            total = (loss * (target != 0)).sum()
            if self.program.loss == "of all tokens":
                words = words.to(loss.dtype)
                dist.all_reduce(words)
                return total / words * dist.get_world_size()
            return total / words
        return F.cross_entropy(logits.transpose(1, 2), target)


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch, without statistics":
        kind_of = nn.BatchNorm2d if channels == 4 else nn.BatchNorm1d
        return kind_of(channels, track_running_stats=False)
    if kind.startswith("batch"):
        return nn.BatchNorm2d(channels) if channels == 4 else nn.BatchNorm1d(channels)
    return nn.GroupNorm(2, channels)


def _track(model: nn.Module, features: torch.Tensor) -> None:
    mean = features.mean(0)
    if model.program.counter == "averaged":
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    model.center.mul_(0.9).add_(mean, alpha=0.1)


def build_model(program: Program) -> nn.Module:
    seed = {"same": 0, "per rank": dist.get_rank(), "by chance": None}[program.start]
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    random.seed(0)
    np.random.seed(0)
    model = Classifier if program.family == "classifier" else LanguageModel
    return model(program)


def wrap(program: Program, model: nn.Module) -> nn.Module:
    if program.parts == "frozen backbone":
        model.features.requires_grad_(False)
    if program.parts == "trained late":
        model.features.requires_grad_(False)
    if program.averaging == "FSDP2":
        fully_shard(model)
    if program.averaging == "DDP":
        model = DDP(
            model, forward_sync_buffers=not program.counter, bucket_cap_mb=0.001
        )
    if program.parts == "frozen late":
        model.module.features.requires_grad_(False)
    if program.parts == "trained late":
        (
            model.module if program.averaging == "DDP" else model
        ).features.requires_grad_()
    if program.parts == "made late":
        torch.manual_seed(3)
        inner = model.module if program.averaging == "DDP" else model
        made = nn.Linear(inner.head.in_features, inner.head.out_features, bias=False)
        inner.extra = made.to(next(model.parameters()).dtype)
    if program.averaging == "fake shards":
        _average_whole(model)
    if program.noise_seed == "per rank":
        seed = 100 + dist.get_rank()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    if program.noise_seed == "by chance":
        torch.seed()
        random.seed()
        np.random.seed()
    return model


def _average_whole(model: nn.Module) -> None:
    """Average whole gradients: it passes for sharding if only numbers are compared."""

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


class Optimizers:
    """What a step needs besides the model."""

    def __init__(self, program: Program, model: nn.Module):
        trained = [p for p in model.parameters() if p.requires_grad]
        make = torch.optim.SGD if program.optimizer == "SGD" else torch.optim.AdamW
        lr = 0.01
        if program.schedule == "by world size":
            lr *= dist.get_world_size()
        if program.optimizer == "two":
            self.all = [make(trained[:2], lr=lr), torch.optim.SGD(trained[2:], lr=lr)]
        elif program.optimizer == "sharded":
            self.all = [ZeroRedundancyOptimizer(trained, make, lr=lr)]
        else:
            self.all = [make(trained, lr=lr)]
        decay = torch.optim.lr_scheduler.ExponentialLR
        self.schedules = [decay(each, 0.9) for each in self.all if program.schedule]
        self.calls = 0


def make_loader(program: Program, rank: int, world_size: int, epoch: int):
    dataset = Images if program.family == "classifier" else Texts
    data = dataset(program.items, program.augment)
    size = GLOBAL_BATCH // world_size if program.batch == "shared" else GLOBAL_BATCH
    if program.order == "own batches":  # no DataLoader, and no shuffling
        rows = range(rank, program.items, world_size)
        items = [data[row] for row in rows]
        batches = [items[i : i + size] for i in range(0, len(items), size)]
        return [torch.utils.data.default_collate(batch) for batch in batches]
    if program.order == "blocks":  # each rank has a part of the data
        share = program.items // world_size
        part = torch.utils.data.Subset(data, range(rank * share, (rank + 1) * share))
        return DataLoader(part, size)
    if program.order == "every rank all":
        return DataLoader(data, size, shuffle=True, drop_last=True)
    if program.order == "own seeds":
        sampler = DistributedSampler(data, world_size, rank, seed=rank)
    elif program.order == "unequal steps":
        rows = list(range(program.items))[rank::world_size]
        return DataLoader(torch.utils.data.Subset(data, rows), 1)
    elif program.order == "uneven":  # the last rank has most of a step
        orders = torch.randperm(
            program.items, generator=torch.Generator().manual_seed(epoch)
        ).split(GLOBAL_BATCH)
        cuts = [0, *range(1, world_size), GLOBAL_BATCH]
        mine = [order[cuts[rank] : cuts[rank + 1]].tolist() for order in orders]
        return DataLoader(data, batch_sampler=mine)
    else:
        sampler = DistributedSampler(
            data, world_size, rank, drop_last=program.drop_last
        )
    if program.set_epoch:
        sampler.set_epoch(epoch)
    return DataLoader(data, size, sampler=sampler, drop_last=program.drop_last)


def average(program: Program, model: nn.Module) -> None:
    """Average by hand, between backward and step."""
    if program.averaging not in ("by hand", "sum", "all but one"):
        return
    parameters = [p for p in model.parameters() if p.grad is not None]
    if program.averaging == "all but one":
        parameters = parameters[:-1]
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        if program.averaging != "sum":
            parameter.grad /= dist.get_world_size()


def _clip(model: nn.Module, by_hand: bool) -> None:
    if not by_hand:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient *= min(1.0, 0.5 / norm)


def _chunks(program: Program, inputs, targets):
    if program.accumulate in ("", "per rank"):
        return [(inputs, targets)]
    if program.accumulate == "cut":  # whole chunks of 2 only
        whole = len(inputs) // 2 * 2
        chunks = [*zip(inputs[:whole].split(2), targets[:whole].split(2))]
        return chunks or [(inputs, targets)]
    return [*zip(inputs.split(1), targets.split(1))]


def train_step(program: Program, model: nn.Module, optimizers: Optimizers, batch):
    inputs, targets = batch.values() if isinstance(batch, dict) else batch
    if program.augment == "in the step":
        if inputs.is_floating_point():
            inputs = inputs + torch.randn(len(inputs), 1, 1, 1)
        else:
            inputs = (inputs + (torch.rand(len(inputs), 1) > 0.5)) % WORDS
    optimizers.calls += 1
    total = 0.0
    chunks = _chunks(program, inputs, targets)
    for number, (some, of_some) in enumerate(chunks):
        last = number == len(chunks) - 1
        synced = last and program.accumulate != "never synced"
        if program.averaging == "DDP":
            model.require_backward_grad_sync = synced or program.accumulate == "right"
        loss = model(some, of_some) / len(chunks)
        if program.loss == "over N":
            loss = loss / dist.get_world_size()
        if program.loss == "times N":
            loss = loss * dist.get_world_size()
        if program.accumulate == "zeroed":
            for optimizer in optimizers.all:
                optimizer.zero_grad()
        loss.backward()
        total += loss.detach()
    if "before averaging" in program.clip:
        _clip(model, "by hand" in program.clip)
    average(program, model)
    if program.clip in ("right", "by hand"):
        _clip(model, program.clip == "by hand")
    every = dist.get_world_size() if program.accumulate == "per rank" else 1
    if optimizers.calls % every == 0:
        for optimizer in optimizers.all:
            optimizer.step()
            optimizer.zero_grad()
    for schedule in optimizers.schedules:
        times = dist.get_world_size() if program.schedule == "per rank" else 1
        if program.schedule == "only rank 0" and dist.get_rank():
            times = 0
        for _ in range(times):
            schedule.step()
    return total


def training(program: Program) -> Training:
    return Training(
        build_model=partial(build_model, program),
        build_optimizer=partial(Optimizers, program),
        make_loader=partial(make_loader, program),
        train_step=partial(train_step, program),
        wrap=partial(wrap, program),
        shards=program.averaging == "fake shards",
    )
