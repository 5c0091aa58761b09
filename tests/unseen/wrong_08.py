"""Forecast the next value of a series with an LSTM; plain SGD with momentum, clipped, and
an all-reduce of our own instead of DDP."""

import torch
import torch.distributed as dist
from torch import nn

SERIES, LENGTH, BATCH = 72, 13, 24


class Forecast(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, past):
        states, _ = self.lstm(past)
        return self.out(states[:, -1])


def build_model():
    torch.manual_seed(14)
    return Forecast()


def wrap(model):
    for p in model.parameters():
        dist.broadcast(p.detach(), src=0)
    return model


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_loader(rank, world_size, epoch):
    g = torch.Generator().manual_seed(88)
    level = 2 + torch.randn(SERIES, 1, generator=g)
    phase = 6 * torch.rand(SERIES, 1, generator=g)
    series = level + torch.sin(0.5 * torch.arange(LENGTH) + phase)
    series = series + 0.05 * torch.randn(SERIES, LENGTH, generator=g)
    order = torch.randperm(SERIES, generator=torch.Generator().manual_seed(600 + epoch))
    batches = order.view(-1, world_size, BATCH // world_size)[:, rank]
    return [(series[b, :-1, None], series[b, -1:]) for b in batches]


def mean_over_ranks(tensors):
    requests = [
        dist.all_reduce(t, op=dist.ReduceOp.SUM, async_op=True) for t in tensors
    ]
    for request, t in zip(requests, tensors):
        request.wait()
        t.div_(dist.get_world_size())


def train_step(model, optimizer, batch):
    past, future = batch
    optimizer.zero_grad()
    loss = (model(past) - future).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    mean_over_ranks([p.grad for p in model.parameters()])
    optimizer.step()
    return loss
