"""Slope of a grating, by a tiny MLP-Mixer with stochastic depth. Gradients are averaged by
hand in one flat piece, and the rate is set by hand as well."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SIDE, PATCH = 8, 4
TOKENS, CHANNELS = (SIDE // PATCH) ** 2, PATCH * PATCH
PICTURES, BATCH = 60, 12


class DropPath(nn.Module):
    """Skips the branch for some pictures."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep)
        return x * mask / keep


class MixerBlock(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(TOKENS, 16), nn.GELU(), nn.Linear(16, TOKENS)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)
        )
        self.drop = DropPath(drop)

    def forward(self, x):
        x = x + self.drop(self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop(self.channels(self.norm2(x)))


class Mixer(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Linear(CHANNELS, width)
        self.blocks = nn.Sequential(MixerBlock(width, 0.1), MixerBlock(width, 0.2))
        self.head = nn.Linear(width, 2)

    def forward(self, pictures):
        n = pictures.shape[0]
        patches = pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        x = self.stem(patches.reshape(n, TOKENS, CHANNELS))
        return self.head(self.blocks(x).mean(1))


class Loader:
    def __init__(self, rank, world_size, epoch):
        g = torch.Generator().manual_seed(64)
        angle = 3.14 * torch.rand(PICTURES, generator=g)
        self.targets = torch.stack([torch.cos(2 * angle), torch.sin(2 * angle)], 1)
        row = torch.arange(SIDE)[None, :, None]
        column = torch.arange(SIDE)[None, None, :]
        a = angle[:, None, None]
        self.pictures = torch.sin(row * torch.sin(a) + column * torch.cos(a))
        self.pictures += 0.1 * torch.randn(PICTURES, SIDE, SIDE, generator=g)
        self.order = torch.randperm(
            PICTURES, generator=torch.Generator().manual_seed(7 * epoch)
        )
        self.share = BATCH // world_size
        self.first = rank * self.share

    def __len__(self):
        return PICTURES // BATCH

    def __iter__(self):
        for step in range(len(self)):
            begin = step * BATCH + self.first
            index = self.order[begin : begin + self.share]
            yield self.pictures[index], self.targets[index]


class Training:
    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.sgd = torch.optim.SGD(self.parameters, lr=0.0, momentum=0.9, nesterov=True)
        self.steps = 0

    def rate(self):
        s = self.steps + 1
        return 0.08 * min(s / 4, (4 / s) ** 0.5)

    @torch.no_grad()
    def average_gradients(self):
        grads = [p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(piece.view_as(g))

    def update(self, loss):
        self.sgd.zero_grad()
        loss.backward()
        self.average_gradients()
        nn.utils.clip_grad_norm_(self.parameters, 2.0)
        for group in self.sgd.param_groups:
            group["lr"] = self.rate()
        self.sgd.step()
        self.steps += 1


def build_model():
    torch.manual_seed(55)
    return Mixer()


def wrap(model):
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    torch.manual_seed(70 + dist.get_rank())
    return model


build_optimizer = Training
make_loader = Loader


def train_step(model, optimizer, batch):
    pictures, targets = batch
    loss = F.smooth_l1_loss(model(pictures), targets)
    optimizer.update(loss)
    return loss
