"""Which signal is it? 1-d convolutions on a stream, four micro-batches per step."""

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

N_SIGNALS = 72
GLOBAL_BATCH = 24
MICRO = 4


def signal(number):
    g = torch.Generator().manual_seed(3000 + number)
    kind = number % 3
    t = torch.linspace(0, 1, 32)
    start = torch.rand(1, generator=g)
    if kind == 0:
        wave = torch.sin(2 * math.pi * (3 * t + start))
    elif kind == 1:
        wave = torch.sign(torch.sin(2 * math.pi * (3 * t + start)))
    else:
        wave = 2 * ((3 * t + start) % 1) - 1
    return wave[None] + 0.2 * torch.randn(1, 32, generator=g), kind


class SignalStream(IterableDataset):
    """All ranks walk through the same stream, and each keeps every world_size-th signal."""

    def __init__(self, rank, world_size, epoch):
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch + 1)
        for place, number in enumerate(torch.randperm(N_SIGNALS, generator=g).tolist()):
            if place % self.world_size == self.rank:
                yield signal(number)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 12, 5, padding=2)
        self.norm1 = nn.GroupNorm(3, 12)
        self.conv2 = nn.Conv1d(12, 16, 5, stride=2, padding=2)
        self.norm2 = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = nn.functional.gelu(self.norm1(self.conv1(x)))
        x = nn.functional.gelu(self.norm2(self.conv2(x)))
        return self.fc(x.mean(-1))


def build_model():
    torch.manual_seed(0)
    return Net()


def build_optimizer(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = torch.optim.lr_scheduler.StepLR(sgd, step_size=4, gamma=0.7)
    return [sgd, steps]


def make_loader(rank, world_size, epoch):
    stream = SignalStream(rank, world_size, epoch)
    return DataLoader(stream, batch_size=GLOBAL_BATCH // world_size)


def train_step(model, optimizer, batch):
    sgd, steps = optimizer
    signals, kinds = batch
    sgd.zero_grad()
    logged = 0.0
    for i, (x, y) in enumerate(zip(signals.chunk(MICRO), kinds.chunk(MICRO))):
        last = i == MICRO - 1
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / MICRO
            loss.backward()
        logged += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 0.8)
    sgd.step()
    steps.step()
    return logged
