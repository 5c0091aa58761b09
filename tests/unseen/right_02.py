# A character model on lines of different length. The loss is the mean over all characters
# of the global batch, so the padding of one rank does not weigh more than another's.
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, PAD, LENGTH = 18, 0, 15
LINES, GLOBAL_BATCH = 72, 24


def corpus():
    g = torch.Generator().manual_seed(21)
    lines = torch.zeros(LINES, LENGTH, dtype=torch.long)
    for line in lines:
        n = int(torch.randint(4, LENGTH + 1, (), generator=g))
        c = int(torch.randint(1, VOCAB, (), generator=g))
        for k in range(n):
            line[k] = c
            jump = int(torch.randint(0, 5, (), generator=g)) == 0
            c = (c * 5 + 3 + int(jump)) % (VOCAB - 1) + 1
    return lines


class CharGRU(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCAB)
        self.out.weight = self.table.weight  # tied

    def forward(self, chars):
        hidden, _ = self.gru(self.table(chars))
        return self.out(hidden)


def build_model():
    torch.manual_seed(4)
    model = CharGRU()
    nn.init.normal_(model.table.weight, std=0.3)
    return model


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))


def make_loader(rank, world_size, epoch):
    lines = corpus()
    order = torch.randperm(LINES, generator=torch.Generator().manual_seed(900 + epoch))
    share = GLOBAL_BATCH // world_size
    for start in range(0, LINES, GLOBAL_BATCH):
        mine = order[start + rank * share : start + (rank + 1) * share]
        yield lines[mine]


def train_step(model, optimizer, batch):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs)
    total = F.cross_entropy(
        logits.reshape(-1, VOCAB),
        targets.reshape(-1),
        ignore_index=PAD,
        reduction="sum",
    )
    count = (targets != PAD).sum().to(logits.dtype)
    dist.all_reduce(count)
    # DDP divides by the number of ranks, which the whole batch's count has done already
    loss = total * dist.get_world_size() / count

    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()
