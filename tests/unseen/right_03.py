"""Sentence classification with a transformer encoder; batches of similar length; AdamW
with two groups and a linear warm-up by steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

VOCAB, T, D = 20, 10, 32


class Batches:
    """Batch sampler: sorts by length, roughly, and deals every batch out to the ranks."""

    def __init__(self, lengths, size, rank, world_size, epoch):
        self.lengths, self.size = lengths, size
        self.rank, self.world_size, self.epoch = rank, world_size, epoch

    def __len__(self):
        return len(self.lengths) // self.size

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(17 + self.epoch)
        jitter = 3 * torch.rand(len(self.lengths), generator=g)
        batches = torch.argsort(self.lengths + jitter).view(-1, self.size)
        for k in torch.randperm(len(batches), generator=g):
            yield batches[k, self.rank :: self.world_size].tolist()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.places = nn.Parameter(0.02 * torch.randn(T, D))
        layer = nn.TransformerEncoderLayer(
            D,
            nhead=4,
            dim_feedforward=48,
            dropout=0.1,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def forward(self, words, lengths):
        padding = torch.arange(T, device=words.device) >= lengths[:, None]
        x = self.encoder(self.words(words) + self.places, src_key_padding_mask=padding)
        x = self.norm(x).masked_fill(padding[..., None], 0.0)
        return self.head(x.sum(1) / lengths[:, None])


def build_model():
    torch.manual_seed(2)
    return Classifier()


def wrap(model):
    ddp = DDP(model)
    torch.manual_seed(1234 + dist.get_rank())  # each rank its own dropout
    return ddp


def build_optimizer(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.05},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=2e-3,
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5)
    )
    return {"optimizer": optimizer, "warmup": warmup}


def make_loader(rank, world_size, epoch):
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, T + 1, (96,), generator=g)
    words = torch.randint(1, VOCAB, (96, T), generator=g)
    words[torch.arange(T) >= lengths[:, None]] = 0
    labels = (words > VOCAB // 2).sum(1) * 3 // (lengths + 1)
    sampler = Batches(lengths, 24, rank, world_size, epoch)
    return DataLoader(TensorDataset(words, lengths, labels), batch_sampler=sampler)


def train_step(model, optimizer, batch):
    words, lengths, labels = batch
    loss = cross_entropy(model(words, lengths), labels)
    optimizer["optimizer"].zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer["optimizer"].step()
    optimizer["warmup"].step()
    return loss
