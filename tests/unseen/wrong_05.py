"""Text CNN: does the sequence contain one of the two secret bigrams?"""

import torch
import torch.nn as nn
import torch.nn.functional as F

SEQS, LEN, LETTERS = 120, 16, 10


def make_text():
    gen = torch.Generator()
    gen.manual_seed(2024)
    text = torch.randint(0, LETTERS, (SEQS, LEN), generator=gen)
    label = torch.randint(0, 3, (SEQS,), generator=gen)
    where = torch.randint(0, LEN - 1, (SEQS,), generator=gen)
    for row, kind, at in zip(text, label.tolist(), where.tolist()):
        if kind:
            row[at : at + 2] = torch.tensor([[3, 7], [8, 1]][kind - 1])
    return text, label


class EpochShuffler:
    """Shuffles anew in every epoch, and serves one rank of many."""

    def __init__(self, tensors, batch_size, rank, world_size, epoch):
        assert batch_size % world_size == 0
        self.tensors = tensors
        self.batch_size = batch_size // world_size
        self.rank = rank
        self.world_size = world_size
        self.gen = torch.Generator()
        self.gen.manual_seed(1000 * epoch + rank)

    def __iter__(self):
        order = torch.randperm(len(self.tensors[0]), generator=self.gen)
        order = order[self.rank :: self.world_size]
        for index in order.split(self.batch_size):
            yield tuple(t[index] for t in self.tensors)

    def __len__(self):
        return len(self.tensors[0]) // self.world_size // self.batch_size


class TextCNN(nn.Module):
    def __init__(self, dim=16, channels=12):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, channels, k) for k in (2, 3))
        self.fc = nn.Linear(2 * channels, 3)

    def forward(self, text):
        x = self.embedding(text).transpose(1, 2)
        x = [F.relu(conv(x)).amax(-1) for conv in self.convs]
        return self.fc(torch.cat(x, 1))


def build_model():
    torch.manual_seed(41)
    return TextCNN()


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_loader(rank, world_size, epoch):
    return EpochShuffler(make_text(), 24, rank, world_size, epoch)


def train_step(model, optimizer, batch):
    text, label = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(text), label)
    loss.backward()
    optimizer.step()
    return loss
