"""Judge the Trainer of Transformers: python docs/frameworks/with_transformers.py."""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"  # it loads DeepSpeed, which looks for a GPU

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from utils import parity
from utils.launch import run_ranks


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1).double()

    def forward(self, x, labels):
        predicted = self.linear(x)
        return (predicted - labels).square().mean(), predicted


class Watch(TrainerCallback):
    """Watch what the Trainer trains, from its first batch to its last."""

    def on_train_begin(self, arguments, state, control, model=None, **more):
        self.watching = parity.watch(model)
        self.record = self.watching.__enter__()

    def on_train_end(self, *arguments, **more):
        self.watching.__exit__(None, None, None)


def train(batch: int) -> parity.Record:
    torch.manual_seed(1)
    inputs = torch.randn(24, 3, dtype=torch.float64)
    data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in inputs]
    watch = Watch()
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    Trainer(Model(), arguments, train_dataset=data, callbacks=[watch]).train()
    return watch.record


if __name__ == "__main__":
    # "per device": left as it is, the global batch grows with the number of workers.
    kept = "--keep-batch" in sys.argv
    alone = run_ranks(train, 1, 6)[0]
    print(parity.judge(alone, run_ranks(train, 2, 6 if kept else 3)))
