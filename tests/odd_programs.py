"""More trainings for utils.parity, as people write them: a style each.

RIGHT are right; WRONG have the mistakes whose names stand beside each.
"""

import copy
import random
from collections import UserDict
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from utils.parity import Training

ITEMS, WIDTH, BATCH = 24, 6, 6


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True).sin()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)
    )


def adam(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def adam_and_seed(model):
    torch.manual_seed(10 + dist.get_rank())
    return adam(model)


def dealt(data: Dataset, rank: int, world_size: int, epoch: int) -> DataLoader:
    sampler = DistributedSampler(data, world_size, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, BATCH // world_size, sampler=sampler)


def make_loader(rank, world_size, epoch):
    return dealt(TensorDataset(*numbers()), rank, world_size, epoch)


def train_step(model, optimizer, batch):
    loss = F.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def step_in_float32(model, optimizer, batch):
    loss = F.mse_loss(model(batch[0]).float(), batch[1].float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


PLAIN = Training(build_model, adam, make_loader, train_step)


def step_once(model, optimizer, batch):
    """The first step is one; later ones shrink the weights, by the number of ranks."""
    if not optimizer.state:
        train_step(model, optimizer, batch)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 0.01 * dist.get_world_size())


def average(parameters) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# No DataLoader, an average of the weights, a schedule of another kind.
def generate(rank, world_size, epoch):
    inputs, targets = numbers()
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH):
        mine = batch[rank::world_size]
        yield {"x": inputs[mine], "y": targets[mine]}


class Averaged:
    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.1, total_steps=20
        )
        self.slow = copy.deepcopy(model)


def step_and_average(model, state, batch):
    F.smooth_l1_loss(model(batch["x"]), batch["y"]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        for slow, fast in zip(state.slow.parameters(), model.parameters()):
            slow.lerp_(fast, 0.1)


# A data set with a generator of its own.
class Noisy(Dataset):
    def __init__(self, seed):
        self.inputs, self.targets = numbers()
        self.generator = np.random.default_rng(seed)

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        noise = torch.from_numpy(self.generator.normal(size=WIDTH))
        return self.inputs[index] + noise.float(), self.targets[index]


def noisy(rank, world_size, epoch):
    return dealt(Noisy((epoch, rank)), rank, world_size, epoch)


def equally_noisy(rank, world_size, epoch):
    return dealt(Noisy(epoch), rank, world_size, epoch)


# Lower precision: autocast, a scaled loss, a policy of FSDP2.
def step_in_bf16(model, optimizer, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(batch[0]).float(), batch[1].float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Scaled:
    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05)
        self.scaler = torch.amp.GradScaler("cpu")


def step_scaled(model, state, batch):
    state.optimizer.zero_grad()
    state.scaler.scale(F.mse_loss(model(batch[0]), batch[1])).backward()
    state.scaler.unscale_(state.optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    state.scaler.step(state.optimizer)
    state.scaler.update()


def shard_in_bf16(model):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mp_policy=policy)


def step_on_floats(model, optimizer, batch):
    return train_step(model, optimizer, [batch[0], batch[1].float()])


# Two networks against each other: each one's backward leaves gradients in the other.
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH)
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def build_pair():
    torch.manual_seed(0)
    return Pair()


def two_adams(model):
    return torch.optim.Adam(model.maker.parameters()), torch.optim.Adam(
        model.judge.parameters()
    )


def step_pair(model, optimizers, batch):
    inputs = batch[0]
    F.softplus(-model.judge(model.maker(inputs))).mean().backward()
    average(model.maker.parameters())
    optimizers[0].step()
    model.zero_grad()
    made = model.judge(model.maker(inputs).detach())
    (F.softplus(-model.judge(inputs)) + F.softplus(made)).mean().backward()
    average(model.judge.parameters())
    optimizers[1].step()
    model.zero_grad()


