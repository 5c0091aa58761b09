"""Train ResNet-18 on images with DistributedDataParallel, started by torchrun.

    torchrun --nproc_per_node=4 train_ddp.py --epochs 3

Runs on GPUs where there are any, else on CPUs. With `--checkpoint-dir` and
`torchrun --max-restarts=1`, a job whose worker dies goes on from its last epoch. (On one
node, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for that: PyTorch issue 135712.)
"""

import gc
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from utils import command_line, datasets, settings
from utils.models import resnet18


def set_up():
    """Join the process group; returns the device of this rank."""
    device = settings.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
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
    model = resnet18(in_channels=in_channels).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train(args, device):
    """Train for some epochs; rank 0 prints, and saves after each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader, test_set = load_data(args.dataset, args.batch_size)
    model, wrapped, optimizer = build(test_set[0][0].shape[0], args.lr, device)
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    if rank == 0:
        print(
            f"{world_size} workers on {device.type}, batch {args.batch_size} each and "
            f"{args.batch_size * world_size} global, {len(train_loader)} steps per epoch"
        )
    for epoch in range(first_epoch, args.epochs):
        start = time.perf_counter()
        train_loader.sampler.set_epoch(epoch)  # another order in every epoch
        loss = train_epoch(wrapped, optimizer, train_loader, device)
        accuracy = evaluate(model, test_set, rank, world_size, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.3f}, test accuracy "
                f"{accuracy:.1%}, {time.perf_counter() - start:.1f} s",
                flush=True,
            )
        if rank == 0 and args.checkpoint:
            metrics = {"epoch": epoch, "accuracy": accuracy}
            save_checkpoint(args.checkpoint, model, optimizer, metrics)


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


def save_checkpoint(path, model, optimizer, metrics):
    """What is needed to go on, in a file that is written whole or not at all."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with settings.write_whole(path) as file:
        torch.save(state | metrics, file)


def load_checkpoint(path, model, optimizer):
    """Go on from a checkpoint, if rank 0 finds one; returns the epoch to start at."""
    found = [bool(path and path.exists())]
    dist.broadcast_object_list(found)  # rank 0 saves: what it finds counts for all
    if not found[0]:
        return 0
    with settings.explain_reading(path):  # it may be of another model
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["epoch"] + 1


def parse_args():
    parser = command_line.Parser(__doc__)
    parser.add_argument("--epochs", type=command_line.count, default=3)
    names = ", ".join(datasets.DATASETS)
    parser.add_argument("--dataset", default="digits", help=names)
    return parser.parse_args()


def main():
    args = parse_args()
    world_size, size = command_line.check_torchrun(), len(datasets.load(args.dataset))
    command_line.check_batch_size(args.batch_size, size, world_size)
    args.checkpoint = command_line.find_checkpoint(args.checkpoint_dir, args.resume)
    train(args, set_up())
    # DDP's objects hold on to the process group: free them first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    command_line.run(main)
