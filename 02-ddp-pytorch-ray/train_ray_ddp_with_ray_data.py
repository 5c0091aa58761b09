"""Train ResNet-18 with Ray Train on images that Ray Data streams from Parquet files.

    python train_ray_ddp_with_ray_data.py --data-size-gb 0.25 --num-epochs 2 --num-workers 2
    python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder --num-workers 8

With --checkpoint-dir the same command goes on after the last whole epoch, also when a
scheduler starts the job again. A stream cannot be joined in its middle: SIGTERM stops
after a step, and what was trained of the epoch so far is trained again.

To take this along, put your decoding into `read_images`, your model and optimizer into
`build` and your loss into `train_step`, and copy `stopping`, `runs`, `generators`,
`checkpoint_files` and `errors` of `utils`, which need nothing else of it. What
else comes from `utils` is the workshop's: its models and data, its options, its checks
of a machine. Steps that a script for one device lacks end in `# NEW`.

Without --data-path it writes its own data: --data-size-gb GB of augmented digits. The
dataset may be larger than the memory of the whole cluster: only a few blocks are in
memory at a time. Tasks on CPUs read and decode while the workers train.
"""

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from utils import (
    checkpoint_files,
    command_line,
    datasets,
    failures,
    generators,
    models,
    parquet,
    preflight,
    runs,
    stopping,
)
from utils.parquet import COLUMNS, CORRUPT, decode


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
    generators.seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model, wrapped, optimizer


def train_fn(config):
    """Train on every worker, in a process group that Ray has set up.

    Until all epochs are done, or the driver is told to stop; returns where it stands.
    """
    train_shard = ray.train.get_dataset_shard("train")  # of the stream, not of a list
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, wrapped, optimizer = build(config["lr"], config["seed"])
    at = load_latest(model, optimizer, config)
    stop = stopping.Stop(config["stop_file"])
    while at["epoch"] < config["epochs"]:
        start = time.perf_counter()
        metrics = train_epoch(
            wrapped, optimizer, train_shard, config, at["epoch"], stop
        )
        if stop.asked:
            return at | {"trained_again": metrics["rows"]}
        rows_per_s = metrics["rows"] / (time.perf_counter() - start)
        at |= {"epoch": at["epoch"] + 1, "accuracy": None}
        if config["has_test_set"]:
            test_shard = ray.train.get_dataset_shard("test")
            at["accuracy"] = evaluate(model, test_shard, rank, world_size)
            metrics["accuracy"] = at["accuracy"]
        if rank == 0:
            said = ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())
            print(f"epoch {at['epoch']}: {said}, {rows_per_s:.0f} rows per second")
        report(model, optimizer, at | metrics, config)
    return at


def train_epoch(model, optimizer, train_shard, config, epoch, stop):
    """Pass over the rows of this rank's shard; returns sums and means of all ranks.

    It ends early where a rank has been asked to stop.
    """
    losses = []
    counts = torch.zeros(3, device=get_device())  # loss, rows, corrupt
    for batch in train_shard.iter_torch_batches(
        batch_size=config["batch_size"],
        local_shuffle_buffer_size=4 * config["batch_size"],  # at least 2 of them
        local_shuffle_seed=config["seed"] + epoch,
        drop_last=True,  # so that all ranks take the same number of steps
        prefetch_batches=2,
    ):
        images, labels = batch["image"], batch["label"]  # on this worker's device
        losses.append(train_step(model, optimizer, images, labels, config["bf16"]))
        counts[1] += len(labels)
        counts[2] += (labels == CORRUPT).sum()
        if stop.agreed():
            break
    counts[0] = torch.stack(losses).nanmean()  # nan: no image of a batch was whole
    dist.all_reduce(counts)  # NEW: sum over all ranks, which saw different images
    loss, rows, corrupt = counts.tolist()
    metrics = {"loss": loss / dist.get_world_size(), "steps": len(losses)}
    return metrics | {"rows": int(rows), "corrupt": int(corrupt)}


def train_step(model, optimizer, images, labels, bf16=False):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_shard, rank, world_size):
    """Return the accuracy over all test images, each counted once, on every rank."""
    # not split, as equal splits would drop rows: each rank streams all, and computes some
    model.eval()
    device = next(model.parameters()).device
    counts = torch.zeros(2, device=device)  # correct, all
    for number, batch in enumerate(test_shard.iter_torch_batches(batch_size=128)):
        if number % world_size == rank:
            correct = model(batch["image"]).argmax(dim=1) == batch["label"]
            counts += torch.tensor([correct.sum(), len(correct)], device=device)
    dist.all_reduce(counts)  # NEW: sum over all ranks
    model.train()
    return (counts[0] / counts[1]).item()


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


def fit(args, data, run):
    """Let Ray start `train_fn` on all workers, and once more if one of them dies."""
    use_gpu = preflight.use_gpu()
    trainer = TorchTrainer(  # NEW
        train_fn,
        train_loop_config=vars(args) | {"has_test_set": "test" in data},
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1), **run),
    )
    with stopping.passed_on(args.stop_file):
        return trainer.fit()


def main():
    args = command_line.parse_stream(__doc__)
    name, folder = command_line.find_run(args)
    run = failures.run_options(name, folder, args.keep)
    path, test_path = datasets.path_or_digits(args.data_path, args.data_size_gb)
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_spare_cpus(args.num_workers)
    preflight.check_shared(folder, path)
    with failures.in_a_sentence(lambda: parquet.check_pages(path)):
        train_files = parquet.find_for_workers(path, args)
        data = {"train": read_images(*train_files, args.on_corrupt)}
        if test_path:  # small: decoded once, not again in every epoch
            tests = read_images(*parquet.find_parquet(test_path), "fail")
            data["test"] = tests.materialize()
        result = fit(args, data, run)
    command_line.end_run(result, args.epochs, args.checkpoint_dir)


if __name__ == "__main__":
    command_line.run(main)
