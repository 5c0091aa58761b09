"""DeepSpeed's engine, judged: python -m utils.parity docs/frameworks/with_deepspeed.py.

STAGE may be 0 to 3. A mistake to try: accumulation_steps = 3 on any number of ranks.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from utils.zero import load_for

deepspeed = load_for("cpu")  # on GPUs, `import deepspeed`
STAGE = 3


def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def wrap(model):
    # 12 items for an update, on 1, 2 and 3 ranks
    accumulation_steps = 6 // torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": STAGE},
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def build_optimizer(engine):
    return engine.optimizer


def make_loader(rank, world_size, epoch):
    data = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(data, data.sum(1, keepdim=True))
    sampler = DistributedSampler(data, world_size, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, 2, sampler=sampler)


def train_step(engine, optimizer, batch):
    loss = (engine(batch[0]) - batch[1]).square().mean()
    engine.backward(loss)
    engine.step()
    return loss
