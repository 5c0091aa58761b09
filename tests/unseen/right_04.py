"""Film ratings by matrix factorisation plus a little net: Adagrad for the tables, Adam for
the rest, whose rate decays with every step."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

USERS, FILMS, RATINGS, BATCH = 30, 25, 240, 24


class Ratings(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(77)
        self.users = torch.randint(USERS, (RATINGS,), generator=g)
        self.films = torch.randint(FILMS, (RATINGS,), generator=g)
        taste = torch.randn(USERS, 3, generator=g)
        style = torch.randn(FILMS, 3, generator=g)
        self.stars = 3 + (taste[self.users] * style[self.films]).sum(1).clamp(-2, 2)

    def __len__(self):
        return RATINGS

    def __getitem__(self, index):
        return {
            "user": self.users[index],
            "film": self.films[index],
            "stars": self.stars[index],
        }


class Factorisation(nn.Module):
    def __init__(self, rank=8):
        super().__init__()
        self.user_table = nn.Embedding(USERS, rank)
        self.film_table = nn.Embedding(FILMS, rank)
        self.user_bias_table = nn.Embedding(USERS, 1)
        self.film_bias_table = nn.Embedding(FILMS, 1)
        self.net = nn.Sequential(nn.Linear(2 * rank, 16), nn.Tanh(), nn.Linear(16, 1))
        self.mean = nn.Parameter(torch.tensor(3.0))
        for table in (self.user_table, self.film_table):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias_table, self.film_bias_table):
            nn.init.zeros_(table.weight)

    def forward(self, user, film):
        u, f = self.user_table(user), self.film_table(film)
        bias = self.user_bias_table(user) + self.film_bias_table(film)
        deep = self.net(torch.cat([u, f], dim=1))
        return self.mean + (u * f).sum(1) + (bias + deep).squeeze(1)


@dataclass
class Optimizers:
    tables: torch.optim.Optimizer
    dense: torch.optim.Optimizer
    decay: torch.optim.lr_scheduler.LRScheduler

    def zero_grad(self):
        self.tables.zero_grad()
        self.dense.zero_grad()

    def step(self):
        self.tables.step()
        self.dense.step()
        self.decay.step()


def build_model():
    torch.manual_seed(6)
    return Factorisation()


def build_optimizer(model):
    tables, dense = [], []
    for name, parameter in model.named_parameters():
        (tables if "table" in name else dense).append(parameter)
    adam = torch.optim.Adam(dense, lr=1e-2)
    return Optimizers(
        tables=torch.optim.Adagrad(tables, lr=0.1, initial_accumulator_value=0.1),
        dense=adam,
        decay=torch.optim.lr_scheduler.ExponentialLR(adam, 0.98),
    )


def make_loader(rank, world_size, epoch):
    data = Ratings()
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    predicted = model(batch["user"], batch["film"])
    loss = nn.functional.mse_loss(predicted, batch["stars"].to(predicted.dtype))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
