"""Striped pictures: a small conv net with GroupNorm, flips and shifts, one-cycle rate."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4
BATCH = 24
EPOCHS = 12


class Stripes(Dataset):
    """Noisy 12x12 pictures; the class says which three rows are bright."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, CLASSES, (n,), generator=g)
        self.images = 0.5 * torch.randn(n, 1, 12, 12, generator=g)
        for image, label in zip(self.images, self.labels.tolist()):
            image[:, 3 * label : 3 * label + 3] += 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image.roll(random.randint(-2, 2), dims=-1)
        return image, self.labels[i]


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(4, b), nn.ReLU()
    )


def build_model():
    torch.manual_seed(11)
    return nn.Sequential(
        block(1, 8),
        nn.AvgPool2d(2),
        block(8, 16),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 9, CLASSES),
    )


def wrap(model):
    model = DistributedDataParallel(model)
    # the weights are the same everywhere, the flips shall not be
    random.seed(500 + dist.get_rank())
    torch.manual_seed(500 + dist.get_rank())
    return model


def build_optimizer(model):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=96 // BATCH
    )
    return optimizer, schedule


def make_loader(rank, world_size, epoch):
    data = Stripes()
    sampler = DistributedSampler(
        data, num_replicas=world_size, rank=rank, shuffle=True, seed=8
    )
    sampler.set_epoch(epoch)
    return DataLoader(
        data, batch_size=BATCH // world_size, sampler=sampler, drop_last=True
    )


criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def train_step(model, optimizer, batch):
    optimizer, schedule = optimizer
    images, labels = batch
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss
