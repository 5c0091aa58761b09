"""Metric learning: triplets of noisy vectors, one embedding net, triplet margin loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Triplets(Dataset):
    KINDS = 6

    def __init__(self, size=96, dim=12):
        rng = torch.Generator().manual_seed(500)
        kind = torch.randint(0, self.KINDS, (size,), generator=rng)
        other = (
            kind + torch.randint(1, self.KINDS, (size,), generator=rng)
        ) % self.KINDS
        centre = torch.randn(self.KINDS, dim, generator=rng)

        def sample(k):
            return centre[k] + 0.8 * torch.randn(size, dim, generator=rng)

        self.items = list(zip(sample(kind), sample(kind), sample(other)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Embedder(nn.Module):
    def __init__(self, dim=12, hidden=40, out=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.LeakyReLU(0.1),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.1),
        )
        self.project = nn.Linear(hidden, out)

    def forward(self, x):
        return self.project(self.body(x))

    def embed(self, x):
        """Embeddings on the unit sphere."""
        return F.normalize(self(x), dim=-1)


def build_model():
    torch.manual_seed(77)
    return Embedder()


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)


def make_loader(rank, world_size, epoch):
    data = Triplets()
    sampler = DistributedSampler(
        data, num_replicas=world_size, rank=rank, shuffle=True, seed=9
    )
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=24 // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    net = model.module if hasattr(model, "module") else model  # `embed` is not DDP's
    anchor, positive, negative = (net.embed(part) for part in batch)
    loss = F.triplet_margin_loss(anchor, positive, negative, margin=0.5)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.item()
