"""Train a GPT on text with DeepSpeed ZeRO, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_deepspeed.py --steps 200
    python train_deepspeed.py --num-workers 4 --steps 200

The ZeRO stage, precision and offload are set in ds_config.json; where it says "auto", the
command line decides. Runs on GPUs where there are any, else on CPUs. With
`--checkpoint-dir`, a job whose worker dies goes on from its last checkpoint (torchrun:
with `--max-restarts=1`).
"""

import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils import (
    checkpoint_files,
    command_line,
    datasets,
    settings,
    torchrun_or_ray,
    zero_config,
)
from utils.models import GPT, SIZES, fill_by_name
from utils.zero import LOAD_ERRORS, check_world_size, is_universal, load_deepspeed


def train(args):
    """Train in a process group that exists already; returns what the run reports."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, shape = settings.set_device(), SIZES[args.model]
    train_set = datasets.text("train", shape.block_size, args.text)
    test_set = datasets.text("test", shape.block_size, args.text)

    model = build(shape, device, args.engine_config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    folder = checkpoint_to_load(args.checkpoint_dir)
    engine = make_engine(model, optimizer, args.engine_config, folder)

    first_step = load_checkpoint(engine, folder) if folder else 0
    losses = train_steps(engine, train_set, first_step, args)
    test_loss = evaluate(engine, test_set, rank, world_size, device)
    if args.export:
        save_checkpoint(engine, args.steps, args.checkpoint_dir)
        export(engine, last_checkpoint(args.checkpoint_dir), args.export)
    return {"first_step": first_step, "losses": losses, "test_loss": test_loss}


def build(shape, device, config):
    """A model of which, at stage 3, no rank ever holds more than its part and a layer."""
    deepspeed = load_deepspeed()
    deepspeed.init_distributed(settings.backend())  # joins the group that exists
    cut = config["zero_optimization"].get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=cut):
        model = GPT(shape).to(device)  # every layer is cut as soon as it is made
    # whole again one by one; of what the ranks then write, that of rank 0 counts
    gather = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    fill_by_name(model, gather)  # the same weights on every number of ranks
    return model


def make_engine(model, optimizer, config, folder):
    """Hand over model, optimizer and settings; `folder` is the checkpoint to load."""
    config["checkpoint"] = {"load_universal": bool(folder) and is_universal(folder)}
    together = {"model": model, "optimizer": optimizer, "config": config}
    return load_deepspeed().initialize(**together)[0]


def train_steps(engine, train_set, first_step, args):
    """All steps from `first_step` on; returns their losses, each the mean of all ranks."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), settings.device()
    global_batch, losses, start = engine.train_batch_size(), [], time.perf_counter()
    for step in range(first_step, args.steps):
        batch = datasets.share_of_batch(train_set, step, global_batch, rank, world_size)
        loss = train_step(engine, *(t.to(device) for t in batch))
        dist.all_reduce(loss)  # every rank saw other texts: report the mean of all
        losses.append(loss.item() / world_size)
        if rank == 0 and (step + 1) % 20 == 0:
            seconds = (time.perf_counter() - start) / len(losses)
            said = f"loss {losses[-1]:.3f}, {1000 * seconds:.0f} ms per step"
            print(f"step {step + 1}/{args.steps}: {said}", flush=True)
        if args.checkpoint_dir and (step + 1) % args.save_every == 0:
            save_checkpoint(engine, step + 1, args.checkpoint_dir)
    return losses


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
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        total += loss * bool(mine)
    dist.all_reduce(total)  # sum over all ranks
    model.train()
    return total.item() / test_set.tensors[1].numel()


def save_checkpoint(engine, step, folder):
    """All ranks write their own partition, at the same time; then `latest` names it."""
    tag = f"step-{step:06d}"
    extra = {"step": step, "global_batch": engine.train_batch_size()}
    with checkpoint_files.explain_writing(folder / tag):  # a disk may be full
        # DeepSpeed's rank 0 would write `latest` while another rank may still be writing
        engine.save_checkpoint(folder, tag, client_state=extra, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        with checkpoint_files.write_whole(folder / "latest") as file:
            file.write(tag.encode())


def last_checkpoint(folder):
    """The newest complete checkpoint in `folder`, or None; `latest` is written last."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def checkpoint_to_load(folder):
    """The last checkpoint, if there is one: what rank 0 finds counts for all."""
    found = [folder and last_checkpoint(folder)]
    dist.broadcast_object_list(found)
    return found[0]


def load_checkpoint(engine, folder):
    """Every rank reads its own partition; returns the number of steps done."""
    check_world_size(folder, dist.get_world_size())
    with checkpoint_files.explain_loading(folder, *LOAD_ERRORS):
        _, client_state = engine.load_checkpoint(folder.parent, folder.name)
        step, global_batch = client_state["step"], client_state["global_batch"]
    checkpoint_files.check_global_batch(global_batch, engine.train_batch_size())
    return step


def export(engine, checkpoint, path):
    """Put the partitions of a checkpoint together in a file that plain PyTorch reads."""
    from deepspeed.utils import zero_to_fp32

    dist.barrier()  # rank 0 reads what every rank wrote
    if dist.get_rank() == 0:
        if engine.zero_optimization_stage() == 0:  # nothing is in partitions
            weights = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        else:
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                checkpoint.parent, checkpoint.name
            )
        with checkpoint_files.write_whole(path) as file:
            torch.save(dict(weights), file)


def parse_args():
    parser = torchrun_or_ray.Parser(__doc__, batch_size=None)
    add, file = parser.add_argument, Path(__file__).with_name("ds_config.json")
    add("--clip", type=command_line.positive, help="gradient norm (default: 1)")
    add("--gradient-accumulation-steps", type=command_line.count, help="default: 1")
    add("--ds-config", type=settings.local_path, default=file, help="a JSON file")
    add("--stage", type=int, help="of ZeRO, instead of the file's")
    args = parser.parse_args()
    passes = args.gradient_accumulation_steps
    args.engine_config = zero_config.read_config(
        args.ds_config, args.batch_size, passes, args.clip, args.stage
    )
    if args.export and not args.checkpoint_dir:
        parser.error("--export needs --checkpoint-dir: it reads a checkpoint.")
    return args


def main():
    args = parse_args()
    zero_config.check_batch_size(args.engine_config, torchrun_or_ray.world_size(args))
    found = args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)
    torchrun_or_ray.start(train, args, found)


if __name__ == "__main__":
    command_line.run(main)
