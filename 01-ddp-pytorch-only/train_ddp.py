"""Train ResNet-18 on images with DistributedDataParallel, started by torchrun.

    torchrun --nproc_per_node=4 train_ddp.py --epochs 3

Runs on GPUs where there are any, else on CPUs. With `--checkpoint-dir` and
`torchrun --max-restarts=1`, a job whose worker dies goes on from its last epoch. (On one
node, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for that: PyTorch issue 135712.)
"""

import argparse
import contextlib
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from utils import datasets, settings
from utils.models import resnet18


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


def save_checkpoint(state, path):
    """Write the whole file or nothing: under another name first, then rename."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError: disk full
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(
            f"The checkpoint {path} cannot be written ({error}): name a folder that is "
            "writable and has room. What was saved before is untouched."
        ) from error


def load_checkpoint(path, model):
    """Load the weights into `model`; return the rest (optimizer, epoch)."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        if missing := {"optimizer", "epoch"} - state.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
    except FileNotFoundError:
        raise OSError(
            f"There is no {path} to resume from: leave out --resume, or, on several "
            "nodes, name a folder that all of them share."
        ) from None
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"The checkpoint {path} is damaged or of another model ({reason}): name "
            "another folder, or start without --resume."
        ) from None
    return state


def set_up(args):
    """Everything that can be wrong with how the script was called, checked first."""
    if args.batch_size < 1 or args.epochs < 0:
        raise ValueError("--batch-size has to be at least 1, and --epochs at least 0.")
    device = settings.device()
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > num_gpus:  # on all ranks alike
            raise ValueError(
                f"There are more workers than GPUs ({num_gpus}): lower "
                "--nproc_per_node, or add --smoke-test to run on the CPU."
            )
        torch.cuda.set_device(device)
    # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun has set
    dist.init_process_group(settings.backend())
    train_set = datasets.load(args.dataset, "train")
    test_set = datasets.load(args.dataset, "test")
    if len(train_set) < args.batch_size * dist.get_world_size():
        raise ValueError(
            f"One batch of {args.batch_size} for each of {dist.get_world_size()} workers "
            f"is more than the {len(train_set)} training images: lower --batch-size."
        )
    torch.manual_seed(0)
    model = resnet18(in_channels=train_set[0][0].shape[0])

    state, path = None, args.checkpoint_dir and args.checkpoint_dir / "checkpoint.pt"
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if args.resume and not path:
        raise ValueError("--resume needs --checkpoint-dir: say where to resume from.")
    found = [bool(path and path.exists())]
    dist.broadcast_object_list(found)  # rank 0 saves: what it finds counts for all
    if path and (args.resume or (restarted and found[0])):
        state = load_checkpoint(path, model)
    elif found[0]:
        raise ValueError(
            f"{path} is the checkpoint of an earlier run: add --resume to go on from it, "
            "or name another folder."
        )
    if path and dist.get_rank() == 0:
        settings.check_writable(path.parent)
    return device, train_set, test_set, model, state, path


def train_epoch(model, optimizer, train_loader, device):
    """One pass over this rank's share of the images; the mean loss of all ranks."""
    losses = []
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        losses.append(train_step(model, optimizer, images, labels))
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # sum over all ranks, which saw different images
    return loss.item() / dist.get_world_size()


def train(args, device, train_set, test_set, model, state, path):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True
    )
    model = DDP(model.to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    first_epoch = 0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    if rank == 0:
        print(
            f"{world_size} workers on {device.type}, batch {args.batch_size} each and "
            f"{args.batch_size * world_size} global, {len(train_loader)} steps per epoch"
        )

    for epoch in range(first_epoch, args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # another order in every epoch
        loss = train_epoch(model, optimizer, train_loader, device)
        accuracy = evaluate(model.module, test_set, rank, world_size, device)
        if rank == 0:
            seconds = time.perf_counter() - start
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.3f}, "
                f"test accuracy {accuracy:.1%}, {seconds:.1f} s",
                flush=True,
            )
        if rank == 0 and path:
            state = {"model": model.module.state_dict(), "epoch": epoch}
            state |= {"optimizer": optimizer.state_dict(), "accuracy": accuracy}
            save_checkpoint(state, path)


def stop(problem):
    """End with one sentence: that of rank 0, or of this rank if rank 0 has none."""
    if os.environ["RANK"] != "0":
        time.sleep(10)  # where rank 0 ends too, torchrun ends this rank before
    sys.exit(f"train_ddp.py: {problem}")


def main():
    args = parse_args()
    if "RANK" not in os.environ:
        sys.exit("Start me with torchrun: torchrun --nproc_per_node=2 train_ddp.py")
    try:
        run = set_up(args)
    except (ValueError, OSError) as problem:
        stop(problem)
    try:
        train(args, *run)
    except OSError as problem:  # such as a disk that is full
        stop(problem)
    # DDP's objects hold on to the process group: free them first, or the exit may abort.
    del run
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
