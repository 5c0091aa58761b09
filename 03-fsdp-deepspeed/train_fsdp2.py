"""Train a GPT on text with FSDP2, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_fsdp2.py --steps 200
    python train_fsdp2.py --num-workers 4 --steps 200

Runs on GPUs where there are any, else on CPUs. With `--checkpoint-dir`, a job whose worker
dies goes on from its last checkpoint (torchrun: with `--max-restarts=1`).
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import functional as F

from utils import datasets, settings
from utils.models import GPT, GPT2_124M, SMOKE

MODELS = {"smoke": SMOKE, "gpt2-124m": GPT2_124M}
BOTH = "cpu:gloo,cuda:nccl"  # with offload, ranks also send what is in CPU memory


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, help="start with Ray Train")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, help="of AdamW (default: by run mode)")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm")
    parser.add_argument("--model", choices=MODELS, help="default: by run mode")
    parser.add_argument(
        "--text", type=settings.local_path, help="a text file (default: Python's help)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="reshard_after_forward=False"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument(
        "--offload", action="store_true", help="keep shards in CPU memory"
    )
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
    if args.offload and settings.device().type == "cpu":
        raise ValueError(
            "--offload needs a GPU to offload from: leave it out on a CPU."
        )
    if args.resume and not args.checkpoint_dir:
        raise ValueError("--resume needs --checkpoint-dir: say where to resume from.")
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
        if found and int(found.name.split("-")[1]) >= args.steps:
            raise ValueError(
                f"The checkpoint {found.name} has all {args.steps} steps, so nothing is "
                "left to train: raise --steps."
            )
    datasets.text("test", MODELS[args.model].block_size, args.text)


def shard(model, mesh, args):
    """Cut every parameter into one piece per rank: first each block, then the rest."""
    options = {
        "mesh": mesh,
        "reshard_after_forward": not args.keep,
        "offload_policy": CPUOffloadPolicy() if args.offload else OffloadPolicy(),
    }
    if args.bf16:  # stored in fp32, gathered and computed in bf16, reduced in fp32
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_step(model, optimizer, inputs, targets, clip):
    """One step on this rank's share of the batch; returns the loss of that share."""
    logits = model(inputs).flatten(0, 1)  # [batch * time, vocabulary]
    at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.to(at_least_fp32), targets.flatten())
    optimizer.zero_grad()
    loss.backward()  # FSDP2 averages the gradients over all ranks and keeps a shard
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # over all ranks
    optimizer.step()
    return loss.detach()


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
    """The newest complete checkpoint in `folder`, or None; .metadata is written last."""
    return max((p.parent for p in folder.glob("step-*/.metadata")), default=None)


def save_checkpoint(model, optimizer, step, global_batch, folder):
    """All ranks write their own shards, at the same time."""
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    state["global_batch"] = global_batch
    dcp.save(state, checkpoint_id=folder / f"step-{step:06d}")


def load_checkpoint(model, optimizer, global_batch, folder):
    """Every rank reads the pieces of its own shards; returns the number of steps done."""
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    state["global_batch"] = global_batch
    try:
        dcp.load(state, checkpoint_id=folder)
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise ValueError(
            f"The checkpoint {folder} is damaged, of another model, or not seen by all "
            "nodes: name another folder, or start without --resume."
        ) from error
    if state["global_batch"] != global_batch:
        world_size = dist.get_world_size()
        raise ValueError(
            f"The checkpoint was trained with a global batch of {state['global_batch']}, "
            f"and {world_size} workers with the given --batch-size make {global_batch}: "
            f"set --batch-size so that it times {world_size} is the former."
        )
    sd.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return state["step"]


def export(model, path):
    """Gather the whole model on rank 0, and write a file that plain PyTorch reads."""
    options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=options)  # all ranks take part
    if dist.get_rank() == 0:
        torch.save(weights, path)


def train(args):
    """Train in a process group that exists already; returns what the run reports."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, config = settings.device(), MODELS[args.model]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    train_set = datasets.text("train", config.block_size, args.text)
    test_set = datasets.text("test", config.block_size, args.text)

    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    mesh = dist.init_device_mesh(device.type, (world_size,))
    model = shard(GPT(config).to(device), mesh, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    global_batch, first_step = args.batch_size * world_size, 0
    found = [args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)]
    dist.broadcast_object_list(found)  # what rank 0 finds counts for all
    folder = found[0]
    if folder:
        first_step = load_checkpoint(model, optimizer, global_batch, folder)
    losses, start = [], time.perf_counter()
    for step in range(first_step, args.steps):
        batch = datasets.share_of_batch(train_set, step, global_batch, rank, world_size)
        loss = train_step(model, optimizer, *(t.to(device) for t in batch), args.clip)
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
            save_checkpoint(
                model, optimizer, step + 1, global_batch, args.checkpoint_dir
            )
    test_loss = evaluate(model, test_set, rank, world_size, device)
    if args.export:
        export(model, args.export)
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
    from ray.train.torch import TorchConfig, TorchTrainer

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
        # left alone, Ray takes NCCL for GPUs and gloo for CPUs
        torch_config=TorchConfig(backend=BOTH if args.offload else None),
        run_config=RunConfig(
            name=f"fsdp2-{time.time_ns()}",  # a name used before would resume that run
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
    sys.exit(f"train_fsdp2.py: {problem}")


def main():
    under_torchrun = "RANK" in os.environ
    try:
        args = parse_args()
        if not under_torchrun and not args.num_workers:
            sys.exit(
                "Start me with torchrun: torchrun --nproc_per_node=2 train_fsdp2.py, or "
                "with Ray Train: python train_fsdp2.py --num-workers 2"
            )
        check(args, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        if under_torchrun:
            dist.init_process_group(BOTH if args.offload else settings.backend())
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
