"""Restore digits that have a hole, on one device: the script that lesson 03/07 moves.

python restore_digits.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from utils.datasets import digits

EPOCHS, BATCH_SIZE, LR, CLIP = 40, 64, 1e-2, 0.1
HOLE = 10  # pixels along each edge
images, _ = digits("train").tensors
train_set = TensorDataset(images[:256])  # [256, 1, 28, 28], no labels
test_images = digits("test").tensors[0]  # [360, 1, 28, 28]
STEPS = len(train_set) // BATCH_SIZE  # of an epoch


class Restorer(nn.Module):
    """Draw a whole digit, given one with a hole."""

    def __init__(self, width=64):
        super().__init__()
        self.read = nn.Linear(28 * 28, width)
        layers = [nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()]
        self.block = nn.Sequential(*layers, nn.Linear(2 * width, width))
        self.draw = nn.Linear(width, 28 * 28)

    def forward(self, images):  # [n, 1, 28, 28]
        hidden = self.read(images.flatten(1))
        drawn = self.draw(hidden + self.block(hidden))
        return drawn.view_as(images).sigmoid()  # pixels are from 0 to 1


def cut_hole(whole, corner=None):
    """Cut a hole out of each image: anywhere by chance, or with its corner at [n, 2, 1]."""
    if corner is None:
        corner = (torch.rand(len(whole), 2, 1) * (29 - HOLE)).long()
    at = torch.arange(28)
    rows, columns = ((at >= corner) & (at < corner + HOLE)).unbind(1)  # [n, 28] each
    hole = rows[:, :, None] & columns[:, None, :]
    return whole.masked_fill(hole[:, None], 0.0)


def loss_of(restored, whole):
    """Compare pixels, and the edges between neighbours in a row."""
    edges = F.smooth_l1_loss(restored.diff(dim=-1), whole.diff(dim=-1), beta=0.1)
    return F.smooth_l1_loss(restored, whole, beta=0.1) + edges


@torch.no_grad()
def squared_errors(model, images):
    """Return their sum, with the hole in the middle, and the number of pixels."""
    middle = torch.full((len(images), 2, 1), 14 - HOLE // 2)
    error = ((model(cut_hole(images, middle)) - images) ** 2).sum(dtype=torch.float64)
    return torch.stack([error, torch.tensor(images.numel())])


def decibels(sums):
    """Return the peak signal-to-noise ratio: higher is better."""
    return -10 * (sums[0] / sums[1]).log10().item()


def train(file):
    """Train from start to end, and save the weights."""
    torch.manual_seed(0)
    model = Restorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = OneCycleLR(optimizer, LR, total_steps=EPOCHS * STEPS)
    for epoch in range(EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        sampler = RandomSampler(train_set, generator=order)
        for (whole,) in DataLoader(train_set, BATCH_SIZE, sampler=sampler):
            loss = loss_of(model(cut_hole(whole)), whole)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
    torch.save(model.state_dict(), file)
    return model


if __name__ == "__main__":
    model = train("restorer.pt")
    print(f"{decibels(squared_errors(model, test_images)):.1f} dB")
