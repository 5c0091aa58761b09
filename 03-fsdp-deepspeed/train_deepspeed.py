"""Train a GPT on text with DeepSpeed ZeRO, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_deepspeed.py --steps 200
    python train_deepspeed.py --num-workers 4 --steps 200
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_deepspeed.py --checkpoint-dir run

The ZeRO stage, precision and offload are set in ds_config.json; the command line replaces
some of its settings. Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir
the same command starts a run, and goes on with it: after a restart, and when a scheduler
starts the job again. SIGTERM stops it after a step, saved. Steps that a script for one
device lacks end in `# NEW`.

To take this along, copy `utils/runs.py` with it: that needs torch alone. What else comes
from `utils` is the workshop's: its texts, model, devices, options and launch.
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils import checkpoint_files, command_line, datasets, settings, torchrun_or_ray
from utils.models import GPT, SIZES, fill_by_name
from utils.runs import Run, newest, seed_rank
from utils.zero import check_exportable, check_world_size, is_universal, load_for
from utils.zero_config import in_a_sentence, read_config


def train(args, stop_file=None):
    """Train in a process group that exists already; returns where the run stands."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.set_device(args.smoke_test)  # this rank's own GPU, or the CPU
    shape = SIZES[args.model]
    train_set = datasets.text("train", shape.block_size, args.text)
    test_set = datasets.text("test", shape.block_size, args.text)
    names = "model", "text", "lr", "warmup_steps", "decay_steps", "seed"
    # a run does not go on with other settings
    chosen = command_line.chosen(args, *names)
    parts = save_checkpoint, load_checkpoint
    folder = args.checkpoint_dir
    run = Run(folder, "train_deepspeed", *parts, chosen, args.keep, stop_file)
    config = args.ds_config
    with in_a_sentence(config):  # what DeepSpeed refuses of it, or ignores
        model = build(shape, device, config, args.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        engine = make_engine(model, optimizer, config, run.found)
    global_batch = engine.train_batch_size()
    run.settings["gradient_clipping"] = config.get("gradient_clipping")
    run.settings["global batch"] = global_batch
    run.resume(engine)  # NEW: the newest checkpoint that rank 0 finds, if any
    if args.export and run.found and run.steps >= args.steps:
        check_exportable(run.found)
    for step in run.each_step(args.steps, args.save_every):
        torchrun_or_ray.set_lr(optimizer, step, args)
        batch = datasets.share_of_batch(  # NEW
            train_set, step, global_batch, rank, world_size, args.seed
        )
        inputs, targets = (settings.send(t, device) for t in batch)
        loss = train_step(engine, inputs, targets)
        # saves where it is due, or where a rank was asked to stop
        run.stepped(loss, tokens=global_batch * shape.block_size)  # NEW
    if run.stopped:
        return run.summary()
    if args.export:
        export(engine, newest(args.checkpoint_dir, run.name), args.export)
    return run.summary(test_loss=evaluate(engine, test_set, device))


def build(shape, device, config, seed=0):
    """Make a model of which, at stage 3, no rank holds more than its part and a layer."""
    deepspeed = load_for(device.type)
    # joins the group that exists
    deepspeed.init_distributed(settings.backend(device))  # NEW
    cut = config["zero_optimization"].get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=cut):  # NEW
        model = GPT(shape).to(device)  # every layer is cut as soon as it is made
    # whole again one by one; of what the ranks then write, that of rank 0 counts
    gather = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    fill_by_name(model, gather, seed)  # the same weights on every number of ranks
    seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model


def make_engine(model, optimizer, config, checkpoint):
    """Hand over model, optimizer and settings; `checkpoint` is what it will load."""
    import deepspeed

    section = config.setdefault("checkpoint", {})
    section["load_universal"] = bool(checkpoint) and is_universal(checkpoint)
    together = {"model": model, "optimizer": optimizer, "config": config}
    return deepspeed.initialize(**together)[0]  # NEW


def train_step(engine, inputs, targets):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    accumulate = engine.gradient_accumulation_steps()
    mean = 0
    for piece, wanted in zip(inputs.chunk(accumulate), targets.chunk(accumulate)):
        logits = engine(piece).flatten(0, 1)  # [batch * time, vocabulary]
        at_least_fp32 = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(logits.to(at_least_fp32), wanted.flatten())
        del logits  # of GPT-2, gigabytes that backward does not need
        # averages gradients over all ranks, and over the accumulation steps
        engine.backward(loss)  # NEW
        engine.step()  # after the last of these: clips, updates, sets gradients to zero
        mean += loss.detach() / accumulate
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


def save_checkpoint(checkpoint, engine):
    """Write into the folder `checkpoint` on all ranks, each its own partition."""
    options = {"tag": checkpoint.name, "save_latest": False}
    engine.save_checkpoint(checkpoint.parent, **options)  # NEW


def load_checkpoint(checkpoint, engine):
    """Read on every rank its own partition."""
    check_world_size(checkpoint, dist.get_world_size())
    engine.load_checkpoint(checkpoint.parent, checkpoint.name)  # NEW


def export(engine, checkpoint, path):
    """Put the partitions of a checkpoint together in a file that plain PyTorch reads."""
    from deepspeed.utils import zero_to_fp32

    if dist.get_rank() == 0:  # NEW: all have written, as the checkpoint has its name
        if engine.zero_optimization_stage() == 0:  # nothing is in partitions
            weights = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        else:
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                checkpoint.parent, checkpoint.name
            )
        with checkpoint_files.write_whole(path) as file:
            torch.save(dict(weights), file)


def parse_args():
    """Parse the command line, and check it against the configuration's file."""
    parser = torchrun_or_ray.Parser(__doc__, batch_size=None)
    add = parser.add_argument
    add("--accumulate", type=command_line.count, help="batches per step")
    add("--clip", type=command_line.positive, help="gradient norm")
    file = Path(__file__).with_name("ds_config.json")
    add("--ds-config", type=settings.local_path, default=file, help="a JSON file")
    add("--stage", type=int, help="of ZeRO, instead of the file's")
    args = parser.parse_args()
    if args.export and not args.checkpoint_dir:
        parser.error("--export needs --checkpoint-dir: it reads a checkpoint.")
    # from here on what the file says, and what the command line replaces of it
    replaced = args.batch_size, args.accumulate, args.clip, args.stage
    args.ds_config = read_config(args.ds_config, *replaced)
    return args


def main():
    args = parse_args()
    torchrun_or_ray.launch(train, args, "train_deepspeed")


if __name__ == "__main__":
    command_line.run(main)
