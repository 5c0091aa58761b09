"""Prices of flats: categories through embeddings, numbers through a norm, an MLP with
dropout on top. Three parameter groups, polynomial decay by steps."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DISTRICTS, HEATINGS = 9, 4
SEED = 2718


def flats(n=96):
    g = torch.Generator().manual_seed(10)
    district = torch.randint(DISTRICTS, (n,), generator=g)
    heating = torch.randint(HEATINGS, (n,), generator=g)
    numbers = torch.randn(n, 6, generator=g)
    worth = torch.randn(DISTRICTS, generator=g)
    price = worth[district] + 0.3 * heating + numbers @ torch.randn(6, generator=g)
    price = price + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([district, heating], 1), numbers, price)


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(DISTRICTS, 6)
        self.heating = nn.Embedding(HEATINGS, 3)
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.Sequential(
            nn.Linear(15, 48),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(48, 24),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(24, 1),
        )

    def forward(self, kinds, numbers):
        district, heating = kinds.unbind(1)
        parts = self.district(district), self.heating(heating), self.norm(numbers)
        return self.mlp(torch.cat(parts, 1)).squeeze(1)


def build_model():
    torch.manual_seed(SEED)
    return Prices()


def wrap(model):
    model = DDP(model)
    torch.manual_seed(SEED + 1)  # from here on, the numbers of the training
    return model


def build_optimizer(model):
    groups = {"tables": [], "weights": [], "rest": []}
    for name, p in model.named_parameters():
        if "district" in name or "heating" in name:
            groups["tables"].append(p)
        else:
            groups["weights" if p.dim() == 2 else "rest"].append(p)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups["tables"], "lr": 2e-2, "weight_decay": 0.0},
            {"params": groups["weights"], "weight_decay": 0.02},
            {"params": groups["rest"], "weight_decay": 0.0},
        ],
        lr=4e-3,
    )
    return optimizer, torch.optim.lr_scheduler.PolynomialLR(
        optimizer, total_iters=60, power=0.9
    )


def make_loader(rank, world_size, epoch):
    data = flats()
    sampler = DistributedSampler(data, world_size, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=24 // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    optimizer, decay = optimizer
    kinds, numbers, price = batch
    loss = nn.functional.smooth_l1_loss(model(kinds, numbers), price)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    decay.step()
    return loss
