"""Learn which way a text runs, on one device: the script of the workshop's last exercise.

python which_way.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from utils.datasets import text

EPOCHS, BATCH_SIZE, LR = 20, 64, 0.3
texts = TensorDataset(text("train", block_size=32).tensors[0][:512])  # [512, 32] bytes


class Direction(nn.Module):
    """Say of each text whether it was turned around: above 0 if so."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.look = nn.Conv1d(16, 32, kernel_size=5)
        self.answer = nn.Linear(32, 1)

    def forward(self, texts):  # [n, 32]
        found = self.look(self.embed(texts).transpose(1, 2)).relu()  # [n, 32, 28]
        return self.answer(found.amax(2)).squeeze(1)


def train():
    """Train from start to end; returns which part of the last epoch was right."""
    torch.manual_seed(0)
    model = Direction()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    seen = 0
    for epoch in range(EPOCHS):
        right = 0
        order = torch.Generator().manual_seed(epoch)
        sampler = RandomSampler(texts, generator=order)
        for (batch,) in DataLoader(texts, BATCH_SIZE, sampler=sampler):
            turned = torch.rand(len(batch)) < 0.5  # half of them, by chance
            batch = torch.where(turned[:, None], batch.flip(1), batch)
            seen += len(batch)
            optimizer.param_groups[0]["lr"] = LR * min(1, seen / 1024)  # warms up
            optimizer.zero_grad()
            # in pieces, to save memory
            for some, label in zip(batch.split(16), turned.split(16)):
                logits = model(some)
                losses = F.binary_cross_entropy_with_logits(
                    logits, label.to(logits.dtype), reduction="sum"
                )
                (losses / len(batch)).backward()
                right += ((logits > 0) == label).sum().item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return right / len(texts)


if __name__ == "__main__":
    print(f"{train():.0%} of the last epoch's texts were right")
