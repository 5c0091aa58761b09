"""Mean teacher: the teacher is a moving average of the student, kept in buffers. Mixing and
noise are drawn from a generator of the item, so that it does not matter who loads it."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

ITEMS, SIZE, CLASSES, BATCH = 100, 16, 4, 24


class Mixed(Dataset):
    def __init__(self, epoch):
        g = torch.Generator().manual_seed(19)
        centres = torch.randn(CLASSES, SIZE, generator=g)
        self.labels = torch.randint(CLASSES, (ITEMS,), generator=g)
        self.points = centres[self.labels] + 0.6 * torch.randn(ITEMS, SIZE, generator=g)
        self.epoch = epoch

    def __len__(self):
        return ITEMS

    def target(self, i):
        return F.one_hot(self.labels[i], CLASSES).to(self.points.dtype)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * ITEMS + i)
        j = int(torch.randint(ITEMS, (), generator=g))
        share = 0.7 + 0.3 * torch.rand((), generator=g)
        point = share * self.points[i] + (1 - share) * self.points[j]
        target = share * self.target(i) + (1 - share) * self.target(j)
        strong = point + 0.4 * torch.randn(SIZE, generator=g)
        return point, strong, target


class Share(Sampler):
    """This rank's share of each batch of another batch sampler."""

    def __init__(self, batches, rank, world_size):
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def __iter__(self):
        for batch in self.batches:
            yield batch[self.rank :: self.world_size]

    def __len__(self):
        return len(self.batches)


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(SIZE, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, CLASSES)
        )
        for name, p in self.student.named_parameters():
            self.register_buffer(self.place(name), p.detach().clone())

    @staticmethod
    def place(name):
        return "teacher_" + name.replace(".", "_")

    def forward(self, weak, strong):
        teacher = {
            n: getattr(self, self.place(n)) for n, _ in self.student.named_parameters()
        }
        with torch.no_grad():
            believed = functional_call(self.student, teacher, (weak,))
        return self.student(strong), believed

    @torch.no_grad()
    def teach(self, momentum=0.9):
        for name, p in self.student.named_parameters():
            getattr(self, self.place(name)).mul_(momentum).add_(p, alpha=1 - momentum)


def build_model():
    torch.manual_seed(8)
    return MeanTeacher()


def build_optimizer(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.NAdam(trained, lr=3e-3)


def make_loader(rank, world_size, epoch):
    data = Mixed(epoch)
    everybody = BatchSampler(
        RandomSampler(data, generator=torch.Generator().manual_seed(200 + epoch)),
        batch_size=BATCH,
        drop_last=True,
    )
    return DataLoader(data, batch_sampler=Share(everybody, rank, world_size))


def train_step(model, optimizer, batch):
    weak, strong, target = batch
    logits, believed = model(weak, strong)
    classify = F.cross_entropy(logits, target)
    agree = F.mse_loss(logits.softmax(-1), believed.softmax(-1))
    loss = classify + 2.0 * agree
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    getattr(model, "module", model).teach()
    return loss
