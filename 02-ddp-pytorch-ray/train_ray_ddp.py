"""Train ResNet-18 on images with DistributedDataParallel, started by Ray Train.

    python train_ray_ddp.py --num-workers 4 --epochs 3

Runs on GPUs or else CPUs, of this machine or of the cluster that RAY_ADDRESS names.
"""

from tempfile import TemporaryDirectory

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Subset

from utils import command_line, datasets, failures, models, preflight
from utils.checkpoint_files import explain_reading, explain_writing


def load_data(dataset, batch_size):
    """This rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    train_loader = prepare_data_loader(train_loader)  # adds the DistributedSampler
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr):
    """The model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(0)
    model = models.resnet18(in_channels=in_channels)
    options = {"gradient_as_bucket_view": True}
    wrapped = prepare_model(model, parallel_strategy_kwargs=options)  # moves it, too
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader, test_set = load_data(config["dataset"], config["batch_size"])
    model, wrapped, optimizer = build(test_set[0][0].shape[0], config["lr"])
    for epoch in range(load_latest(model, optimizer), config["epochs"]):
        torch.manual_seed(epoch)  # a single worker shuffles by this seed
        if world_size > 1:
            train_loader.sampler.set_epoch(epoch)  # another order in every epoch
        loss = train_epoch(wrapped, optimizer, train_loader)
        accuracy = evaluate(model, test_set, rank, world_size, get_device())
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.1%}")
        report(model, optimizer, {"epoch": epoch, "loss": loss, "accuracy": accuracy})


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
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_set, rank, world_size, device):
    """Accuracy over all test images, each counted once, the same on every rank."""
    model.eval()
    mine = Subset(test_set, range(rank, len(test_set), world_size))  # nothing padded
    correct = torch.zeros((), device=device)
    for images, labels in DataLoader(mine, batch_size=256):
        correct += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(correct)  # sum over all ranks
    model.train()
    return correct.item() / len(test_set)


def report(model, optimizer, metrics):
    """Report to Ray Train, on every rank: it keeps rank 0's metrics and checkpoint."""
    with explain_writing("The checkpoint"), TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | metrics, f"{folder}/checkpoint.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def load_latest(model, optimizer):
    """Go on from the latest checkpoint, if any; returns the epoch to start at."""
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of a resumed run
    if not checkpoint:
        return 0
    with explain_reading(checkpoint.path), checkpoint.as_directory() as folder:
        state = torch.load(f"{folder}/checkpoint.pt", "cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["epoch"] + 1


def main():
    args = command_line.parse_images(__doc__, ray=True)
    run = failures.run_options(*command_line.find_run(args.checkpoint_dir, args.resume))
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_shared(run["storage_path"])
    use_gpu = preflight.use_gpu()
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1), **run),
    )
    with failures.in_a_sentence():
        result = trainer.fit()
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    command_line.run(main)
