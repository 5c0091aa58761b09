"""Train ResNet-18 on images with DistributedDataParallel, started by Ray Train.

    python train_ray_ddp.py --num-workers 4 --epochs 3

Runs on GPUs where there are any, else on CPUs, on this machine or on the cluster that
RAY_ADDRESS names.
"""

import argparse
import os
import sys
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
from ray.train.torch import (
    TorchTrainer,
    get_device,
    prepare_data_loader,
    prepare_model,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from utils import command_line, datasets, preflight, settings
from utils.failures import NoRestartOnBadInput, what_to_mend
from utils.models import resnet18


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--num-workers", type=int, help="default: 2, or this machine's GPUs"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW")
    parser.add_argument(
        "--dataset", default="digits", help=", ".join(datasets.DATASETS)
    )
    parser.add_argument(
        "--checkpoint-dir", type=settings.local_path, help="save there after each epoch"
    )
    parser.add_argument("--resume", action="store_true", help="from --checkpoint-dir")
    parser.add_argument(
        "--smoke-test", action="store_true", help="on CPU, also with GPUs"
    )
    args = parser.parse_args()
    if args.smoke_test:
        os.environ["WORKSHOP_MODE"] = "smoke"
    return args


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


def load_latest(model):
    """Load the latest checkpoint, if any; returns it, and the epoch to start at."""
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of a resumed run
    if not checkpoint:
        return None, 0
    try:
        with checkpoint.as_directory() as folder:
            path = Path(folder, "checkpoint.pt")
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        if missing := {"optimizer", "epoch"} - state.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"The checkpoint {checkpoint.path} is damaged or of another model "
            f"({reason}): name another folder, or start without --resume."
        ) from None
    return state, state["epoch"] + 1


def train_epoch(model, optimizer, train_loader):
    """One pass over this rank's share of the images; the mean loss of all ranks."""
    losses = []
    for images, labels in train_loader:
        losses.append(train_step(model, optimizer, images, labels))
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # sum over all ranks, which saw different images
    return loss.item() / dist.get_world_size()


def report(model, optimizer, metrics):
    """Report to Ray Train, on every rank: it keeps rank 0's metrics and checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | metrics, Path(folder, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set = datasets.load(config["dataset"], "train")
    test_set = datasets.load(config["dataset"], "test")
    train_loader = DataLoader(
        train_set, batch_size=config["batch_size"], shuffle=True, drop_last=True
    )
    train_loader = prepare_data_loader(train_loader)  # adds the DistributedSampler
    torch.manual_seed(0)
    model = resnet18(in_channels=train_set[0][0].shape[0])
    state, first_epoch = load_latest(model)
    wrapped = prepare_model(  # moves it to the device and wraps it with DDP
        model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=config["lr"], fused=True)
    if state:
        optimizer.load_state_dict(state["optimizer"])

    history = []
    for epoch in range(first_epoch, config["epochs"]):
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


def set_up(args):
    """Everything that can be wrong with how the script was called, checked first."""
    command_line.check_counts(
        epochs=args.epochs, batch_size=args.batch_size, num_workers=args.num_workers
    )
    num_workers = args.num_workers or settings.num_workers()
    size = len(datasets.load(args.dataset, "train"))
    if size < args.batch_size * num_workers:
        raise ValueError(
            f"One batch of {args.batch_size} for each of {num_workers} workers is more "
            f"than the {size} training images: lower --batch-size."
        )
    run = command_line.find_run("train_ray_ddp", args.checkpoint_dir, args.resume)
    start_ray(num_workers, log_to_driver=True)
    preflight.check_shared(run[1])
    return num_workers, *run


def main():
    args = parse_args()
    try:
        num_workers, name, folder = set_up(args)
    except (ValueError, OSError, RuntimeError) as problem:
        sys.exit(f"train_ray_ddp.py: {problem}")
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
            failure_config=FailureConfig(max_failures=1),  # one restart
            callbacks=[NoRestartOnBadInput()],
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as failure:
        ray.shutdown()  # ends the workers' logs: what went wrong stands below them
        if problem := what_to_mend(failure):
            sys.exit(f"train_ray_ddp.py: {problem}")
        raise
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
