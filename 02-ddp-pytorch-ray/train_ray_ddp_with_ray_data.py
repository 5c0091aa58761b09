"""Train ResNet-18 with Ray Train on images that Ray Data streams from Parquet files.

    python train_ray_ddp_with_ray_data.py --data-size-gb 1 --num-epochs 2 --num-workers 2
    python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder --num-workers 8

Without --data-path it writes its own data: --data-size-gb GB of augmented digits. The
dataset may be larger than the memory of the whole cluster: only a few blocks are in
memory at a time. Tasks on CPUs read and decode while the workers train.
"""

import time
from functools import partial
from tempfile import TemporaryDirectory

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import ray.train
import torch
import torch.distributed as dist
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from utils import command_line, datasets, failures, models, parquet, preflight
from utils.checkpoint_files import explain_reading, explain_writing
from utils.parquet import COLUMNS, CORRUPT, decode


def read_images(system, files, on_corrupt):
    """A Ray Dataset of decoded images from Parquet files; none is read yet."""
    # what `decode` raises shall arrive as it is, with the name of the file
    ray.data.DataContext.get_current().raise_original_map_exception = True
    dataset = ray.data.read_parquet(
        files,
        filesystem=system,
        columns=COLUMNS,
        shuffle="files",  # another order of files in every epoch
        include_paths=True,
        # By default this reader (`utils.processes` chooses it, 02/03 measures it) cuts even
        # a few files into 200 blocks. With a block per file, and no batch_size below, one
        # task reads and decodes it. Each block delays an epoch by 2.5 ms: 1000 at most.
        override_num_blocks=min(len(files), 1000),
    )
    return dataset.map_batches(partial(decode, on_corrupt=on_corrupt))


def build(lr):
    """The model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(0)
    model = models.resnet18()
    options = {"gradient_as_bucket_view": True}
    wrapped = prepare_model(model, parallel_strategy_kwargs=options)  # moves it, too
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    train_shard = ray.train.get_dataset_shard("train")  # of the stream, not of a list
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, wrapped, optimizer = build(config["lr"])
    for epoch in range(load_latest(model, optimizer), config["num_epochs"]):
        start = time.perf_counter()
        metrics = train_epoch(wrapped, optimizer, train_shard, config, epoch)
        rows_per_s = metrics["rows"] / (time.perf_counter() - start)
        if config["has_test_set"]:
            test_shard = ray.train.get_dataset_shard("test")
            metrics["accuracy"] = evaluate(model, test_shard, rank, world_size)
        if rank == 0:
            said = ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())
            print(f"epoch {epoch + 1}: {said}, {rows_per_s:.0f} rows per second")
        report(model, optimizer, {"epoch": epoch} | metrics)


def train_epoch(model, optimizer, train_shard, config, epoch):
    """One pass over the rows of this rank's shard; the sums and means of all ranks."""
    losses, counts = [], torch.zeros(3, device=get_device())  # loss, rows, corrupt
    for batch in train_shard.iter_torch_batches(
        batch_size=config["batch_size"],
        local_shuffle_buffer_size=4 * config["batch_size"],  # at least 2 of them
        local_shuffle_seed=epoch,
        drop_last=True,  # so that all ranks take the same number of steps
        prefetch_batches=2,
    ):
        images, labels = batch["image"], batch["label"]  # on this worker's device
        losses.append(train_step(model, optimizer, images, labels))
        counts[1] += len(labels)
        counts[2] += (labels == CORRUPT).sum()
    counts[0] = torch.stack(losses).nanmean()  # nan: no image of a batch was whole
    dist.all_reduce(counts)  # sum over all ranks, which saw different images
    loss, rows, corrupt = counts.tolist()
    metrics = {"loss": loss / dist.get_world_size(), "steps": len(losses)}
    return metrics | {"rows": int(rows), "corrupt": int(corrupt)}


def train_step(model, optimizer, images, labels):
    """One step on this rank's share of the batch; returns the loss of that share."""
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_shard, rank, world_size):
    """Accuracy over all test images, each counted once, the same on every rank."""
    # not split, as equal splits would drop rows: each rank streams all, and computes some
    model.eval()
    device = next(model.parameters()).device
    counts = torch.zeros(2, device=device)  # correct, all
    for number, batch in enumerate(test_shard.iter_torch_batches(batch_size=128)):
        if number % world_size == rank:
            correct = model(batch["image"]).argmax(dim=1) == batch["label"]
            counts += torch.tensor([correct.sum(), len(correct)], device=device)
    dist.all_reduce(counts)  # sum over all ranks
    model.train()
    return (counts[0] / counts[1]).item()


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


def fit(args, data, run):
    """Let Ray start `train_fn` on all workers, and once more if one of them dies."""
    use_gpu = preflight.use_gpu()
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=vars(args) | {"has_test_set": "test" in data},
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1), **run),
    )
    return trainer.fit()


def main():
    args = command_line.parse_stream(__doc__)
    run = failures.run_options(*command_line.find_run(args.checkpoint_dir, args.resume))
    path, test_path = datasets.path_or_digits(args.data_path, args.data_size_gb)
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_spare_cpus(args.num_workers)
    preflight.check_shared(run["storage_path"], path)
    with failures.in_a_sentence(lambda: parquet.check_pages(path)):
        train_files = parquet.find_for_workers(path, args)
        data = {"train": read_images(*train_files, args.on_corrupt)}
        if test_path:  # small: decoded once, not again in every epoch
            tests = read_images(*parquet.find_parquet(test_path), "fail")
            data["test"] = tests.materialize()
        result = fit(args, data, run)
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    command_line.run(main)
