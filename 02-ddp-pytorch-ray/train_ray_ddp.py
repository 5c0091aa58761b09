"""Train ResNet-18 on images with DistributedDataParallel, started by Ray Train.

    python train_ray_ddp.py --num-workers 4 --epochs 3
    python train_ray_ddp.py --num-workers 4 --checkpoint-dir /shared/runs

Runs on GPUs or else CPUs, of this machine or of the cluster that RAY_ADDRESS names. With
--checkpoint-dir the same command starts a run, and goes on with it: Ray replaces workers
that die, and a scheduler may start the job again. SIGTERM to this program, or the notice
that a node will be gone, saves after a step.

To take this along, put your own dataset into `load_data`, your model and optimizer into
`build` and your loss into `train_step`, and copy `stopping`, `runs`, `generators`,
`checkpoint_files` and `errors` of `utils`, which need nothing else of it, and
`ResumableSampler` of its `datasets`. What else comes from `utils` is the workshop's: its
models and data, its options, its checks of a machine. Steps that a script for one device
lacks end in `# NEW`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Subset

from utils import (
    checkpoint_files,
    command_line,
    datasets,
    failures,
    generators,
    models,
    preflight,
    runs,
    settings,
    stopping,
)


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
    train_loader = prepare_data_loader(train_loader)  # NEW: batches come on the device
    return train_loader, datasets.load(dataset, "test")


def build(in_channels, lr, seed):
    """Return the model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = models.resnet18(in_channels=in_channels)
    options = {"gradient_as_bucket_view": True}
    # moves it to the device, too
    wrapped = prepare_model(model, parallel_strategy_kwargs=options)  # NEW
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    generators.seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model, wrapped, optimizer


def train_fn(config):
    """Train on every worker, in a process group that Ray has set up.

    Until all epochs are done, or the driver is told to stop; returns where it stands.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset, batch_size, seed = (config[k] for k in ("dataset", "batch_size", "seed"))
    train_loader, test_set = load_data(dataset, batch_size, seed)
    model, wrapped, optimizer = build(test_set[0][0].shape[0], config["lr"], seed)
    steps_per_epoch = len(train_loader)
    global_batch = batch_size * world_size
    bf16 = config["bf16"]
    at = load_latest(model, optimizer, config)
    stop = stopping.Stop(config["stop_file"], ray.train.get_preemption_info)
    while at["epoch"] < config["epochs"]:
        # the step to go on at; images count, as the number of ranks may change
        first = min(at["images"] // global_batch, steps_per_epoch - 1)
        # another order in every epoch
        train_loader.sampler.set_epoch(at["epoch"], first * batch_size)  # NEW
        generators.seed_loader(train_loader, seed, at["epoch"], first)  # NEW
        loss, steps = train_epoch(wrapped, optimizer, train_loader, stop, bf16)
        at["images"] = (first + steps) * global_batch
        if first + steps == steps_per_epoch:
            accuracy = evaluate(model, test_set, rank, world_size, get_device())
            at |= {"epoch": at["epoch"] + 1, "images": 0, "accuracy": accuracy}
            if rank == 0:
                epoch = f"epoch {at['epoch']}"
                print(f"{epoch}: loss {loss:.3f}, test accuracy {accuracy:.1%}")
        report(model, optimizer, at | {"loss": loss}, config)
        if stop.asked == stopping.STOP:
            break
    return at


def train_epoch(model, optimizer, train_loader, stop, bf16=False):
    """Train on what is left of an epoch; returns the mean loss of all ranks, and steps.

    It ends early where a rank has been asked to stop.
    """
    losses = []
    for images, labels in train_loader:
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


def report(model, optimizer, metrics, config):
    """Report to Ray Train, on every rank: it keeps rank 0's metrics and checkpoint."""
    # generators of all ranks
    state = metrics | {"run": config["run"], "generators": generators.states()}
    writing = checkpoint_files.explain_writing("The checkpoint")
    inside = {"dir": config["run_folder"], "prefix": runs.SAVING}
    with writing, TemporaryDirectory(**inside) as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{folder}/checkpoint.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def load_latest(model, optimizer, config):
    """Go on from the latest checkpoint, if any; returns where it stands."""
    at = {"epoch": 0, "images": 0, "accuracy": None}
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of an earlier start
    if not checkpoint:
        if config["checkpoint_dir"] and dist.get_rank() == 0:
            print(runs.begin(config["checkpoint_dir"], None))
        return at
    reading = checkpoint_files.explain_reading(checkpoint.path)
    with reading, checkpoint.as_directory() as folder:
        file = f"{folder}/checkpoint.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        runs.check_same(checkpoint.path, state["run"], config["run"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generators.restore(state["generators"])
    at = {name: state[name] for name in at}
    if dist.get_rank() == 0:
        there = config["checkpoint_dir"] or Path(checkpoint.path).parent
        done, is_finished = f"epoch {at['epoch']}", at["epoch"] >= config["epochs"]
        print(runs.begin(there, done, is_finished, at["images"]))
    return at


def main():
    args = command_line.parse_images(__doc__, ray=True)
    name, folder = command_line.find_run(args)
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_shared(folder)
    use_gpu = preflight.use_gpu()
    trainer = TorchTrainer(  # NEW
        train_fn,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=1),
            **failures.run_options(name, folder, args.keep),
        ),
    )
    with stopping.passed_on(args.stop_file), failures.in_a_sentence():
        result = trainer.fit()
    command_line.end_run(result, args.epochs, args.checkpoint_dir)


if __name__ == "__main__":
    command_line.run(main)
