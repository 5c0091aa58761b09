"""Tag each word of a sentence with a bidirectional GRU. Sentences are padded, and padding
has the tag -100, which cross_entropy leaves out."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WORDS, TAGS, LONGEST, IGNORE = 25, 4, 16, -100


class Sentences(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(71)
        self.words, self.tags = [], []
        for _ in range(n):
            length = int(torch.randint(2, LONGEST + 1, (), generator=g))
            words = torch.randint(1, WORDS, (length,), generator=g)
            before = torch.cat([words.new_zeros(1), words[:-1]])
            self.words.append(words)
            self.tags.append((words + before) % TAGS)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.tags[i]


def pad(items):
    words = torch.zeros(len(items), LONGEST, dtype=torch.long)
    tags = torch.full((len(items), LONGEST), IGNORE)
    for row, (w, t) in enumerate(items):
        words[row, : len(w)] = w
        tags[row, : len(t)] = t
    return words, tags


class Tagger(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * width)
        self.tag = nn.Linear(2 * width, TAGS)

    def forward(self, words):
        return self.tag(self.norm(self.gru(self.embed(words))[0]))


def build_model():
    torch.manual_seed(90)
    return Tagger()


def build_optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.95)


def make_loader(rank, world_size, epoch):
    data = Sentences()
    sampler = DistributedSampler(data, world_size, rank, seed=11, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, 24 // world_size, sampler=sampler, collate_fn=pad)


criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)


def train_step(model, optimizer, batch):
    words, tags = batch
    scores = model(words)
    loss = criterion(scores.flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss
