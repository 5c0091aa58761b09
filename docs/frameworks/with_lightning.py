"""Judge a LightningModule where it stands: python docs/frameworks/with_lightning.py."""

import sys

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

from utils import parity
from utils.launch import run_ranks


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1).double()

    def training_step(self, batch):
        return (self.model(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(lightning.Callback):
    """Watch what Lightning trains, from its first batch to its last."""

    def on_train_start(self, trainer, module):
        self.watching = parity.watch(module.model)
        self.record = self.watching.__enter__()

    def on_train_end(self, trainer, module):
        self.watching.__exit__(None, None, None)


def train(deal: bool) -> parity.Record:
    torch.manual_seed(1)
    inputs = torch.randn(24, 3, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    watch = Watch()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(TorchElasticEnvironment().world_size()),
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],  # reads RANK, WORLD_SIZE, ...
        max_epochs=1,
        callbacks=[watch],
        use_distributed_sampler=deal,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, 6 // trainer.world_size))
    return watch.record


if __name__ == "__main__":
    # Without, each rank gets all items, which people do who have a sampler of their own.
    deal = "--own-sampler" not in sys.argv
    alone = run_ranks(train, 1, deal)[0]
    print(parity.judge(alone, run_ranks(train, 2, deal)))
