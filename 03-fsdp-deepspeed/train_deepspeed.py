"""Train a GPT on text with DeepSpeed ZeRO, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_deepspeed.py --steps 200
    python train_deepspeed.py --num-workers 4 --steps 200

The ZeRO stage, precision, clipping and offload are set in ds_config.json. Runs on GPUs
where there are any, else on CPUs. With `--checkpoint-dir`, a job whose worker dies goes
on from its last checkpoint (torchrun: with `--max-restarts=1`).
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils import datasets, settings
from utils.models import GPT, GPT2_124M, SMOKE
from utils.zero import load_deepspeed

MODELS = {"smoke": SMOKE, "gpt2-124m": GPT2_124M}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, help="start with Ray Train")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, help="per worker, as in the config")
    parser.add_argument("--lr", type=float, help="of AdamW (default: by run mode)")
    parser.add_argument("--model", choices=MODELS, help="default: by run mode")
    parser.add_argument(
        "--text", type=settings.local_path, help="a text file (default: Python's help)"
    )
    parser.add_argument(
        "--ds-config",
        type=settings.local_path,
        default=Path(__file__).with_name("ds_config.json"),
    )
    parser.add_argument("--stage", type=int, help="ZeRO stage, instead of the config's")
    parser.add_argument("--checkpoint-dir", type=settings.local_path)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--resume", action="store_true", help="from --checkpoint-dir")
    parser.add_argument(
        "--export", type=settings.local_path, help="write the whole model to this file"
    )
    parser.add_argument(
        "--smoke-test", action="store_true", help="on CPU, also with GPUs"
    )
    args = parser.parse_args()
    if args.smoke_test:
        os.environ["WORKSHOP_MODE"] = "smoke"
    args.model = args.model or settings.pick(smoke="smoke", full="gpt2-124m")
    args.lr = args.lr or settings.pick(smoke=3e-3, full=3e-4)
    return args


def check(args, restarted):
    """Everything that can be wrong with how the script was called, checked first."""
    if args.resume and not args.checkpoint_dir:
        raise ValueError("--resume needs --checkpoint-dir: say where to resume from.")
    if args.export and not args.checkpoint_dir:
        raise ValueError("--export needs --checkpoint-dir: it reads a checkpoint.")
    if args.checkpoint_dir and not restarted:
        found = last_checkpoint(args.checkpoint_dir)
        if args.resume and not found:
            raise ValueError(
                f"There is no complete checkpoint in {args.checkpoint_dir}: leave out "
                "--resume, or name another folder."
            )
        if found and not args.resume:
            raise ValueError(
                f"{args.checkpoint_dir} holds checkpoints of an earlier run: add "
                "--resume to go on from them, or name another folder."
            )
        done = found and re.match(r"step-(\d+)", found.name)
        if done and int(done[1]) >= args.steps:
            raise ValueError(
                f"The checkpoint {found.name} has all {args.steps} steps, so nothing is "
                "left to train: raise --steps."
            )
    datasets.text("test", MODELS[args.model].block_size, args.text)
    return read_config(args)


def read_config(args):
    """The DeepSpeed configuration: ds_config.json, and --stage over it."""
    try:
        config = json.loads(args.ds_config.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{args.ds_config} is no readable JSON file: {error}."
        ) from None
    zero = config.setdefault("zero_optimization", {})
    if args.stage is not None:
        zero["stage"] = args.stage
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(
            f"The ZeRO stage is {zero['stage']}, but must be 0, 1, 2 or 3."
        )
    in_config = config.setdefault(
        "train_micro_batch_size_per_gpu", args.batch_size or 16
    )
    if args.batch_size not in (None, in_config):
        raise ValueError(
            f"{args.ds_config.name} says train_micro_batch_size_per_gpu {in_config}, and "
            f"--batch-size says {args.batch_size}: change one of them."
        )
    offload = [zero.get(f"offload_{part}") or {} for part in ("optimizer", "param")]
    targets = {part.get("device") or "none" for part in offload}
    on_cpu = settings.device().type == "cpu"
    if on_cpu and config.get("fp16", {}).get("enabled"):
        raise ValueError(
            "This script computes in fp16 on GPUs only: enable bf16 instead, which CPUs "
            "can compute."
        )
    if on_cpu and "cpu" in targets:
        raise ValueError(
            "Offload to the CPU needs a GPU to offload from: remove offload_optimizer "
            "and offload_param, or set their device to none."
        )
    if "nvme" in targets and not nvme_is_ready(offload):
        raise ValueError(
            "Offload to NVMe needs libaio (package libaio-dev) and an nvme_path that "
            "exists: install and name them, or set the device to cpu or none."
        )
    if targets != {"none"}:  # else it refuses PyTorch's AdamW, which this script uses
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def check_batch_size(config, world_size):
    """The three numbers in the file have to agree, once the world size is known."""
    per_pass = config["train_micro_batch_size_per_gpu"] * world_size
    passes, whole = (
        config.get(name) for name in ("gradient_accumulation_steps", "train_batch_size")
    )
    if whole and (whole % per_pass or (passes and whole != passes * per_pass)):
        raise ValueError(
            f"The configuration says train_batch_size {whole}, but {world_size} workers "
            f"train on {per_pass} texts in each of {passes or 'their'} passes: leave out "
            "train_batch_size, or correct it."
        )


def nvme_is_ready(offload):
    compatible = load_deepspeed().ops.__compatible_ops__
    paths = [part["nvme_path"] for part in offload if "nvme_path" in part]
    return bool(paths) and all(map(os.path.isdir, paths)) and compatible["async_io"]


def train_step(engine, inputs, targets):
    """One step on this rank's share of the batch; returns the loss of that share."""
    passes, mean = engine.gradient_accumulation_steps(), 0
    for piece, wanted in zip(inputs.chunk(passes), targets.chunk(passes)):
        logits = engine(piece).flatten(0, 1)  # [batch * time, vocabulary]
        at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(at_least_fp32), wanted.flatten())
        engine.backward(loss)  # averages gradients over all ranks, and over passes
        engine.step()  # after the last pass: clips, updates, sets gradients to zero
        mean += loss.detach() / passes
    return mean


