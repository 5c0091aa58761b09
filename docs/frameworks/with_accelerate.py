"""Judge a loop of Accelerate where it stands: python docs/frameworks/with_accelerate.py."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from utils import parity
from utils.launch import run_ranks


def train(prepare_schedule: bool) -> parity.Record:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(24, 3, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, 6 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if prepare_schedule:
        schedule = accelerator.prepare(schedule)
    with parity.watch(model) as record:
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    accelerator.end_training()
    return record


if __name__ == "__main__":
    # Accelerate's own way; it steps a schedule once for each of N workers.
    as_prepared = "--prepare-schedule" in sys.argv
    alone = run_ranks(train, 1, as_prepared)[0]
    print(parity.judge(alone, run_ranks(train, 2, as_prepared)))
