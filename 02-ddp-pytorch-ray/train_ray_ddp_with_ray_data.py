"""Train ResNet-18 with Ray Train on images that Ray Data streams from Parquet files.

    python train_ray_ddp_with_ray_data.py --data-size-gb 1 --num-epochs 2 --num-workers 2
    python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder --num-workers 8

Without --data-path it writes its own data: --data-size-gb GB of augmented digits. The
dataset may be larger than the memory of the whole cluster: only a few blocks are in
memory at a time. Tasks on CPUs read and decode while the workers train.
"""

import io
import tempfile
import time
from functools import partial
from pathlib import Path

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from PIL import Image
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch.nn import functional as F

from utils import command_line, failures, parquet, preflight, settings
from utils.datasets import write_shards
from utils.models import resnet18

COLUMNS = ["image", "label"]  # the bytes of an image, and an integer from 0 to 9
# Read tasks per epoch; with more files than that, each reads several. An epoch begins by
# putting all of them into the object store, which takes about 2.5 ms each (measured).
MAX_BLOCKS = 1000
CORRUPT = -100  # label of an image that cannot be decoded: cross_entropy ignores it


def decode(batch, on_corrupt="fail"):
    """Images of any format and size to float32 of shape [n, 1, 28, 28], from 0 to 1.

    Runs in tasks on CPUs. An image that cannot be decoded fails the run with the name of
    its file, or ("skip") turns black and gets the label CORRUPT, and so is counted.
    """
    images = np.zeros([len(batch["image"]), 1, 28, 28], dtype=np.float32)
    labels = np.array(batch["label"], dtype=np.int64)
    for row, encoded in enumerate(batch["image"]):
        try:
            image = Image.open(io.BytesIO(encoded)).convert("L")
            images[row] = np.asarray(image.resize([28, 28], Image.Resampling.BOX)) / 255
        except Exception as error:  # a damaged image may raise anything
            if on_corrupt == "fail":
                raise ValueError(
                    f"An image in {batch['path'][row]} is corrupt ({error}): replace the "
                    "file, or leave such images out with --on-corrupt skip."
                ) from error
            labels[row] = CORRUPT
    return {"image": images, "label": labels}


def read_images(path, on_corrupt):
    """A Ray Dataset of decoded images, and its number of rows. No image is decoded yet."""
    # what `decode` raises shall arrive as it is, with the name of the file
    ray.data.DataContext.get_current().raise_original_map_exception = True
    system, files = parquet.find_parquet(path)
    files, num_rows, corrupt = parquet.check_parquet(
        system, files, COLUMNS, skip_corrupt=on_corrupt == "skip"
    )
    if corrupt:
        print(f"Left out {len(corrupt)} corrupt file(s): {', '.join(corrupt)}")
    dataset = ray.data.read_parquet(
        files,
        filesystem=system,
        columns=COLUMNS,
        shuffle="files",  # another order of files in every epoch
        include_paths=True,
        # Left alone, this reader cuts a few files into 200 blocks or more. With a block per
        # file, and without a batch_size below, one task reads and decodes. It is not Ray's
        # default one: utils sets RAY_DATA_USE_DATASOURCE_V2=0 (02/03 measures both).
        override_num_blocks=min(len(files), MAX_BLOCKS),
    )
    return dataset.map_batches(partial(decode, on_corrupt=on_corrupt)), num_rows


