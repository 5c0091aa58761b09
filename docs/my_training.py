"""A training as `python -m utils.parity` wants it: put yours into these functions.

python -m utils.parity docs/my_training.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def build_optimizer(model):
    # or several, as (optimizer, scheduler): train_step gets what this returns
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_loader(rank, world_size, epoch):
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(data, data.sum(1, keepdim=True))
    sampler = DistributedSampler(data, world_size, rank)
    sampler.set_epoch(epoch)
    # 2 and 3 workers, which the tool starts, share a batch of 6 equally
    return DataLoader(data, 6 // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