@torch.no_grad()
def evaluate(model, test_set, rank, world_size, device, batch_size=16):
    """Mean loss over all test texts, each counted once, the same on every rank."""
    model.eval()
    total = torch.zeros((), device=device)
    whole = batch_size * world_size
    for start in range(0, len(test_set), whole):
        mine = range(start + rank, min(start + whole, len(test_set)), world_size)
        # every rank takes part in every forward pass, also one that has no text left
        inputs, targets = (t.to(device) for t in test_set[list(mine) or [0]])
        logits = model(inputs).flatten(0, 1).float()
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum") * bool(
            mine
        )
    dist.all_reduce(total)  # sum over all ranks
    model.train()
    return total.item() / test_set.tensors[1].numel()


def last_checkpoint(folder):
    """The newest complete checkpoint in `folder`, or None; `latest` is written last."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def save_checkpoint(engine, step, folder):
    """All ranks write their own partition, at the same time; then `latest` names it."""
    tag = f"step-{step:06d}"
    client_state = {"step": step, "global_batch": engine.train_batch_size()}
    # DeepSpeed's rank 0 would write `latest` while another rank may still be writing.
    engine.save_checkpoint(folder, tag, client_state=client_state, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        temporary = folder / "latest.tmp"
        temporary.write_text(tag)
        os.replace(temporary, folder / "latest")  # whole or not at all


def is_universal(folder):
    """Whether a checkpoint was converted: then `zero` holds a folder per parameter."""
    return (folder / "zero").is_dir()


def check_world_size(folder, world_size):
    """Partitions are made for one world size; a universal checkpoint fits every one."""
    made_for = len(list(folder.glob("*_optim_states.pt")))
    if made_for not in (0, world_size) and not is_universal(folder):
        raise ValueError(
            f"The checkpoint {folder.name} was made for {made_for} workers, and there "
            f"are {world_size}: convert it with `python -m deepspeed.checkpoint."
            f"ds_to_universal --input_folder {folder} --output_folder {folder}-universal "
            f"--inject_missing_state`, and write {folder.name}-universal into the file "
            "`latest`."
        )


def load_checkpoint(engine, folder):
    """Every rank reads its own partition; returns the number of steps done."""
    try:
        _, client_state = engine.load_checkpoint(folder.parent, folder.name)
        step, global_batch = client_state["step"], client_state["global_batch"]
    except Exception as error:  # torch, pickle and DeepSpeed each have their own
        raise ValueError(
            f"The checkpoint {folder} is damaged, of another model, or not seen by all "
            "nodes: name another folder, or start without --resume."
        ) from error
    if global_batch != engine.train_batch_size():
        raise ValueError(
            f"The checkpoint was trained with a global batch of {global_batch}, and now "
            f"it is {engine.train_batch_size()}: set train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps so that their product, times "
            f"{dist.get_world_size()} workers, is the former."
        )
    return step


def export(engine, checkpoint, path):
    """Put the partitions of a checkpoint together in a file that plain PyTorch reads."""
    from deepspeed.utils import zero_to_fp32

    dist.barrier()  # rank 0 reads what every rank wrote
    if dist.get_rank() == 0:
        if engine.zero_optimization_stage() == 0:  # nothing is in partitions
            whole = engine.module.state_dict()
            weights = {name: tensor.cpu() for name, tensor in whole.items()}
        else:
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                checkpoint.parent, checkpoint.name
            )
        torch.save(dict(weights), path)


def train(args):
    """Train in a process group that exists already; returns what the run reports."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, config = settings.device(), MODELS[args.model]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed = load_deepspeed()
    deepspeed.init_distributed(settings.backend())  # joins the one that Ray Train made
    train_set = datasets.text("train", config.block_size, args.text)
    test_set = datasets.text("test", config.block_size, args.text)

    check_batch_size(args.ds_config, world_size)
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    found = [args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)]
    dist.broadcast_object_list(found)  # what rank 0 finds counts for all
    folder = found[0]
    kind = {"load_universal": bool(folder) and is_universal(folder)}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=args.ds_config | {"checkpoint": kind}
    )
    global_batch, first_step = engine.train_batch_size(), 0
    if folder:
        check_world_size(folder, world_size)
        first_step = load_checkpoint(engine, folder)
    losses, start = [], time.perf_counter()
    for step in range(first_step, args.steps):
        batch = datasets.share_of_batch(train_set, step, global_batch, rank, world_size)
        loss = train_step(engine, *(t.to(device) for t in batch))
        dist.all_reduce(loss)  # every rank saw other texts: report the mean of all
        losses.append(loss.item() / world_size)
        if rank == 0 and (step + 1) % 20 == 0:
            milliseconds = (time.perf_counter() - start) / len(losses) * 1000
            print(
                f"step {step + 1}/{args.steps}: loss {losses[-1]:.3f}, "
                f"{milliseconds:.0f} ms per step",
                flush=True,
            )
        if args.checkpoint_dir and (step + 1) % args.save_every == 0:
            save_checkpoint(engine, step + 1, args.checkpoint_dir)
    test_loss = evaluate(engine, test_set, rank, world_size, device)
    if args.export:
        save_checkpoint(engine, args.steps, args.checkpoint_dir)
        export(engine, last_checkpoint(args.checkpoint_dir), args.export)
    return {"first_step": first_step, "losses": losses, "test_loss": test_loss}