def build(lr):
    """The model, the same one wrapped with DDP, and its optimizer."""
    torch.manual_seed(0)
    model = resnet18()
    wrapped = prepare_model(  # moves it to the device, too
        model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, fused=True)
    return model, wrapped, optimizer


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    train_shard = ray.train.get_dataset_shard("train")  # of the stream, not of a list
    model, wrapped, optimizer = build(config["lr"])
    history = []
    for epoch in range(load_latest(model, optimizer), config["num_epochs"]):
        start = time.perf_counter()
        metrics = train_epoch(wrapped, optimizer, train_shard, config, epoch)
        seconds = time.perf_counter() - start
        if config["has_test_set"]:
            test_shard = ray.train.get_dataset_shard("test")
            ranks = dist.get_rank(), dist.get_world_size()
            metrics["accuracy"] = evaluate(model, test_shard, *ranks)
        history.append(metrics)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: "
                + ", ".join(f"{name} {metrics[name]:.5g}" for name in list(metrics)[1:])
                + f", {metrics['rows'] / seconds:.0f} rows per second"
            )
        report(model, optimizer, metrics)
    return history


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
    metrics = {"epoch": epoch, "loss": loss / dist.get_world_size()}
    return metrics | {"steps": len(losses), "rows": int(rows), "corrupt": int(corrupt)}


def train_step(model, optimizer, images, labels):
    """One step on this rank's share of the batch; returns the loss of that share."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model, test_shard, rank, world_size):
    """Accuracy over all test images, each counted once, the same on every rank.

    The test set is not split, as equal splits would drop rows: every rank streams all of
    it, and computes every `world_size`-th batch.
    """
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
    full_disk = settings.explain_writing("The checkpoint")
    with full_disk, tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | metrics, Path(folder, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def load_latest(model, optimizer):
    """Go on from the latest checkpoint, if any; returns the epoch to start at."""
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of a resumed run
    if not checkpoint:
        return 0
    with settings.explain_reading(checkpoint.path), checkpoint.as_directory() as folder:
        path = Path(folder, "checkpoint.pt")
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["epoch"] + 1


def parse_args():
    parser = command_line.Parser(__doc__)
    add, count = parser.add_argument, command_line.count
    add("--data-size-gb", type=float, default=1.0, help="GB to generate")
    add("--data-path", help="Parquet files: one, or a folder; local, s3://, gs://")
    add("--num-epochs", type=count, default=2)
    add("--num-workers", type=count, help="default: 2, or this machine's GPUs")
    add("--on-corrupt", choices=("fail", "skip"), default="fail")
    args = parser.parse_args()
    args.num_workers = args.num_workers or settings.num_workers()
    if args.smoke_test:
        args.data_size_gb = min(args.data_size_gb, 0.01)
    return args


def generate(size_gb):
    """Write images to train on, and a few to test; the folders of both."""
    folder = settings.storage_path() / "digits-224"
    shards = write_shards(folder / f"train-{size_gb:g}GB", size_gb, 224, 128)
    tests = write_shards(folder / "test", 0.002, 64, split="test")
    return str(max(shards).parent), str(max(tests).parent)


def load_data(args, train_path, test_path):
    """The datasets by name. Of the one to train on, only the rows are counted yet."""
    train_set, num_rows = read_images(train_path, args.on_corrupt)
    command_line.check_batch_size(args.batch_size, num_rows, args.num_workers)
    print(
        f"{num_rows} rows to train on, {num_rows // args.num_workers} for each worker"
    )
    data = {"train": train_set}
    if test_path:
        # Small: decoded once and kept in the object store, not again in every epoch.
        data["test"] = read_images(test_path, "fail")[0].materialize()
    return data


def fit(args, data, name, folder):
    """Let Ray start `train_fn` on all workers, and once more if one of them dies."""
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=vars(args) | {"has_test_set": "test" in data},
        datasets=data,
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(
            num_workers=args.num_workers, use_gpu=preflight.use_gpu()
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[failures.NoRestartOnBadInput()],
        ),
    )
    return trainer.fit()


def main():
    args = parse_args()
    name, folder = command_line.find_run(
        "train_ray_ddp_with_ray_data", args.checkpoint_dir, args.resume
    )
    paths = (args.data_path, None) if args.data_path else generate(args.data_size_gb)
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_spare_cpus(args.num_workers)
    for shared in (folder, paths[0]):
        preflight.check_shared(shared)
    with failures.in_a_sentence(lambda: parquet.check_pages(paths[0], COLUMNS)):
        result = fit(args, load_data(args, *paths), name, folder)
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    command_line.run(main)
