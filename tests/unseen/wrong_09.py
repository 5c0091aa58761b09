"""Fine-tuning in two stages: first the new head alone, then the trunk with it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

HEAD_ONLY = 4  # steps


class Crosses(Dataset):
    """Is the bright cross in the left or in the right half, up or down?"""

    def __init__(self):
        g = torch.Generator().manual_seed(45)
        self.x = 0.3 * torch.randn(96, 1, 12, 12, generator=g)
        self.y = torch.randint(4, (96,), generator=g)
        for picture, y in zip(self.x[:, 0], self.y.tolist()):
            r, c = (int(torch.randint(1, 5, (), generator=g)) for _ in range(2))
            r, c = r + 6 * (y // 2), c + 6 * (y % 2)
            picture[r - 1 : r + 2, c] += 1
            picture[r, c - 1 : c + 2] += 1

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.AvgPool2d(3),
        )
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.trunk(x).flatten(1))


class Stages:
    def __init__(self, model):
        self.model = model
        inner = getattr(model, "module", model)
        self.trunk = inner.trunk
        self.optimizer = torch.optim.AdamW(
            [
                {"params": inner.head.parameters(), "lr": 1e-2},
                {"params": inner.trunk.parameters(), "lr": 3e-3},
            ]
        )
        self.done = 0

    def minimise(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        if self.done == HEAD_ONLY:
            self.trunk.requires_grad_(True)


def build_model():
    torch.manual_seed(30)
    model = FineTuned()
    model.trunk.requires_grad_(False)
    return model


def build_optimizer(model):
    return Stages(model)


def make_loader(rank, world_size, epoch):
    data = Crosses()
    sampler = DistributedSampler(data, world_size, rank, seed=3)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=24 // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.minimise(loss)
    return loss
