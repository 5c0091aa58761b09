"""Train ResNet-18 on images with DistributedDataParallel, started by Ray Train.

    python train_ray_ddp.py --num-workers 4 --epochs 3
    python train_ray_ddp.py --num-workers 4 --checkpoint-dir /shared/run

Runs on GPUs or else CPUs, of this machine or of the cluster that RAY_ADDRESS names. With
--checkpoint-dir the same command starts a run, and goes on with it: Ray replaces workers
that die, and a scheduler may start the job again. SIGTERM to this program, or the notice
that a node will be gone, saves after a step. Steps that a script for one device lacks end
in `# NEW`.

To take this along, copy `utils/runs.py` and `utils/ray_runs.py` with it. What else comes
from `utils` is the workshop's: its data, model, options and checks of a cluster.
"""

from pathlib import Path

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Subset

from utils import command_line, datasets, models, preflight, ray_runs
from utils.ray_runs import RayRun
from utils.runs import ResumableSampler, seed_rank


def load_data(dataset, batch_size, seed, device):
    """Return this rank's share of the training images, in batches, and all test images."""
    train_set = datasets.load(dataset, "train")
    sampler = ResumableSampler(train_set, seed=seed)  # NEW: deals them out
    options = {"sampler": sampler, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, batch_size, drop_last=True, **options)
    train_loader = prepare_data_loader(train_loader)  # NEW: moves batches to the device
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr, seed):
    """Return the model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = models.resnet18(in_channels=in_channels)
    options = {"gradient_as_bucket_view": True}
    # moves it to the device, too
    wrapped = prepare_model(model, parallel_strategy_kwargs=options)  # NEW
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model, wrapped, optimizer


def train_fn(config):
    """Train on every worker, in a process group that Ray has set up.

    Until all epochs are done, or the driver is told to stop; returns where it stands.
    """
    device = get_device()
    data = config["dataset"], config["batch_size"], config["seed"]
    train_loader, test_set = load_data(*data, device)
    in_channels = test_set[0][0].shape[0]
    model, wrapped, optimizer = build(in_channels, config["lr"], config["seed"])
    bf16 = device.type == "cuda" if config["bf16"] is None else config["bf16"]
    parts = save_checkpoint, load_checkpoint
    chosen = config["chosen"] | {"--bf16": bf16}
    run = RayRun(config["folder"], "train_ray_ddp", *parts, chosen)
    run.resume(model, optimizer)  # NEW: what was reported last, if anything
    for epoch in run.epochs(config["epochs"]):
        train_loader.sampler.set_epoch(epoch)  # NEW: another order in every epoch
        batches = run.batches(train_loader)  # NEW: all ranks stop after the same step
        loss = train_epoch(wrapped, optimizer, batches, device, bf16)
        accuracy = None if run.interrupted else evaluate(model, test_set, device)
        run.done(loss, test_accuracy=accuracy)  # NEW: reports to Ray
    return run.summary()


def train_epoch(model, optimizer, batches, device, bf16=False):
    """Train on batches; returns the mean loss of all ranks."""
    losses = torch.zeros(2, device=device)  # their sum, and how many
    for images, labels in batches:
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
    args = command_line.parse_images(__doc__, ray=True)
    folder = ray_runs.folder_of(Path(__file__).stem, args.checkpoint_dir)
    resources = {"CPU": 1.0} if args.smoke_test else None
    start_ray(args.num_workers, resources, log_to_driver=True)
    preflight.check_shared(folder)
    chosen = command_line.chosen(args, "dataset", "batch_size", "lr", "seed", "bf16")
    names = "dataset", "batch_size", "lr", "seed", "bf16", "epochs"
    options = {name: getattr(args, name) for name in names}
    use_gpu = preflight.use_gpu(args.smoke_test)
    trainer = TorchTrainer(  # NEW
        train_fn,
        train_loop_config=options | {"folder": folder, "chosen": chosen},
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=ray_runs.run_config(folder, args.keep),
    )
    ray_runs.end(ray_runs.fit(trainer, folder), args.checkpoint_dir)


if __name__ == "__main__":
    command_line.run(main)
