"""A long tail of classes, with logit adjustment: the logits are shifted by the log of the
class frequencies, of which the model keeps a running estimate."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 6


class RunningPrior(nn.Module):
    """Class frequencies as seen so far in the training."""

    def __init__(self, classes, momentum=0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("frequency", torch.full((classes,), 1 / classes))

    def forward(self, logits, labels):
        adjusted = logits + self.frequency.clamp(min=1e-4).log()
        if self.training:
            now = F.one_hot(labels, len(self.frequency)).to(logits.dtype).mean(0)
            self.frequency.lerp_(now, self.momentum)
        return adjusted


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(14, 40), nn.ELU(), nn.Linear(40, 24), nn.ELU()
        )
        self.classify = nn.Linear(24, CLASSES)
        self.prior = RunningPrior(CLASSES)

    def forward(self, x, labels):
        return F.cross_entropy(
            self.prior(self.classify(self.features(x)), labels), labels
        )


def build_model():
    torch.manual_seed(66)
    return Tail()


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def make_loader(rank, world_size, epoch):
    g = torch.Generator().manual_seed(15)
    chances = 0.5 ** torch.arange(CLASSES)
    labels = torch.multinomial(chances, 120, replacement=True, generator=g)
    x = torch.randn(CLASSES, 14, generator=g)[labels] + torch.randn(
        120, 14, generator=g
    )
    data = TensorDataset(x, labels)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=24 // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    loss = model(*batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
