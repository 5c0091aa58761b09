"""Count the dots in a picture. The pictures of a step are too many for the memory of one
device (let us say), so they come in four micro-batches."""

from contextlib import ExitStack

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 4
PER_STEP = 24


class DotCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.eyes = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.LayerNorm([12, 10, 10])
        self.more = nn.Conv2d(12, 12, 3, stride=2, padding=1)
        self.count = nn.Linear(12, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.eyes(x)))
        x = torch.relu(self.more(x))
        return self.count(x.sum((2, 3)) / 8)[:, 0]


def pictures(n=72):
    g = torch.Generator().manual_seed(6)
    number = torch.randint(1, 9, (n,), generator=g)
    x = 0.1 * torch.randn(n, 100, generator=g)
    for picture, k in zip(x, number.tolist()):
        picture[torch.randperm(100, generator=g)[:k]] += 1
    return TensorDataset(x.view(n, 1, 10, 10), number.to(x.dtype))


def build_model():
    torch.manual_seed(3)
    return DotCounter()


def build_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)


def make_loader(rank, world_size, epoch):
    data = pictures()
    sampler = DistributedSampler(data, world_size, rank, seed=2)
    sampler.set_epoch(epoch)
    return DataLoader(data, PER_STEP // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    optimizer, scheduler = optimizer
    x, number = batch
    micro = len(x) // ACCUMULATE
    total = 0.0
    for k in range(ACCUMULATE):
        part = slice(k * micro, (k + 1) * micro)
        with ExitStack() as stack:
            if k + 1 < ACCUMULATE:
                stack.enter_context(model.no_sync())
            loss = nn.functional.mse_loss(model(x[part]), number[part]) / ACCUMULATE
            optimizer.zero_grad()
            loss.backward()
        total += float(loss)
    optimizer.step()
    scheduler.step()
    return total
