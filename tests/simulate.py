"""FSDP2 on any number of ranks in one process: fake tensors, a fake process group."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import sharding
from utils.comms import Comms, count_comms
from utils.memory import State, state_bytes
from utils.models import GPT, GPTConfig


def fsdp2_step(config: GPTConfig, world_size: int, keep: bool) -> tuple[State, Comms]:
    """State bytes and collectives of rank 0 in one training step; allocates nothing."""
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        mesh = dist.init_device_mesh("cpu", (world_size,))
        with FakeTensorMode():
            model = sharding.shard(GPT(config), keep, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tokens = torch.zeros(1, config.block_size, dtype=torch.long)
            with count_comms() as comms:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            optimizer.step()
            return state_bytes(model, optimizer), comms
    finally:
        dist.destroy_process_group()
