"""Train ResNet-18 on images with DistributedDataParallel, started by torchrun.

    torchrun --nproc_per_node=4 train_ddp.py --epochs 3

Runs on GPUs where there are any, else on CPUs. With `--checkpoint-dir` and torchrun's
`--max-restarts=1`, a job whose worker dies goes on from its last epoch (see the README).
"""

import gc
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from utils import checkpoint_files, command_line, datasets, models, settings


def set_up():
    """Join the process group; returns the device of this rank."""
    device = settings.set_device()  # this rank's own GPU, or the CPU
    # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun has set
    dist.init_process_group(settings.backend())
    return device


def load_data(dataset, batch_size):
    """This rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    sampler = DistributedSampler(train_set, shuffle=True)  # deals them out
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr, device):
    """The model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(0)
    model = models.resnet18(in_channels=in_channels).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train(args, device):
    """Train for some epochs; rank 0 prints, and saves after each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader, test_set = load_data(args.dataset, args.batch_size)
    model, wrapped, optimizer = build(test_set[0][0].shape[0], args.lr, device)
    if rank == 0:
        batch = f"{args.batch_size} each and {args.batch_size * world_size} global"
        said = f"{world_size} workers on {device.type}, batch {batch}"
        print(f"{said}, {len(train_loader)} steps per epoch")
    for epoch in range(load_checkpoint(args.checkpoint, model, optimizer), args.epochs):
        start = time.perf_counter()
        train_loader.sampler.set_epoch(epoch)  # another order in every epoch
        loss = train_epoch(wrapped, optimizer, train_loader, device)
        accuracy = evaluate(model, test_set, rank, world_size, device)
        if rank == 0:
            seconds = time.perf_counter() - start
            said = f"loss {loss:.3f}, test accuracy {accuracy:.1%}, {seconds:.1f} s"
            print(f"epoch {epoch + 1}/{args.epochs}: {said}", flush=True)
        if rank == 0 and args.checkpoint:
            save_checkpoint(args.checkpoint, model, optimizer, epoch, accuracy)


def train_epoch(model, optimizer, train_loader, device):
    """One pass over this rank's share of the images; the mean loss of all ranks."""
    losses = []
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
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


def save_checkpoint(path, model, optimizer, epoch, accuracy):
    """Save model, optimizer and epoch, whole or not at all. Call it on rank 0."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with checkpoint_files.write_whole(path) as file:
        torch.save(state | {"epoch": epoch, "accuracy": accuracy}, file)


def load_checkpoint(path, model, optimizer):
    """Go on from a checkpoint, if rank 0 finds one; returns the epoch to start at."""
    found = [bool(path and path.exists())]
    dist.broadcast_object_list(found)  # rank 0 saves: what it finds counts for all
    if not found[0]:
        return 0
    with checkpoint_files.explain_reading(path):  # it may be of another model
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["epoch"] + 1


def main():
    args = command_line.parse_images(__doc__)
    train(args, set_up())
    # DDP's objects hold on to the process group: free them first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    command_line.run(main)
