"""Train a GPT on text with FSDP2, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_fsdp2.py --steps 200
    python train_fsdp2.py --num-workers 4 --steps 200

Runs on GPUs where there are any, else on CPUs. With `--checkpoint-dir`, a job whose worker
dies goes on from its last checkpoint (torchrun: with `--max-restarts=1`).
"""

import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as sd
from torch.nn import functional as F

from utils import checkpoint_files, command_line, datasets, settings, torchrun_or_ray
from utils.models import GPT, SIZES, fill_by_name


def train(args):
    """Train in a process group that exists already; returns what the run reports."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, config = settings.set_device(), SIZES[args.model]
    train_set = datasets.text("train", config.block_size, args.text)
    test_set = datasets.text("test", config.block_size, args.text)
    model = build(config, device, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    first_step = resume(model, optimizer, args)
    losses = train_steps(model, optimizer, train_set, first_step, args)
    test_loss = evaluate(model, test_set, rank, world_size, device)
    if args.export:
        export(model, args.export)
    return {"first_step": first_step, "losses": losses, "test_loss": test_loss}


def build(config, device, args):
    """A model of which no rank ever holds more than its shards and one parameter."""
    with torch.device("meta"):  # shapes, and no memory
        model = GPT(config)
    shard(model, dist.init_device_mesh(device.type, (dist.get_world_size(),)), args)
    model.to_empty(device="cpu" if args.offload else device)  # memory for the shards
    fill_by_name(model)  # the same weights on every number of ranks
    return model


def shard(model, mesh, args):
    """Cut every parameter into one piece per rank: first each block, then the rest."""
    # None: PyTorch frees each block after its forward, and keeps the rest for backward
    options = {"mesh": mesh, "reshard_after_forward": False if args.keep else None}
    if args.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    if args.bf16:  # stored in fp32, gathered and computed in bf16, reduced in fp32
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def train_steps(model, optimizer, train_set, first_step, args):
    """All steps from `first_step` on; returns their losses, each the mean of all ranks."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), settings.device()
    global_batch, losses, start = args.batch_size * world_size, [], time.perf_counter()
    for step in range(first_step, args.steps):
        batch = datasets.share_of_batch(train_set, step, global_batch, rank, world_size)
        loss = train_step(model, optimizer, *(t.to(device) for t in batch), args.clip)
        dist.all_reduce(loss)  # every rank saw other texts: report the mean of all
        losses.append(loss.item() / world_size)
        if rank == 0 and (step + 1) % 20 == 0:
            seconds = (time.perf_counter() - start) / len(losses)
            said = f"loss {losses[-1]:.3f}, {1000 * seconds:.0f} ms per step"
            print(f"step {step + 1}/{args.steps}: {said}", flush=True)
        if (folder := args.checkpoint_dir) and (step + 1) % args.save_every == 0:
            save_checkpoint(model, optimizer, step + 1, global_batch, folder)
    return losses


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
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        total += loss * bool(mine)
    dist.all_reduce(total)  # sum over all ranks
    model.train()
    return total.item() / test_set.tensors[1].numel()


def save_checkpoint(model, optimizer, step, global_batch, folder):
    """All ranks write their own shards, at the same time."""
    path = folder / f"step-{step:06d}"
    state = state_of(model, optimizer, step, global_batch)
    with checkpoint_files.explain_writing(path):  # a disk may be full
        dcp.save(state, checkpoint_id=path)


def state_of(model, optimizer, step, global_batch):
    """What a checkpoint holds: this rank's shards, and two numbers."""
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    return state | {"step": step, "global_batch": global_batch}


def last_checkpoint(folder):
    """The newest complete checkpoint in `folder`, or None; .metadata is written last."""
    return max((p.parent for p in folder.glob("step-*/.metadata")), default=None)


def resume(model, optimizer, args):
    """Load the last checkpoint, if there is one; returns the number of steps done."""
    found = [args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)]
    dist.broadcast_object_list(found)  # what rank 0 finds counts for all
    global_batch = args.batch_size * dist.get_world_size()
    return load_checkpoint(model, optimizer, global_batch, found[0]) if found[0] else 0


def load_checkpoint(model, optimizer, global_batch, folder):
    """Every rank reads the pieces of its own shards; returns the number of steps done."""
    state = state_of(model, optimizer, 0, 0)
    with checkpoint_files.explain_loading(folder, dcp.CheckpointException):
        dcp.load(state, checkpoint_id=folder)
    checkpoint_files.check_global_batch(state["global_batch"], global_batch)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    sd.set_state_dict(model, optimizer, **parts)
    return state["step"]


def export(model, path):
    """Gather the whole model on rank 0, and write a file that plain PyTorch reads."""
    options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=options)  # all ranks take part
    if dist.get_rank() == 0:
        with checkpoint_files.write_whole(path) as file:
            torch.save(weights, file)


def parse_args():
    parser = torchrun_or_ray.Parser(__doc__, batch_size=16)
    add = parser.add_argument
    add("--clip", type=command_line.positive, default=1.0, help="gradient norm")
    add("--keep", action="store_true", help="reshard_after_forward=False")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--offload", action="store_true", help="keep shards in CPU memory")
    args = parser.parse_args()
    if args.offload and settings.device().type == "cpu":
        parser.error("--offload needs a GPU to offload from: leave it out on a CPU.")
    return args


def main():
    args = parse_args()
    found = args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)
    # with offload, ranks also send what is in CPU memory
    backend = "cpu:gloo,cuda:nccl" if args.offload else None
    torchrun_or_ray.start(train, args, found, backend)


if __name__ == "__main__":
    command_line.run(main)
