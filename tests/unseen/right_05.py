"""Denoising autoencoder. The noise is drawn in the step, an average of the weights is kept
in a closure, and the optimizer is a function that does all that follows the loss."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

STEPS_PER_EPOCH, BATCH, SIZE = 5, 12, 20


def build_model():
    torch.manual_seed(31)
    encoder = nn.Sequential(nn.Linear(SIZE, 32), nn.GELU(), nn.Linear(32, 4))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, SIZE))
    return nn.Sequential(encoder, decoder)


def wrap(model):
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(10_000 * (dist.get_rank() + 1))
    return wrapped


def build_optimizer(model, decay=0.95):
    adam = optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)
    cosine = optim.lr_scheduler.CosineAnnealingLR(adam, T_max=6 * STEPS_PER_EPOCH)
    average = [p.detach().clone() for p in model.parameters()]

    def descend(loss):
        adam.zero_grad()
        loss.backward()
        adam.step()
        cosine.step()
        with torch.no_grad():
            for slow, p in zip(average, model.parameters()):
                slow.lerp_(p, 1 - decay)

    descend.average = average
    return descend


def make_loader(rank, world_size, epoch):
    g = torch.Generator().manual_seed(1)
    phase = 6.28 * torch.rand(STEPS_PER_EPOCH * BATCH, 1, generator=g)
    speed = 0.2 + 0.4 * torch.rand(STEPS_PER_EPOCH * BATCH, 1, generator=g)
    waves = torch.sin(phase + speed * torch.arange(SIZE))
    shuffled = waves[torch.randperm(len(waves), generator=g.manual_seed(50 + epoch))]
    return [batch.chunk(world_size)[rank] for batch in shuffled.split(BATCH)]


def train_step(model, optimizer, batch):
    noisy = batch + 0.3 * torch.randn_like(batch)
    loss = (model(noisy) - batch).square().mean()
    optimizer(loss)
    return loss
