"""Message passing on small graphs with a dense adjacency. No DDP: a hook on each parameter
averages its gradient as soon as it is there."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NODES, FEATURES, GRAPHS, BATCH = 7, 5, 60, 12


def graphs():
    g = torch.Generator().manual_seed(13)
    size = torch.randint(3, NODES + 1, (GRAPHS,), generator=g)
    there = torch.arange(NODES) < size[:, None]
    x = torch.randn(GRAPHS, NODES, FEATURES, generator=g) * there[..., None]
    edges = torch.rand(GRAPHS, NODES, NODES, generator=g) < 0.4
    edges = (edges | edges.transpose(1, 2)) & there[:, None] & there[:, :, None]
    edges &= ~torch.eye(NODES, dtype=torch.bool)
    adjacency = edges.to(x.dtype)
    target = (adjacency * (x[..., 0][:, :, None] * x[..., 1][:, None])).sum(
        (1, 2)
    ) / size
    return TensorDataset(x, adjacency, there, target)


class Round(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.own = nn.Linear(a, b)
        self.neighbours = nn.Linear(a, b, bias=False)

    def forward(self, h, adjacency):
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        return torch.relu(self.own(h) + self.neighbours(adjacency @ h / degree))


class GraphNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.rounds = nn.ModuleList([Round(FEATURES, width), Round(width, width)])
        self.read = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x, adjacency, there):
        for one in self.rounds:
            x = one(x, adjacency)
        there = there[..., None].to(x.dtype)
        return self.read((x * there).sum(1) / there.sum(1)).squeeze(-1)


def build_model():
    torch.manual_seed(99)
    return GraphNet()


def wrap(model):
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)

    def average(parameter):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad.div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)


def make_loader(rank, world_size, epoch):
    order = torch.randperm(
        GRAPHS, generator=torch.Generator().manual_seed(epoch)
    ).tolist()
    batches = [order[i : i + BATCH] for i in range(0, GRAPHS, BATCH)]
    mine = [batch[rank::world_size] for batch in batches]
    return DataLoader(graphs(), batch_sampler=mine)


def train_step(model, optimizer, batch):
    x, adjacency, there, target = batch
    loss = nn.functional.huber_loss(model(x, adjacency, there), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