def train_with_ray(args):
    """The same function on Ray's workers, which start again if one of them dies."""
    from utils.cluster import start_ray

    from ray.train import (
        FailureConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
    )
    from ray.train.torch import TorchTrainer

    from utils.failures import NoRestartOnBadInput, what_to_mend
    from utils.preflight import use_gpu

    try:
        start_ray(args.num_workers)
    except RuntimeError as problem:  # the cluster has no room for so many
        stop(problem)
    trainer = TorchTrainer(
        lambda config: train(argparse.Namespace(**config)),
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=use_gpu()),
        run_config=RunConfig(
            name=f"zero-{time.time_ns()}",  # a name used before would resume that run
            storage_path=str(settings.storage_path()),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[NoRestartOnBadInput()],
        ),
    )
    try:
        return trainer.fit().return_value
    except TrainingFailedError as failure:
        raise what_to_mend(failure) or failure from None


def stop(problem):
    """End with one sentence: that of rank 0, or of this rank if rank 0 has none."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)  # where rank 0 ends too, torchrun ends this rank before
    sys.exit(f"train_deepspeed.py: {problem}")


def main():
    under_torchrun = "RANK" in os.environ
    try:
        args = parse_args()
        if not under_torchrun and not args.num_workers:
            sys.exit(
                "Start me with torchrun: torchrun --nproc_per_node=2 train_deepspeed.py, "
                "or with Ray Train: python train_deepspeed.py --num-workers 2"
            )
        args.ds_config = check(
            args, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        )
        if under_torchrun:
            load_deepspeed().init_distributed(settings.backend())
            report = train(args)
        else:
            report = train_with_ray(args)
    except (ValueError, OSError) as problem:
        stop(problem)
    if os.environ.get("RANK", "0") == "0":
        # a run that restarted after its last step has no losses
        last = "".join(f"last loss {loss:.3f}, " for loss in report["losses"][-1:])
        print(
            f"steps {report['first_step'] + 1} to {args.steps}: "
            f"{last}test loss {report['test_loss']:.3f}"
        )
    if under_torchrun:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