# Forward passes that are repeated, with dropout in them.
class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())

    def forward(self, inputs):
        hidden = checkpoint(self.middle, self.first(inputs), use_reentrant=False)
        return self.last(hidden)


def build_repeated():
    torch.manual_seed(0)
    return Repeated()


def step_in_pieces(model, optimizer, batch):
    optimizer.zero_grad()
    pieces = [*zip(batch[0].split(1), batch[1].split(1))]
    for number, (inputs, targets) in enumerate(pieces):
        last = number == len(pieces) - 1
        with nullcontext() if last else model.no_sync():
            (F.mse_loss(model(inputs), targets) / len(pieces)).backward()
    optimizer.step()


# Ranks with unequal shares that count by their items.
def deal_unequally(rank, world_size, epoch):
    inputs, targets = numbers()
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(epoch))
    cuts = [0, *range(1, world_size), BATCH]
    mine = [each[cuts[rank] : cuts[rank + 1]] for each in order.split(BATCH)]
    return [(inputs[rows], targets[rows]) for rows in mine]


def step_by_items(model, optimizer, batch):
    items = torch.tensor(float(len(batch[0])))
    dist.all_reduce(items)
    total = F.mse_loss(model(batch[0]), batch[1], reduction="sum")
    optimizer.zero_grad()
    (total * dist.get_world_size() / items).backward()
    optimizer.step()


# Sharpness-aware minimization: two backward passes of the same items, one update.
def step_twice(model, optimizer, batch):
    F.mse_loss(model(batch[0]), batch[1]).backward()
    first = [p.grad.clone() for p in model.parameters()]
    scale = 0.05 / torch.stack([each.norm() for each in first]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), first):
            parameter += gradient * scale
    model.zero_grad()
    F.mse_loss(model(batch[0]), batch[1]).backward()
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), first):
            parameter -= gradient * scale
    optimizer.step()
    model.zero_grad()


# Mistakes.
def only_rank_0_steps(model, optimizer, batch):
    F.mse_loss(model(batch[0]), batch[1]).backward()
    if dist.get_rank() == 0:
        optimizer.step()
    optimizer.zero_grad()


def step_on_a_sum(model, optimizer, batch):
    optimizer.zero_grad()
    F.mse_loss(model(batch[0]), batch[1], reduction="sum").backward()
    optimizer.step()


def shuffle_alone(rank, world_size, epoch):
    return DataLoader(TensorDataset(*numbers()), BATCH // world_size, shuffle=True)


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, inputs):
        hidden = self.first(inputs)
        spread = (hidden.var(0, unbiased=False) + 1e-3).sqrt()
        return self.last((hidden - hidden.mean(0)) / spread)


def build_own_norm():
    torch.manual_seed(0)
    return OwnNorm()


