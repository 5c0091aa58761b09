"""Train ResNet-18 with Ray Train on images that Ray Data streams from Parquet files.

    python train_ray_ddp_with_ray_data.py --data-size-gb 1 --num-epochs 2 --num-workers 2
    python train_ray_ddp_with_ray_data.py --data-path s3://bucket/folder --num-workers 8

Without --data-path it writes its own data: --data-size-gb GB of augmented digits. The
dataset may be larger than the memory of the whole cluster: only a few blocks are in
memory at a time. Tasks on CPUs read and decode while the workers train.
"""

import argparse
import io
import os
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from utils.cluster import start_ray  # sets what Ray reads when it is imported

import numpy as np
import pyarrow as pa
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

from utils import command_line, parquet, preflight, settings
from utils.datasets import write_shards
from utils.failures import NoRestartOnBadInput, what_failed
from utils.models import resnet18

COLUMNS = ["image", "label"]  # the bytes of an image, and an integer from 0 to 9
# Read tasks per epoch; with more files than that, each reads several. An epoch begins by
# putting all of them into the object store, which takes about 2.5 ms each (measured).
MAX_BLOCKS = 1000
CORRUPT = -100  # label of an image that cannot be decoded: cross_entropy ignores it


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data-size-gb", type=float, default=1.0, help="GB to generate"
    )
    parser.add_argument(
        "--data-path", help="Parquet files: one, or a folder; local, s3://, gs://"
    )
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument(
        "--num-workers", type=int, help="default: 2, or this machine's GPUs"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW")
    parser.add_argument("--on-corrupt", choices=("fail", "skip"), default="fail")
    parser.add_argument(
        "--checkpoint-dir", type=settings.local_path, help="save there after each epoch"
    )
    parser.add_argument("--resume", action="store_true", help="from --checkpoint-dir")
    parser.add_argument(
        "--smoke-test", action="store_true", help="on CPU, generating 0.01 GB at most"
    )
    args = parser.parse_args()
    if args.smoke_test:
        os.environ["WORKSHOP_MODE"] = "smoke"
        args.data_size_gb = min(args.data_size_gb, 0.01)
    args.num_workers = args.num_workers or settings.num_workers()
    return args


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
                ) from None
            labels[row] = CORRUPT
    return {"image": images, "label": labels}


def read_images(path, on_corrupt):
    """A Ray Dataset of decoded images, and its number of rows. No image is decoded yet."""
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
        # Left alone, Ray Data cuts a few files into 200 blocks or more. With a block per
        # file, and without a batch_size below, one task reads and decodes.
        override_num_blocks=min(len(files), MAX_BLOCKS),
    )
    return dataset.map_batches(partial(decode, on_corrupt=on_corrupt)), num_rows


def train_step(model, optimizer, images, labels):
    """One step on this rank's share of the batch; returns the loss of that share."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients over all ranks in here
    optimizer.step()
    return loss.detach()


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


def load_latest(model):
    """Load the latest checkpoint, if any; returns it, and the epoch to start at."""
    checkpoint = ray.train.get_checkpoint()  # after a failure, or of a resumed run
    if not checkpoint:
        return None, 0
    try:
        with checkpoint.as_directory() as folder:
            path = Path(folder, "checkpoint.pt")
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        if missing := {"optimizer", "epoch"} - state.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"The checkpoint {checkpoint.path} is damaged or of another model "
            f"({reason}): name another folder, or start without --resume."
        ) from None
    return state, state["epoch"] + 1


def report(model, optimizer, metrics):
    """Report to Ray Train, on every rank: it keeps rank 0's metrics and checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | metrics, Path(folder, "checkpoint.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)  # waits for all ranks


def train_fn(config):
    """What every worker runs, in a process group that Ray has set up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_shard = ray.train.get_dataset_shard("train")  # of the stream, not of a list
    torch.manual_seed(0)
    model = resnet18()
    state, first_epoch = load_latest(model)
    wrapped = prepare_model(  # moves it to the device and wraps it with DDP
        model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=config["lr"], fused=True)
    if state:
        optimizer.load_state_dict(state["optimizer"])

    history = []
    for epoch in range(first_epoch, config["num_epochs"]):
        start = time.perf_counter()
        metrics = train_epoch(wrapped, optimizer, train_shard, config, epoch)
        seconds = time.perf_counter() - start
        if config["has_test_set"]:
            test_shard = ray.train.get_dataset_shard("test")
            metrics["accuracy"] = evaluate(model, test_shard, rank, world_size)
        history.append(metrics)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: "
                + ", ".join(f"{name} {metrics[name]:.5g}" for name in list(metrics)[1:])
                + f", {metrics['rows'] / seconds:.0f} rows per second"
            )
        report(model, optimizer, metrics)
    return history


def set_up(args):
    """Everything that can be wrong with how the script was called, checked first."""
    command_line.check_counts(
        num_epochs=args.num_epochs,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
    )
    name, folder = command_line.find_run(
        "train_ray_ddp_with_ray_data", args.checkpoint_dir, args.resume
    )
    if not args.data_path:
        generated = settings.storage_path() / "digits-224"
        shards = write_shards(
            generated / f"train-{args.data_size_gb:g}GB", args.data_size_gb, 224, 128
        )
        tests = write_shards(generated / "test", 0.002, 64, split="test")
        train_path, test_path = (str(max(each).parent) for each in (shards, tests))
    else:
        train_path, test_path = args.data_path, None
    start_ray(args.num_workers, log_to_driver=True)
    preflight.check_spare_cpus(args.num_workers)
    for shared in (folder, train_path):
        preflight.check_shared(shared)
    train_set, num_rows = read_images(train_path, args.on_corrupt)
    preflight.check_batch_size(args.batch_size, num_rows, args.num_workers)
    print(
        f"{num_rows} rows to train on, {num_rows // args.num_workers} for each worker"
    )
    data = {"train": train_set}
    if test_path:
        # Small: decoded once and kept in the object store, not again in every epoch.
        data["test"] = read_images(test_path, "fail")[0].materialize()
    return name, folder, data


def explain(error, path):
    """What to mend after an error, in one sentence, or None: then read the traceback."""
    # On its way through Ray Data an error of `decode` loses its type, and not its text.
    if decoding := re.search(r"^ValueError: (An image in .+)$", str(error), re.M):
        return decoding[1]
    in_task = isinstance(error, ray.exceptions.RayTaskError)
    cause = error.cause if in_task else error
    if path and in_task and isinstance(cause, (OSError, pa.ArrowException)):
        try:  # a run begins when all footers are whole: which file has a damaged page?
            files = parquet.find_parquet(path)
            parquet.check_parquet(*files, COLUMNS, pages=True)
        except (ValueError, OSError) as problem:
            return problem
    return cause if isinstance(cause, (ValueError, OSError)) else None


def main():
    args = parse_args()
    try:
        name, folder, data = set_up(args)
    except (ValueError, OSError, RuntimeError) as problem:
        sentence = explain(problem, args.data_path) or problem
        sys.exit(f"train_ray_ddp_with_ray_data.py: {sentence}")
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
            failure_config=FailureConfig(max_failures=1),  # one restart
            callbacks=[NoRestartOnBadInput()],
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as failure:
        ray.shutdown()  # ends the workers' logs: what went wrong stands below them
        for error in what_failed(failure):
            if sentence := explain(error, args.data_path):
                sys.exit(f"train_ray_ddp_with_ray_data.py: {sentence}")
        raise
    print(f"Trained. The last checkpoint is in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
