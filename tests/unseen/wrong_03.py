"""Point clouds: is it a ball, a shell or a ring? A deep set with a max and a mean."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class CloudData:
    """The data module of the project: it knows the clouds, and how to deal them out."""

    clouds, points, batch_size = 96, 20, 24

    def __init__(self, seed=0):
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(self.clouds, self.points, 3, generator=rng)
        kind = torch.arange(self.clouds) % 3
        unit = x / x.norm(dim=-1, keepdim=True)
        flat = x * torch.tensor([1.0, 1.0, 0.05])
        ring = flat / flat.norm(dim=-1, keepdim=True)
        ball = unit * torch.rand(self.clouds, self.points, 1, generator=rng)
        every = torch.stack([ball, unit, ring])
        chosen = every[kind, torch.arange(self.clouds)]
        chosen = chosen + 0.1 * torch.randn(chosen.shape, generator=rng)
        self.dataset = TensorDataset(chosen, kind)

    def train_dataloader(self, rank, world_size):
        sampler = DistributedSampler(
            self.dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            drop_last=True,
        )
        return DataLoader(self.dataset, self.batch_size // world_size, sampler=sampler)


class DeepSet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(3, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width)
        )
        self.all = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3)
        )

    def forward(self, cloud):
        each = self.each(cloud)
        return self.all(torch.cat([each.mean(1), each.amax(1)], -1))


def build_model():
    torch.manual_seed(12)
    return DeepSet()


def wrap(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)


def make_loader(rank, world_size, epoch):
    return CloudData(seed=4).train_dataloader(rank, world_size)


def train_step(model, optimizer, batch):
    cloud, kind = batch
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(cloud), kind)
    loss.backward()
    optimizer.step()
    return loss