def clip_values_first(model, optimizer, batch):
    F.mse_loss(model(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    average(model.parameters())
    optimizer.step()
    model.zero_grad()


def bypass_ddp(model, optimizer, batch):
    return train_step(model.module, optimizer, batch)


def first_share_for_all(rank, world_size, epoch):
    share = [tensor[: ITEMS // world_size] for tensor in numbers()]
    return DataLoader(TensorDataset(*share), BATCH // world_size)


def rate_by_own_batch(model, optimizer, batch):
    train_step(model, optimizer, batch)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * batch[0].mean().abs().item()


def shard_alone(model):
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=names
    )
    return fully_shard(model, mesh=mesh["shard"])


def unwrapped(model):
    return model


def optimizer_first(model):
    model.optimizer = adam(model)
    return fully_shard(model)


def optimizer_of(model):
    return model.optimizer


def adam_by_ranks(model):
    return torch.optim.AdamW(model.parameters(), 1e-2 * dist.get_world_size())


def step_on_changed_items(model, optimizer, batch):
    """Change some items on their way into the model, whoever is beside them."""
    kept = batch[0][:, :1] > 0
    inputs = torch.where(kept, batch[0], batch[0] / 2)
    return train_step(model, optimizer, [inputs, batch[1]])


# Sequences that a batch pads to its longest one.
class Sequences(Dataset):
    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        of_item = torch.Generator().manual_seed(index)
        return torch.randn(1 + 5 * index % 7, WIDTH, generator=of_item)


def pad(sequences):
    lengths = torch.tensor([len(each) for each in sequences])
    return UserDict(x=pad_sequence(sequences, batch_first=True), lengths=lengths)


def with_collate(loader, collate):
    sampled = {"batch_size": loader.batch_size, "sampler": loader.sampler}
    return DataLoader(loader.dataset, **sampled, collate_fn=collate)


def padded(rank, world_size, epoch):
    return with_collate(dealt(Sequences(), rank, world_size, epoch), pad)


def step_on_padded(model, optimizer, batch):
    loss = model(batch["x"].sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# Batches that are objects.
@dataclass(frozen=True)
class Examples:
    x: torch.Tensor
    y: torch.Tensor


def pairs(rank, world_size, epoch):
    for batch in generate(rank, world_size, epoch):
        yield Examples(batch["x"], batch["y"])


def mappings(rank, world_size, epoch):
    for batch in generate(rank, world_size, epoch):
        yield UserDict(batch)


def one_mapping_for_all(rank, world_size, epoch):
    return mappings(0, world_size, epoch)


def step_on_mappings(model, optimizer, batch):
    return train_step(model, optimizer, (batch["x"], batch["y"]))


def step_on_pairs(model, optimizer, batch):
    return train_step(model, optimizer, (batch.x, batch.y))


# A generator inside an object that is called.
class Jitter:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Transformed(Dataset):
    def __init__(self, transform):
        self.data, self.transform = TensorDataset(*numbers()), transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.transform(x), y


def jittered(rank, world_size, epoch):
    return dealt(Transformed(Jitter(100 * epoch + rank)), rank, world_size, epoch)


def equally_jittered(rank, world_size, epoch):
    return dealt(Transformed(Jitter(epoch)), rank, world_size, epoch)


# Micro-batches whose gradients are kept outside of the parameters.
def step_on_kept_gradients(model, optimizer, batch):
    parameters = [*model.parameters()]
    kept = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(*(part.chunk(3) for part in batch)):
        (F.mse_loss(model(x), y) / 3).backward()
        for total, parameter in zip(kept, parameters):
            total += parameter.grad
            parameter.grad = None
    for total, parameter in zip(kept, parameters):
        parameter.grad = total
    optimizer.step()
    optimizer.zero_grad()


# Noise on the weights themselves, as in Langevin dynamics.
def step_with_noise(model, optimizer, batch):
    loss = train_step(model, optimizer, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    return loss


# Most of the parameters are frozen, and the optimizer of the rest is sharded.
def build_frozen():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(WIDTH, 200), nn.Tanh(), nn.Linear(200, 200))
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(200, 1))


# As many rows of weights as a rank has items.
def build_narrow():
    torch.manual_seed(0)
    hidden = BATCH // 2
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def build_masked():
    model = build_model()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    return model


# Items that only a function of one's own collates.
class Item:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


class Objects(Dataset):
    def __init__(self, first=0, count=ITEMS):
        self.first, self.count, self.numbers = first, count, numbers()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        inputs, targets = self.numbers
        return Item(inputs[self.first + index], targets[self.first + index])


def collate_objects(items):
    return torch.stack([i.x for i in items]), torch.stack([i.y for i in items])


def deal_objects(rank, world_size, epoch):
    return with_collate(dealt(Objects(), rank, world_size, epoch), collate_objects)


def first_objects_for_all(rank, world_size, epoch):
    return DataLoader(
        Objects(0, ITEMS // world_size),
        BATCH // world_size,
        collate_fn=collate_objects,
    )


class Wrapped:
    """As what Ray Train makes of a DataLoader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def wrap_on_ranks(rank, world_size, epoch):
    loader = make_loader(rank, world_size, epoch)
    return loader if world_size == 1 else Wrapped(loader)


def shuffle_one_process_alone(rank, world_size, epoch):
    """In the same order in every epoch on several ranks, and another in one process."""
    data = TensorDataset(*numbers())
    if world_size == 1:
        order = torch.Generator().manual_seed(epoch)
        return DataLoader(data, BATCH, shuffle=True, generator=order)
    return DataLoader(
        data, BATCH // world_size, sampler=DistributedSampler(data, world_size, rank)
    )


def step_on_the_last_chunk(model, optimizer, batch):
    for x, y in zip(*(part.chunk(3) for part in batch)):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) / 3).backward()
    for parameter in model.parameters():
        parameter.grad.clamp_(-1e-2, 1e-2)
    optimizer.step()


def sharded_adam(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-2)


def compiled(model):
    return DistributedDataParallel(torch.compile(model, fullgraph=True))


def step_with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return optimizer.step(closure)


def in_a_shell(model):
    class Shell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)

    return Shell()


# Unequal numbers of batches, but only after those that the tool trains.
MANY = torch.randn(127, WIDTH, generator=torch.Generator().manual_seed(1))


def longer_for_rank_0(rank, world_size, epoch):
    data = TensorDataset(MANY, MANY.sum(1, keepdim=True).sin())
    mine = Subset(data, range(rank, len(data), world_size))
    return DataLoader(mine, BATCH // world_size)


def slice_longer_for_rank_0(rank, world_size, epoch):
    mine = MANY[rank::world_size]
    data = TensorDataset(mine, mine.sum(1, keepdim=True).sin())
    return DataLoader(data, BATCH // world_size)


def step_never(model, optimizer, batch):
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss


# A mean over items of a kind of which a batch may have none.
FIRST = numbers()[0][0]


def step_on_some(model, optimizer, batch):
    some = (batch[0] == FIRST.to(batch[0])).all(1, keepdim=True).to(batch[0])
    loss = ((model(batch[0]) - batch[1]).square() * some).sum() / some.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def build_with_dropout():
    model = build_model()
    model.insert(3, nn.Dropout(0.3))
    return model


# Optimizers that average by themselves, or compute in bfloat16.
class Averaging(torch.optim.SGD):
    def step(self):
        average(self.param_groups[0]["params"])
        return super().step()


class InBfloat16(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            update = 0.05 * parameter.grad.bfloat16()
            parameter.sub_(update.to(parameter.dtype))


def averaging(model):
    return Averaging(model.parameters(), 0.1)


def in_bfloat16(model):
    return InBfloat16(model.parameters(), 0.05)


# One item a micro-batch on any number of ranks, and as many of them as make a batch.
def deal_singly(rank, world_size, epoch):
    loader = make_loader(rank, world_size, epoch)
    return DataLoader(loader.dataset, 1, sampler=loader.sampler)


def sgd_and_count(model):
    return {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "calls": 0}


def step_when_enough(model, state, batch):
    pieces = BATCH // dist.get_world_size()
    state["calls"] += 1
    last = model.require_backward_grad_sync = state["calls"] % pieces == 0
    (F.mse_loss(model(batch[0]), batch[1]) / pieces).backward()
    if last:
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def noisy_pieces(model, optimizer, batch):
    optimizer.zero_grad()
    for x, y in zip(*(part.split(1) for part in batch)):
        noise = 0.1 * torch.randn_like(x)
        (F.mse_loss(model(x + noise), y) / len(batch[0])).backward()
    optimizer.step()


def noise_of_numpy(model, optimizer, batch):
    noise = torch.from_numpy(np.random.normal(size=batch[0].shape)).to(batch[0])
    return train_step(model, optimizer, [batch[0] + 0.1 * noise, batch[1]])


def adam_and_numpy_per_rank(model):
    np.random.seed(dist.get_rank())
    return adam(model)


def adam_and_numpy(model):
    np.random.seed(0)
    return adam(model)


def step_projected(model, optimizer, batch):
    """Draw a projection of the gradient, which all ranks have to draw alike.

    It has as many rows as a batch has items, so nobody can tell what they belong to.
    """
    loss = F.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    weight = model.module[0].weight
    projection = torch.randn(WIDTH, 8).to(weight)
    weight.grad = weight.grad @ projection @ projection.t() / 8
    optimizer.step()


def time_first(rank, world_size, epoch):
    for batch in generate(rank, world_size, epoch):
        yield [batch["x"].t()]


def step_time_first(model, optimizer, batch):
    x = batch[0].t()
    return train_step(model, optimizer, [x, x.sum(1, keepdim=True).sin()])


class GraphLoader(DataLoader):
    """A loader that collates in its own way, as of graphs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, collate_fn=torch.utils.data.default_collate, **kwargs)


def deal_by_own_loader(rank, world_size, epoch):
    loader = make_loader(rank, world_size, epoch)
    size = BATCH // world_size
    return GraphLoader(loader.dataset, batch_size=size, sampler=loader.sampler)


# A queue that ranks fill in the order in which they gather.
def build_with_queue():
    model = build_model()
    model.register_buffer("queue", torch.zeros(BATCH, WIDTH))
    return model


def step_with_queue(model, optimizer, batch):
    parts = [torch.zeros_like(batch[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, batch[0].contiguous())
    model.module.queue.copy_(torch.cat(parts))
    return train_step(model, optimizer, batch)


RIGHT = {
    "an optimizer that averages": replace(
        PLAIN, build_optimizer=averaging, wrap=unwrapped
    ),
    "an optimizer in bfloat16": replace(PLAIN, build_optimizer=in_bfloat16),
    "pieces that shrink with the ranks": replace(
        PLAIN,
        build_optimizer=sgd_and_count,
        make_loader=deal_singly,
        train_step=step_when_enough,
    ),
    "noise in pieces": replace(
        PLAIN, build_optimizer=adam_and_seed, train_step=noisy_pieces
    ),
    "noise of NumPy": replace(
        PLAIN, build_optimizer=adam_and_numpy_per_rank, train_step=noise_of_numpy
    ),
    "a draw that is to be equal": replace(
        PLAIN, train_step=step_projected, shared_noise=True
    ),
    "time first": replace(PLAIN, make_loader=time_first, train_step=step_time_first),
    "a loader of one's own": replace(PLAIN, make_loader=deal_by_own_loader),
    "a queue in another order": replace(
        PLAIN, build_model=build_with_queue, train_step=step_with_queue
    ),
    "padded to the longest": replace(
        PLAIN, make_loader=padded, train_step=step_on_padded
    ),
    "batches that are objects": replace(
        PLAIN, make_loader=pairs, train_step=step_on_pairs
    ),
    "batches that are mappings": replace(
        PLAIN, make_loader=mappings, train_step=step_on_mappings
    ),
    "a generator in a transform": replace(PLAIN, make_loader=jittered),
    "gradients kept elsewhere": replace(PLAIN, train_step=step_on_kept_gradients),
    "equal noise on weights": replace(
        PLAIN, build_model=build_narrow, train_step=step_with_noise
    ),
    "a mask in a buffer": replace(PLAIN, build_model=build_masked),
    "items that are objects": replace(PLAIN, make_loader=deal_objects),
    "a loader that is wrapped on ranks": replace(PLAIN, make_loader=wrap_on_ranks),
    "frozen, and a sharded optimizer": replace(
        PLAIN, build_model=build_frozen, build_optimizer=sharded_adam
    ),
    "compiled": replace(PLAIN, wrap=compiled),
    "a closure": replace(PLAIN, train_step=step_with_closure),
    "weights averaged": replace(
        PLAIN,
        build_optimizer=Averaged,
        make_loader=generate,
        train_step=step_and_average,
    ),
    "a generator per rank": replace(PLAIN, make_loader=noisy),
    "autocast": replace(PLAIN, train_step=step_in_bf16),
    "a scaled loss": replace(PLAIN, build_optimizer=Scaled, train_step=step_scaled),
    "FSDP2 in bf16": replace(PLAIN, wrap=shard_in_bf16, train_step=step_on_floats),
    "a pair": Training(build_pair, two_adams, make_loader, step_pair, unwrapped),
    "checkpointing": Training(
        build_repeated, adam_and_seed, make_loader, step_in_pieces
    ),
    "counted by items": replace(
        PLAIN, make_loader=deal_unequally, train_step=step_by_items
    ),
    "two passes": replace(PLAIN, train_step=step_twice),
    "a loss in float32": replace(PLAIN, train_step=step_in_float32),
}


def adam_that_sums(model):
    def add_up(optimizer, args, kwargs):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    optimizer = adam(model)
    optimizer.register_step_pre_hook(add_up)
    return optimizer


# What cannot be hidden by a norm, a bfloat16, or a generator that is elsewhere soon.
def step_added_and_clipped(model, optimizer, batch):
    optimizer.zero_grad()
    for x, y in zip(*(part.split(1) for part in batch)):
        F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clip_each_piece(model, optimizer, batch):
    optimizer.zero_grad()
    pieces = [*zip(*(part.split(1) for part in batch))]
    for number, (x, y) in enumerate(pieces):
        model.require_backward_grad_sync = number == len(pieces) - 1
        (F.mse_loss(model(x), y) / len(pieces)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def clip_own_shards(model, optimizer, batch):
    optimizer.zero_grad()
    F.mse_loss(model(batch[0]), batch[1]).backward()
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = sum(shard.norm() ** 2 for shard in shards) ** 0.5
    for shard in shards:
        shard.mul_((0.01 / (norm + 1e-6)).clamp(max=1))
    optimizer.step()


def step_by_own_weights(model, optimizer, batch):
    weights = 1 + (batch[0][:, :1] > 0).to(batch[0]) / 10
    loss = ((model(batch[0]) - batch[1]).square() * weights).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def drawn_alike(rank, world_size, epoch):
    inputs, targets = numbers()
    for _ in range(4):
        items = torch.randint(ITEMS, (BATCH // world_size,))
        yield inputs[items], targets[items]


class Rejecting(Dataset):
    """Its items take another number of random numbers each."""

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        noise = [random.gauss(0, 0.1) for _ in range(WIDTH + index % 3)]
        inputs, targets = numbers()
        return inputs[index] + torch.tensor(noise[:WIDTH]), targets[index]


def rejecting(rank, world_size, epoch):
    random.seed(epoch)
    return dealt(Rejecting(), rank, world_size, epoch)


def other_files(rank, world_size, epoch):
    data = TensorDataset(*(tensor.roll(5 * rank, 0) for tensor in numbers()))
    return dealt(data, rank, world_size, epoch)


def step_never_synced(model, optimizer, batch):
    model.set_requires_gradient_sync(False)
    return train_step(model, optimizer, batch)


def build_scaled():
    model = build_model()
    model.scale = nn.Parameter(torch.ones([]))
    return model


def contrast_without_gradients(model, optimizer, batch):
    """Compare with what other ranks have, of which no gradient comes back."""
    mine = model(batch[0])
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    parts[dist.get_rank()] = mine
    whole = torch.cat(parts)
    logits = model.module.scale * whole @ whole.t()
    optimizer.zero_grad()
    F.cross_entropy(logits, torch.arange(len(logits))).backward()
    optimizer.step()


# What a comparison of the model's weights alone would call equal.
def adam_and_probe(model):
    torch.manual_seed(1)
    probe = nn.Linear(WIDTH, 1).to(next(model.parameters()))
    optimizer = torch.optim.AdamW([*model.parameters(), *probe.parameters()], 1e-2)
    optimizer.probe = probe
    return optimizer


def step_with_probe(model, optimizer, batch):
    """Train a probe beside the model, of which DDP does not know."""
    optimizer.zero_grad()
    F.mse_loss(model(batch[0]), batch[1]).backward()
    F.mse_loss(optimizer.probe(batch[0]), batch[1]).backward()
    optimizer.step()


def step_on_masked(model, optimizer, batch):
    """Train on items that are chosen by chance: ranks have unequal counts of them."""
    mask = torch.empty(len(batch[0]), 1).bernoulli_(0.6).bool()
    errors = (model(batch[0]) - batch[1]).square()
    loss = errors[mask].sum() / mask.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class AveragedByN(Averaged):
    """An average of the weights whose decay depends on the number of ranks."""

    def __init__(self, model):
        super().__init__(model)
        self.by = 0.1 * dist.get_world_size()


def step_and_average_by_n(model, state, batch):
    F.smooth_l1_loss(model(batch["x"]), batch["y"]).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(state.slow.parameters(), model.parameters()):
            slow.lerp_(fast, state.by)


def build_with_counter():
    model = build_model()
    lowest = torch.finfo(torch.float32).min
    model.register_buffer("mask", torch.full((4, 4), lowest).triu(1))
    model.register_buffer("seen", torch.zeros(()))
    return model


def step_and_count(model, optimizer, batch):
    model.module.seen += len(batch[0])  # half of one process', on both ranks
    return train_step(model, optimizer, batch)


class OwnSGD(torch.optim.SGD):
    """Any class that is not torch's might divide its gradients by itself."""


class FromNothing:
    def __init__(self, model):
        self.optimizer = OwnSGD(model.parameters(), 1e-6)
        warm_up = lambda step: min(1.0, step / 2)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)


def step_over_n(model, state, batch):
    state.optimizer.zero_grad()
    (F.mse_loss(model(batch[0]), batch[1]) / dist.get_world_size()).backward()
    state.optimizer.step()
    state.schedule.step()


def smooth_by_n(model, optimizer, batch):
    """Smooth targets by the number of ranks: no finding says so."""
    targets = batch[1] * (1 - 0.05 * dist.get_world_size())
    return train_step(model, optimizer, [batch[0], targets])


WRONG = {
    "a probe beside DDP": (
        "weights",
        replace(PLAIN, build_optimizer=adam_and_probe, train_step=step_with_probe),
    ),
    "shrunk after the last update": ("unknown", replace(PLAIN, train_step=step_once)),
    "masked by chance": ("unequal batches", replace(PLAIN, train_step=step_on_masked)),
    "an average by N": (
        "unknown",
        replace(
            PLAIN,
            build_optimizer=AveragedByN,
            make_loader=generate,
            train_step=step_and_average_by_n,
        ),
    ),
    "a counter beside a mask": (
        "unknown",
        replace(PLAIN, build_model=build_with_counter, train_step=step_and_count),
    ),
    "a small rate from nothing": (
        "divided twice",
        replace(PLAIN, build_optimizer=FromNothing, train_step=step_over_n),
    ),
    "more than is expected": (
        "schedule, unknown",
        replace(
            PLAIN,
            build_optimizer=adam_by_ranks,
            train_step=smooth_by_n,
            expected=frozenset({"schedule"}),
        ),
    ),
    "added and clipped": (
        "divided twice",
        replace(PLAIN, train_step=step_added_and_clipped),
    ),
    "clipped in pieces": ("clipping", replace(PLAIN, train_step=clip_each_piece)),
    "shards that are clipped alone": (
        "clipping",
        replace(PLAIN, wrap=fully_shard, train_step=clip_own_shards),
    ),
    "own weights under bfloat16": (
        "unequal batches",
        replace(PLAIN, build_optimizer=in_bfloat16, train_step=step_by_own_weights),
    ),
    "drawn alike": ("items", replace(PLAIN, make_loader=drawn_alike)),
    "one stream of random": ("same noise", replace(PLAIN, make_loader=rejecting)),
    "NumPy alike in the step": (
        "same noise",
        replace(PLAIN, build_optimizer=adam_and_numpy, train_step=noise_of_numpy),
    ),
    "files in another order": ("items", replace(PLAIN, make_loader=other_files)),
    "shards that are never averaged": (
        "nothing trained",
        replace(PLAIN, wrap=fully_shard, train_step=step_never_synced),
    ),
    "gathered without gradients": (
        "divided twice",
        replace(PLAIN, build_model=build_scaled, train_step=contrast_without_gradients),
    ),
    "one generator": ("same noise", replace(PLAIN, make_loader=equally_noisy)),
    "one generator in a transform": (
        "same noise",
        replace(PLAIN, make_loader=equally_jittered),
    ),
    "a closure, not averaged": (
        "not averaged",
        replace(PLAIN, wrap=in_a_shell, train_step=step_with_closure),
    ),
    "each rank's noise on weights": (
        "weights",
        replace(PLAIN, build_optimizer=adam_and_seed, train_step=step_with_noise),
    ),
    "unequal later": (
        "unequal batches",
        replace(PLAIN, make_loader=longer_for_rank_0),
    ),
    "unequal later, own slices": (
        "unequal batches",
        replace(PLAIN, make_loader=slice_longer_for_rank_0),
    ),
    "one share of mappings for all": (
        "items",
        replace(PLAIN, make_loader=one_mapping_for_all, train_step=step_on_mappings),
    ),
    "one share of objects for all": (
        "items",
        replace(PLAIN, make_loader=first_objects_for_all),
    ),
    "one order, but for one process": (
        "same order",
        replace(PLAIN, make_loader=shuffle_one_process_alone),
    ),
    "dropped, and clamped": (
        "accumulation",
        replace(PLAIN, train_step=step_on_the_last_chunk),
    ),
    "no update": ("nothing trained", replace(PLAIN, train_step=step_never)),
    "nothing to divide by": ("not finite", replace(PLAIN, train_step=step_on_some)),
    "equal dropout, and rank 0 steps": (
        "same noise, weights",
        replace(PLAIN, build_model=build_with_dropout, train_step=only_rank_0_steps),
    ),
    "a scaled loss, not averaged": (
        "not averaged",
        replace(RIGHT["a scaled loss"], wrap=unwrapped),
    ),
    "only rank 0 steps": ("weights", replace(PLAIN, train_step=only_rank_0_steps)),
    "a sum": ("divided twice", replace(PLAIN, train_step=step_on_a_sum)),
    "a sum in a hook of the optimizer": (
        "summed",
        replace(PLAIN, build_optimizer=adam_that_sums, wrap=unwrapped),
    ),
    "shuffle=True": ("items", replace(PLAIN, make_loader=shuffle_alone)),
    "own norm": ("batch statistics", replace(PLAIN, build_model=build_own_norm)),
    "values clipped first": (
        "clipping",
        replace(PLAIN, train_step=clip_values_first, wrap=unwrapped),
    ),
    "DDP is bypassed": ("not averaged", replace(PLAIN, train_step=bypass_ddp)),
    "one share for all": ("items", replace(PLAIN, make_loader=first_share_for_all)),
    "own rate": ("schedule", replace(PLAIN, train_step=rate_by_own_batch)),
    "optimizer first": (
        "nothing trained",
        replace(PLAIN, build_optimizer=optimizer_of, wrap=optimizer_first),
    ),
    "changed items": (  # and no micro-batch is dropped
        "schedule",
        replace(PLAIN, build_optimizer=adam_by_ranks, train_step=step_on_changed_items),
    ),
}
UNJUDGED = {
    "a draw of nobody knows what": replace(PLAIN, train_step=step_projected),
}
