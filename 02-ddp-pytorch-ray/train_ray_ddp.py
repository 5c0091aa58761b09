"""Train ResNet-18 on images with DistributedDataParallel, started by Ray Train.

    python train_ray_ddp.py --num-workers 4 --epochs 3

Runs on GPUs where there are any, else on CPUs, on this machine or on the cluster that
RAY_ADDRESS names.
"""

import tempfile
from pathlib import Path

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from utils import command_line, datasets, failures, preflight, settings
from utils.models import resnet18


def load_data(dataset, batch_size):
    """This rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    train_loader = prepare_data_loader(train_loader)  # adds the DistributedSampler
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr):
    """The model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(0)
    model = resnet18(in_channels=in_channels)
    wrapped = prepare_model(  # moves it to the device, too
        model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader, test_set = load_data(config["dataset"], config["batch_size"])
    model, wrapped, optimizer = build(test_set[0][0].shape[0], config["lr"])
    history = []
    for epoch in range(load_latest(model, optimizer), config["epochs"]):
        if world_size > 1:
            train_loader.sampler.set_epoch(epoch)  # another order in every epoch
        else:
            torch.manual_seed(epoch)  # a single worker shuffles without that sampler
        loss = train_epoch(wrapped, optimizer, train_loader)
        accuracy = evaluate(model, test_set, rank, world_size, get_device())
        history.append({"epoch": epoch, "loss": loss, "accuracy": accuracy})
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.1%}")
        report(model, optimizer, history[-1])
    return history


def train_epoch(model, optimizer, train_loader):
    """One pass over this rank's share of the images; the mean loss of all ranks."""
    losses = []
    for images, labels in train_loader:
        losses.append(train_step(model, optimizer, images, labels))
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # sum over all ranks, which saw different images
    return loss.item() / dist.get_world_size()


def train_step(model, optimizer, images, labels):
    """One step on this rank's share of the batch; returns the loss of that share."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_set, rank, world_size, device):
    """Accuracy over all test images, each counted once, the same on every rank."""
    model.eval()
    mine = Subset(test_set, range(rank, len(test_set), world_size))  # nothing padded
    counts = torch.zeros(2, device=device)  # correct, all
    for images, labels in DataLoader(mine, batch_size=256):
        correct = model(images.to(device)).argmax(dim=1) == labels.to(device)
        counts += torch.tensor([correct.sum(), len(labels)], device=device)
    dist.all_reduce(counts)  # sum over all ranks
    model.train()
    return (counts[0] / counts[1]).item()


def report(model, optimizer, metrics):
    """Report to Ray Train, on every rank: it keeps rank 0's metrics and checkpoint."""
    full_disk = settings.explain_writing("The checkpoint")
    with full_disk, tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | metrics, Path(folder, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def load_latest(model, optimizer):
    """Go on from the latest checkpoint, if any; returns the epoch to start at."""
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of a resumed run
    if not checkpoint:
        return 0
    with settings.explain_reading(checkpoint.path), checkpoint.as_directory() as folder:
        path = Path(folder, "checkpoint.pt")
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["epoch"] + 1


def parse_args():
    parser = command_line.Parser(__doc__)
    add, count = parser.add_argument, command_line.count
    add("--num-workers", type=count, help="default: 2, or this machine's GPUs")
    add("--epochs", type=count, default=3)
    add("--dataset", default="digits", help=", ".join(datasets.DATASETS))
    return parser.parse_args()


def fit(args, num_workers, name, folder):
    """Let Ray start `train_fn` on all workers, and once more if one of them dies."""
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=preflight.use_gpu()
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[failures.NoRestartOnBadInput()],
        ),
    )
    return trainer.fit()


def main():
    args = parse_args()
    num_workers = args.num_workers or settings.num_workers()
    size = len(datasets.load(args.dataset))
    command_line.check_batch_size(args.batch_size, size, num_workers)
    name, folder = command_line.find_run(
        "train_ray_ddp", args.checkpoint_dir, args.resume
    )
    start_ray(num_workers, log_to_driver=True)
    preflight.check_shared(folder)
    with failures.in_a_sentence():
        result = fit(args, num_workers, name, folder)
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    command_line.run(main)
