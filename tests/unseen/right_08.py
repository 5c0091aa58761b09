"""A residual MLP on a table, sharded block by block with FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SHARDS = True

ROWS, COLUMNS, CLASSES = 96, 10, 5
WIDTH, DEPTH, BATCH = 32, 3, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(COLUMNS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model():
    torch.manual_seed(123)
    return Table()


def wrap(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build_optimizer(model):
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(adamw, start_factor=0.2, total_iters=4)
    return adamw, warmup


def make_loader(rank, world_size, epoch):
    g = torch.Generator().manual_seed(42)
    x = torch.randn(ROWS, COLUMNS, generator=g)
    y = (x @ torch.randn(COLUMNS, CLASSES, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, world_size, rank, seed=1)
    sampler.set_epoch(epoch)
    return DataLoader(data, BATCH // world_size, sampler=sampler)


def train_step(model, optimizer, batch):
    adamw, warmup = optimizer
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    warmup.step()
    adamw.zero_grad()
    return loss.detach()
