"""Train a GPT on text with FSDP2, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_fsdp2.py --steps 200
    python train_fsdp2.py --num-workers 4 --steps 200
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_fsdp2.py --checkpoint-dir run

Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir the same command starts
a run, and goes on with it, on any number of ranks that share the same global batch: after
a restart, and when a scheduler starts the job again. SIGTERM stops it after a step, saved.
Steps that a script for one device lacks end in `# NEW`.

To take this along, copy `utils/runs.py` with it: that needs torch alone. What else comes
from `utils` is the workshop's: its texts, model, devices, options and launch.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as sd
from torch.nn import functional as F

from utils import checkpoint_files, command_line, datasets, settings, torchrun_or_ray
from utils.models import GPT, SIZES, checkpoint_blocks, fill_by_name
from utils.runs import Run, seed_rank


def train(args, stop_file=None):
    """Train in a process group that exists already; returns where the run stands."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.set_device(args.smoke_test)  # this rank's own GPU, or the CPU
    args.bf16 = device.type == "cuda" if args.bf16 is None else args.bf16
    config = SIZES[args.model]
    train_set = datasets.text("train", config.block_size, args.text)
    test_set = datasets.text("test", config.block_size, args.text)
    model = build(config, device, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    global_batch = args.batch_size * args.accumulate * world_size
    names = "model", "text", "lr", "warmup_steps", "decay_steps", "clip", "seed", "bf16"
    # a run does not go on with other settings
    chosen = command_line.chosen(args, *names) | {"global batch": global_batch}
    parts = save_checkpoint, load_checkpoint
    folder = args.checkpoint_dir
    run = Run(folder, "train_fsdp2", *parts, chosen, args.keep, stop_file)
    # a group of its own: what is saved in the background must not mix with the training
    background = dist.new_group(backend="gloo") if args.async_save else None
    # the newest checkpoint that rank 0 finds, if any
    run.resume(model, optimizer, background)  # NEW
    for step in run.each_step(args.steps, args.save_every):
        torchrun_or_ray.set_lr(optimizer, step, args)
        batch = datasets.share_of_batch(  # NEW
            train_set, step, global_batch, rank, world_size, args.seed
        )
        inputs, targets = (settings.send(t, device) for t in batch)
        loss = train_step(model, optimizer, inputs, targets, args.clip, args.accumulate)
        # saves where it is due, or where a rank was asked to stop
        run.stepped(loss, tokens=global_batch * config.block_size)  # NEW
    if run.stopped:
        return run.summary()
    if args.export:
        export(model, args.export)
    return run.summary(test_loss=evaluate(model, test_set, device))


def build(config, device, args):
    """Make a model of which no rank ever holds more than its shards and one parameter."""
    with torch.device("meta"):  # shapes, and no memory
        model = GPT(config)
    checkpoint_blocks(model, args.checkpointing)
    shard(model, dist.init_device_mesh(device.type, (dist.get_world_size(),)), args)
    model.to_empty(device="cpu" if args.offload else device)  # memory for the shards
    fill_by_name(model, seed=args.seed)  # the same weights on every number of ranks
    # equal seeds would make equal noise on all ranks
    seed_rank(args.seed)  # NEW
    return model


def shard(model, mesh, args):
    """Cut every parameter into one piece per rank: first each block, then the rest."""
    # None: PyTorch frees each wrapped block after forward, and keeps the root gathered
    options = {
        "mesh": mesh,
        "reshard_after_forward": False if args.no_reshard else None,
    }
    if args.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    if args.bf16:  # stored in fp32, gathered and computed in bf16, reduced in fp32
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)  # NEW
    return fsdp.fully_shard(model, **options)  # NEW


def train_step(model, optimizer, inputs, targets, clip, accumulate=1):
    """Take a step on this rank's share of the batch; returns the loss of that share.

    Gradients of `accumulate` pieces add up; each is reduced at once, so that no rank holds
    more than its shards of them.
    """
    optimizer.zero_grad()
    mean = 0
    for piece, wanted in zip(inputs.chunk(accumulate), targets.chunk(accumulate)):
        logits = model(piece).flatten(0, 1)  # [batch * time, vocabulary]
        at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(at_least_fp32), wanted.flatten()) / accumulate
        del logits  # of GPT-2, gigabytes that backward does not need
        loss.backward()  # FSDP2 averages the gradients over all ranks, keeps a shard
        mean += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # NEW: over all ranks
    optimizer.step()
    return mean


@torch.no_grad()
def evaluate(model, test_set, device, batch_size=16):
    """Return the mean loss over all test texts, each counted once, on every rank."""
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), device=device)
    whole = batch_size * world_size
    for start in range(0, len(test_set), whole):
        mine = range(start + rank, min(start + whole, len(test_set)), world_size)
        # every rank takes part in every forward pass, also one that has no text left
        inputs, targets = (t.to(device) for t in test_set[list(mine) or [0]])
        logits = model(inputs).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        total += loss * bool(mine)
    dist.all_reduce(total)  # NEW: sum over all ranks
    model.train()
    return total.item() / test_set.tensors[1].numel()


def save_checkpoint(checkpoint, model, optimizer, background=None):
    """Write into the folder `checkpoint` on all ranks, each its own shards.

    With a group `background` it copies them to CPU memory, and a thread writes them while
    training goes on: returns its future.
    """
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if background:
        options = {"checkpoint_id": checkpoint, "process_group": background}
        return dcp.async_save(state, **options)  # NEW
    dcp.save(state, checkpoint_id=checkpoint)  # NEW


def load_checkpoint(checkpoint, model, optimizer, background=None):
    """Read on every rank the pieces of its own shards, whoever has written them."""
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)  # NEW
    sd.set_model_state_dict(model, model_state)
    sd.set_optimizer_state_dict(model, optimizer, optimizer_state)


def export(model, path):
    """Gather the whole model on rank 0, and write a file that plain PyTorch reads."""
    options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # all ranks take part
    weights = sd.get_model_state_dict(model, options=options)  # NEW
    if dist.get_rank() == 0:  # NEW
        with checkpoint_files.write_whole(path) as file:
            torch.save(weights, file)


def parse_args():
    """Parse the command line, and check what cannot work on this machine."""
    parser = torchrun_or_ray.Parser(__doc__, batch_size=16)
    add = parser.add_argument
    add("--accumulate", type=command_line.count, default=1, help="batches per step")
    add("--clip", type=command_line.positive, default=1.0, help="gradient norm")
    add("--no-reshard", action="store_true", help="reshard_after_forward=False")
    add("--bf16", action=command_line.BooleanOptionalAction, help=command_line.BF16)
    add("--checkpointing", choices=("none", "selective", "full"), default="none")
    add("--offload", action="store_true", help="keep shards in CPU memory")
    add("--async-save", action="store_true", help="write while training goes on")
    args = parser.parse_args()
    if args.offload and settings.device(args.smoke_test).type == "cpu":
        parser.error("--offload needs a GPU to offload from: leave it out on a CPU.")
    return args


def main():
    args = parse_args()
    torchrun_or_ray.launch(train, args, "train_fsdp2", args.offload)


if __name__ == "__main__":
    command_line.run(main)
