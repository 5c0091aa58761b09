"""Train ResNet-18 on images with DistributedDataParallel, started by torchrun.

    torchrun --nproc_per_node=4 train_ddp.py --epochs 3
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_ddp.py --checkpoint-dir run

Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir the same command starts
a run, and goes on with it: after a restart by torchrun, on another number of nodes, and
when a scheduler starts the job again. SIGTERM stops it after a step, saved. Steps that a
script for one device lacks end in `# NEW`.

To take this along, copy `utils/runs.py` with it: that needs torch alone. What else comes
from `utils` is the workshop's: its data, model, devices and options.
"""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from utils import command_line, datasets, models, settings
from utils.runs import ResumableSampler, Run, exit_with, seed_rank


def set_up(smoke_test):
    """Join the process group; returns the device of this rank."""
    device = settings.set_device(smoke_test)  # this rank's own GPU, or the CPU
    own_gpu = device if device.type == "cuda" else None
    # it reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun has set
    dist.init_process_group(settings.backend(device), device_id=own_gpu)  # NEW
    return device


def load_data(dataset, batch_size, seed, device):
    """Return this rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    sampler = ResumableSampler(train_set, seed=seed)  # NEW: deals them out
    options = {"sampler": sampler, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, batch_size, drop_last=True, **options)
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr, seed, device):
    """Return the model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = models.resnet18(in_channels=in_channels).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)  # NEW
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model, wrapped, optimizer


def train(args, device):
    """Train until all epochs are done, or SIGTERM comes; returns where it stands."""
    train_loader, test_set = load_data(args.dataset, args.batch_size, args.seed, device)
    in_channels = test_set[0][0].shape[0]
    model, wrapped, optimizer = build(in_channels, args.lr, args.seed, device)
    if dist.get_rank() == 0:  # NEW: one speaks for all
        world_size = dist.get_world_size()
        print(
            f"{world_size} workers on {device.type}, batch {args.batch_size} each and "
            f"{args.batch_size * world_size} global, {len(train_loader)} steps per epoch"
        )
    bf16 = device.type == "cuda" if args.bf16 is None else args.bf16
    # a run does not go on with other settings
    chosen = command_line.chosen(args, "dataset", "batch_size", "lr", "seed")
    chosen["--bf16"] = bf16
    parts = save_checkpoint, load_checkpoint
    run = Run(args.checkpoint_dir, "train_ddp", *parts, chosen, args.keep)
    run.resume(model, optimizer)  # NEW: the newest checkpoint that rank 0 finds, if any
    for epoch in run.epochs(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # NEW: another order in every epoch
        batches = run.batches(train_loader)  # NEW: all ranks stop after the same step
        loss = train_epoch(wrapped, optimizer, batches, device, bf16)
        accuracy = None if run.interrupted else evaluate(model, test_set, device)
        run.done(loss, test_accuracy=accuracy)  # NEW: saves, and rank 0 prints
    return run.summary()


def train_epoch(model, optimizer, batches, device, bf16=False):
    """Train on batches; returns the mean loss of all ranks."""
    losses = torch.zeros(2, device=device)  # their sum, and how many
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        losses[0] += train_step(model, optimizer, images, labels, bf16)
        losses[1] += 1
    dist.all_reduce(losses)  # NEW: sum over all ranks, which saw different images
    return (losses[0] / losses[1]).item()


def train_step(model, optimizer, images, labels, bf16=False):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy over all test images, each counted once, on every rank."""
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # no sampler: that would count some images twice
    mine = Subset(test_set, range(rank, len(test_set), world_size))  # NEW
    correct = torch.zeros((), device=device)
    for images, labels in DataLoader(mine, 256, pin_memory=device.type == "cuda"):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)  # NEW: sum over all ranks
    model.train()
    return correct.item() / len(test_set)


def save_checkpoint(checkpoint, model, optimizer):
    """Write into the folder `checkpoint` on rank 0: all ranks hold the same."""
    if dist.get_rank() == 0:  # NEW
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint / "checkpoint.pt")


def load_checkpoint(checkpoint, model, optimizer):
    """Read on every rank what rank 0 has saved."""
    file = checkpoint / "checkpoint.pt"
    state = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main():
    args = command_line.parse_images(__doc__)
    summary = train(args, set_up(args.smoke_test))
    # DDP's objects hold on to the process group: free them first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()  # NEW
    exit_with(summary)


if __name__ == "__main__":
    command_line.run(main)
