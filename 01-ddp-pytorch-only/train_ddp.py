"""Train ResNet-18 on images with DistributedDataParallel, started by torchrun.

    torchrun --nproc_per_node=4 train_ddp.py --epochs 3
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_ddp.py --checkpoint-dir run

Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir the same command starts
a run, and goes on with it: after a restart by torchrun, on another number of nodes, and
when a scheduler starts the job again. SIGTERM stops it after a step, saved.

To take this along, put your own dataset into `load_data`, your model and optimizer into
`build` and your loss into `train_step`, and copy `stopping`, `runs`, `generators`,
`checkpoint_files` and `errors` of `utils`, which need nothing else of it, and
`ResumableSampler` of its `datasets`. What else comes from `utils` is the workshop's: its
models and data, its options, its checks of a machine. Steps that a script for one device
lacks end in `# NEW`.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from utils import (
    checkpoint_files,
    command_line,
    datasets,
    generators,
    models,
    runs,
    settings,
    stopping,
)


def set_up():
    """Join the process group; returns the device of this rank."""
    device = settings.set_device()  # this rank's own GPU, or the CPU
    # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun has set
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group(settings.backend(), device_id=own_gpu)  # NEW
    return device


def load_data(dataset, batch_size, seed):
    """Return this rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    sampler = datasets.ResumableSampler(train_set, seed=seed)  # NEW: deals them out
    train_loader = DataLoader(
        train_set,
        batch_size,
        sampler=sampler,
        drop_last=True,
        generator=torch.Generator(),  # a loader draws, too: not from the model's numbers
        **settings.loader_options(),
    )
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr, seed, device):
    """Return the model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = models.resnet18(in_channels=in_channels).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)  # NEW
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    generators.seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model, wrapped, optimizer


def train(args, device):
    """Train until all epochs are done, or SIGTERM comes; returns where it stands.

    Rank 0 prints, and saves after each epoch and when it stops.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_loader, test_set = load_data(args.dataset, args.batch_size, args.seed)
    in_channels = test_set[0][0].shape[0]
    model, wrapped, optimizer = build(in_channels, args.lr, args.seed, device)
    steps_per_epoch = len(train_loader)
    global_batch = args.batch_size * world_size
    if rank == 0:
        print(
            f"{world_size} workers on {device.type}, batch {args.batch_size} each and "
            f"{global_batch} global, {steps_per_epoch} steps per epoch"
        )
    at = load_checkpoint(args, model, optimizer)
    stop = stopping.Stop()
    while at["epoch"] < args.epochs:
        start = time.perf_counter()
        # the step to go on at; images count, as the number of ranks may change
        first = min(at["images"] // global_batch, steps_per_epoch - 1)
        # another order in every epoch
        train_loader.sampler.set_epoch(at["epoch"], first * args.batch_size)  # NEW
        generators.seed_loader(train_loader, args.seed, at["epoch"], first)  # NEW
        loss, steps = train_epoch(
            wrapped, optimizer, train_loader, device, stop, args.bf16
        )
        at["steps"] += steps
        at["images"] = (first + steps) * global_batch
        if first + steps < steps_per_epoch:
            save_checkpoint(args, model, optimizer, at)
            if rank == 0:
                print(
                    f"stopped in epoch {at['epoch'] + 1} after {first + steps} of "
                    f"{steps_per_epoch} steps: {stopping.what_next(args.checkpoint_dir)}"
                )
            break
        accuracy = evaluate(model, test_set, rank, world_size, device)
        at |= {"epoch": at["epoch"] + 1, "images": 0, "accuracy": accuracy}
        save_checkpoint(args, model, optimizer, at)
        if rank == 0:
            seconds = time.perf_counter() - start
            print(
                f"epoch {at['epoch']}/{args.epochs}: loss {loss:.3f}, "
                f"test accuracy {accuracy:.1%}, {seconds:.1f} s",
                flush=True,
            )
    return at


def train_epoch(model, optimizer, train_loader, device, stop, bf16=False):
    """Train on what is left of an epoch; returns the mean loss of all ranks, and steps.

    It ends early where a rank has been asked to stop.
    """
    losses = []
    for images, labels in train_loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        losses.append(train_step(model, optimizer, images, labels, bf16))
        if stop.agreed():
            break
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # NEW: sum over all ranks, which saw different images
    return loss.item() / dist.get_world_size(), len(losses)


def train_step(model, optimizer, images, labels, bf16=False):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_set, rank, world_size, device):
    """Return the accuracy over all test images, each counted once, on every rank."""
    model.eval()
    # nothing padded
    mine = Subset(test_set, range(rank, len(test_set), world_size))  # NEW
    options = settings.loader_options()
    loader = DataLoader(mine, batch_size=256, generator=torch.Generator(), **options)
    correct = torch.zeros((), device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)  # NEW: sum over all ranks
    model.train()
    return correct.item() / len(test_set)


def save_checkpoint(args, model, optimizer, at):
    """Save on rank 0 what is needed to go on; every rank calls it."""
    if not args.checkpoint_dir:
        return
    state = at | {"run": args.run, "generators": generators.states()}  # of all ranks
    if dist.get_rank() == 0:  # NEW
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = args.checkpoint_dir / f"step-{at['steps']:06d}.pt"
        with checkpoint_files.write_whole(path) as file:
            torch.save(state, file)
        runs.keep_newest(args.checkpoint_dir, args.keep)


def load_checkpoint(args, model, optimizer):
    """Go on from the newest checkpoint, if rank 0 finds one; returns where it stands."""
    at = {"epoch": 0, "images": 0, "steps": 0, "accuracy": None}
    found = [args.checkpoint_dir and runs.newest(args.checkpoint_dir)]
    dist.broadcast_object_list(found)  # NEW: rank 0 saves: what it finds counts for all
    path = found[0]
    if path:
        with checkpoint_files.explain_reading(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            runs.check_same(path, state["run"], args.run)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            generators.restore(state["generators"])
            at = {name: state[name] for name in at}
    if dist.get_rank() == 0 and args.checkpoint_dir:
        runs.claim(args.checkpoint_dir, args.run["script"], path)
        done = f"epoch {at['epoch']}" if path else None
        is_finished = at["epoch"] >= args.epochs
        print(runs.begin(args.checkpoint_dir, done, is_finished, at["images"]))
    return at


def main():
    args = command_line.parse_images(__doc__)
    at = train(args, set_up())
    # DDP's objects hold on to the process group: free them first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()  # NEW
    if at["epoch"] < args.epochs:
        sys.exit(stopping.EXIT_STATUS)


if __name__ == "__main__":
    command_line.run(main)
