"""Train ResNet-18 with Ray Train on images that Ray Data streams from Parquet files.

    python train_ray_ddp_with_ray_data.py --data-size-gb 0.25 --num-epochs 2 --num-workers 2
    python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder --num-workers 8

With --checkpoint-dir the same command goes on after the last whole epoch, also when a
scheduler starts the job again. A stream cannot be joined in its middle: SIGTERM stops
after a step, and what was trained of the epoch so far is trained again.

To take this along, copy `utils/runs.py` and `utils/ray_runs.py` with it. What else comes
from `utils` is the workshop's: its data, model, options and checks of a cluster.
Steps that a script for one device lacks end in `# NEW`.

Without --data-path it writes its own data: --data-size-gb GB of augmented digits. The
dataset may be larger than the memory of the whole cluster: only a few blocks are in
memory at a time. Tasks on CPUs read and decode while the workers train.
"""

from functools import partial
from pathlib import Path

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from utils import command_line, datasets, failures, models, parquet, preflight, ray_runs
from utils.parquet import COLUMNS, CORRUPT, decode
from utils.ray_runs import RayRun
from utils.runs import seed_rank


def read_images(system, files, on_corrupt):
    """Return a Ray Dataset of decoded images of Parquet files; none is read yet."""
    # what `decode` raises shall arrive as it is, with the name of the file
    ray.data.DataContext.get_current().raise_original_map_exception = True
    dataset = ray.data.read_parquet(
        files,
        filesystem=system,
        columns=COLUMNS,
        shuffle="files",  # another order of files in every epoch
        include_paths=True,
        partitioning=None,  # a folder label=3 does not take the place of the column
        file_extensions=None,  # else a folder whose name has a ? has no rows
        # A block per file, so that one task reads and decodes it; by default this reader
        # (not Ray's newest: 02/03 measures both) would cut a few files into 200 blocks.
        # At most 1000: each block costs an epoch 2.5 ms at its start.
        override_num_blocks=min(len(files), 1000),
    )
    return dataset.map_batches(partial(decode, on_corrupt=on_corrupt))


def build(lr, seed):
    """Return the model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = models.resnet18()
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
    train_shard = ray.train.get_dataset_shard("train")  # of the stream, not of a list
    model, wrapped, optimizer = build(config["lr"], config["seed"])
    device = get_device()
    bf16 = device.type == "cuda" if config["bf16"] is None else config["bf16"]
    parts = save_checkpoint, load_checkpoint
    chosen = config["chosen"] | {"--bf16": bf16}
    run = RayRun(config["folder"], "train_ray_ddp_with_ray_data", *parts, chosen)
    run.resume(model, optimizer)  # NEW: what was reported last, if anything
    for epoch in run.epochs(config["epochs"]):
        stream = train_shard.iter_torch_batches(
            batch_size=config["batch_size"],
            local_shuffle_buffer_size=4 * config["batch_size"],  # at least 2 of them
            local_shuffle_seed=config["seed"] + epoch,
            drop_last=True,  # so that all ranks take the same number of steps
            prefetch_batches=2,
        )
        batches = run.batches(stream)  # NEW: all ranks stop after the same step
        loss, found = train_epoch(wrapped, optimizer, batches, device, bf16)
        if config["has_test_set"] and not run.interrupted:
            test_shard = ray.train.get_dataset_shard("test")
            found["test_accuracy"] = evaluate(model, test_shard, device)
        run.done(loss, **found)  # NEW: reports to Ray
    return run.summary()


def train_epoch(model, optimizer, batches, device, bf16=False):
    """Train on batches; returns the mean loss of all ranks, and counts of all ranks."""
    counts = torch.zeros(4, device=device)  # losses, their number, rows, corrupt
    for batch in batches:
        images, labels = batch["image"], batch["label"]  # on this worker's device
        loss, whole = (
            train_step(model, optimizer, images, labels, bf16),
            labels != CORRUPT,
        )
        # where no image of a batch is whole, its loss is 0/0
        counts[0] += torch.where(whole.any(), loss, 0)
        counts[1] += whole.any()
        counts[2] += len(labels)
        counts[3] += (~whole).sum()
    dist.all_reduce(counts)  # NEW: sum over all ranks, which saw different images
    losses, number, rows, corrupt = counts.tolist()
    return losses / number, {"rows": int(rows), "corrupt": int(corrupt)}


def train_step(model, optimizer, images, labels, bf16=False):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_shard, device):
    """Return the accuracy over all test images, each counted once, on every rank."""
    # not split, as equal splits would drop rows: each rank streams all, and computes some
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(2, device=device)  # correct, all
    for number, batch in enumerate(test_shard.iter_torch_batches(batch_size=128)):
        if number % world_size == rank:
            correct = model(batch["image"]).argmax(dim=1) == batch["label"]
            counts += torch.tensor([correct.sum(), len(correct)], device=device)
    dist.all_reduce(counts)  # NEW: sum over all ranks
    model.train()
    return (counts[0] / counts[1]).item()


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
    args = command_line.parse_stream(__doc__)
    folder = ray_runs.folder_of(Path(__file__).stem, args.checkpoint_dir)
    path, test_path = datasets.path_or_digits(args.data_path, args.data_size_gb)
    resources = {"CPU": 1.0} if args.smoke_test else None
    start_ray(args.num_workers, resources, log_to_driver=True)
    preflight.check_spare_cpus(args.num_workers, args.smoke_test)
    preflight.check_shared(folder, path)
    with failures.in_a_sentence(lambda: parquet.check_pages(path)):
        train_files = parquet.find_for_workers(path, args)
        data = {"train": read_images(*train_files, args.on_corrupt)}
        if test_path:  # small: decoded once, not again in every epoch
            tests = read_images(*parquet.find_parquet(test_path), "fail")
            data["test"] = tests.materialize()
    source = "data_path" if args.data_path else "data_size_gb"
    chosen = command_line.chosen(args, source, "batch_size", "lr", "seed", "bf16")
    options = {
        n: getattr(args, n) for n in ("batch_size", "lr", "seed", "bf16", "epochs")
    }
    options |= {"folder": folder, "chosen": chosen, "has_test_set": "test" in data}
    use_gpu = preflight.use_gpu(args.smoke_test)
    trainer = TorchTrainer(  # NEW
        train_fn,
        train_loop_config=options,
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=ray_runs.run_config(folder, args.keep),
    )
    result = ray_runs.fit(trainer, folder, lambda: parquet.check_pages(path))
    ray_runs.end(result, args.checkpoint_dir)


if __name__ == "__main__":
    command_line.run(main)
