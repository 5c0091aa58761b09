"""Train a GPT on text with FSDP2, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_fsdp2.py --steps 200
    python train_fsdp2.py --num-workers 4 --steps 200
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_fsdp2.py --checkpoint-dir run

Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir the same command starts
a run, and goes on with it, on any number of ranks that share the same global batch: after
a restart, and when a scheduler starts the job again. SIGTERM stops it after a step, saved.

To take this along, put your own texts into `train`, your model into `build` and your loss
into `train_step`, and copy `stopping`, `runs`, `generators`, `checkpoint_files` and
`errors` of `utils`, which need nothing else of it. What else comes from `utils` is the
workshop's: its model and texts, its options, its checks of a machine. Steps that a script
for one device lacks end in `# NEW`.
"""

import gc
import json
import time
from argparse import Namespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as sd
from torch.nn import functional as F

from utils import (
    checkpoint_files,
    command_line,
    datasets,
    generators,
    runs,
    settings,
    stopping,
    torchrun_or_ray,
)
from utils.models import GPT, SIZES, fill_by_name


def train(args):
    """Train in a process group that exists already; returns what the run reports.

    Ends early, without a test loss, where a rank has been asked to stop.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.set_device()  # this rank's own GPU, or the CPU
    config = SIZES[args.model]
    train_set = datasets.text("train", config.block_size, args.text)
    test_set = datasets.text("test", config.block_size, args.text)
    model = build(config, device, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    first_step = resume(model, optimizer, args)
    losses = train_steps(model, optimizer, train_set, first_step, args)
    report = {"first_step": first_step, "losses": losses, "test_loss": None}
    if first_step + len(losses) >= args.steps:  # more: fewer are asked for now
        report["test_loss"] = evaluate(model, test_set, rank, world_size, device)
        if args.export:
            export(model, args.export)
    return report


def build(config, device, args):
    """Make a model of which no rank ever holds more than its shards and one parameter."""
    with torch.device("meta"):  # shapes, and no memory
        model = GPT(config)
    shard(model, dist.init_device_mesh(device.type, (dist.get_world_size(),)), args)
    model.to_empty(device="cpu" if args.offload else device)  # memory for the shards
    fill_by_name(model, seed=args.seed)  # the same weights on every number of ranks
    # equal seeds would make equal noise on all ranks
    generators.seed_rank(args.seed)  # NEW
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


def train_steps(model, optimizer, train_set, first_step, args):
    """Take all steps from `first_step` on; returns their losses, means of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.device()
    global_batch = args.batch_size * world_size
    stop = stopping.Stop(args.stop_file, stopping.notice_of_ray())
    # a group of its own: what is saved in the background must not mix with the training
    background = dist.new_group(backend="gloo") if args.async_save else None
    writing = None
    losses = []
    start = time.perf_counter()
    for done in range(first_step + 1, args.steps + 1):
        batch = datasets.share_of_batch(  # NEW
            train_set, done - 1, global_batch, rank, world_size, args.seed
        )
        inputs, targets = (settings.send(t, device) for t in batch)
        losses.append(train_step(model, optimizer, inputs, targets, args.clip))
        if done % 20 == 0:  # only then: a GPU has to finish its step for it
            loss = mean_of_ranks(losses[-1:])[0]
            ms = 1000 * (time.perf_counter() - start) / len(losses)
            if rank == 0:
                print(
                    f"step {done}/{args.steps}: loss {loss:.3f}, {ms:.0f} ms per step",
                    flush=True,
                )
        asked = stop.agreed()
        is_due = done % args.save_every == 0 or done == args.steps or asked
        if args.checkpoint_dir and is_due:
            folder, run = args.checkpoint_dir, args.run
            finish(writing, args)  # one at a time
            writing = save_checkpoint(
                model, optimizer, done, global_batch, folder, run, background
            )
            if not background:
                finish(writing, args)
        if asked == stopping.STOP:
            break
    if args.checkpoint_dir:
        finish(writing, args)
    return mean_of_ranks(losses)


def mean_of_ranks(losses):
    """Return losses as numbers, each the mean of all ranks, which saw different texts."""
    if not losses:  # a run that starts again after its last step
        return []
    together = torch.stack(losses)
    dist.all_reduce(together)  # NEW
    return (together / dist.get_world_size()).tolist()


def train_step(model, optimizer, inputs, targets, clip):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
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
    """Return the mean loss over all test texts, each counted once, on every rank."""
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
    dist.all_reduce(total)  # NEW: sum over all ranks
    model.train()
    return total.item() / test_set.tensors[1].numel()


def save_checkpoint(
    model, optimizer, step, global_batch, folder, run=None, background=None
):
    """Save on all ranks, each its own shards, at the same time.

    With a group `background` it copies them to CPU memory, and a thread writes them while
    training goes on: returns its future, for `finish`.
    """
    path = folder / f"step-{step:06d}"
    state = state_of(model, optimizer, step, global_batch, run)
    with checkpoint_files.explain_writing(path):  # a disk may be full
        if background:
            options = {"checkpoint_id": path, "process_group": background}
            return dcp.async_save(state, **options)
        dcp.save(state, checkpoint_id=path)


def finish(writing, args):
    """Wait for a checkpoint that is still being written, if any; then keep the newest."""
    if writing:
        with checkpoint_files.explain_writing(args.checkpoint_dir):
            writing.result()
    if dist.get_rank() == 0:
        runs.keep_newest(args.checkpoint_dir, args.keep, is_whole)


def state_of(model, optimizer, step, global_batch, run):
    """Return what a checkpoint holds: this rank's shards, and what is the same for all."""
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "step": step,
        "global_batch": global_batch,
        "run": json.dumps(run),  # as one value: dcp takes a dict apart
        "generators": generators.states(),
    }


def is_whole(checkpoint):
    """Return whether all ranks have written a checkpoint: .metadata comes last."""
    return (checkpoint / ".metadata").exists()


def last_checkpoint(folder):
    """Return the newest whole checkpoint in `folder`, or None."""
    return runs.newest(folder, is_whole)


def resume(model, optimizer, args):
    """Load the last checkpoint, if there is one; returns the number of steps done."""
    found = [args.checkpoint_dir and last_checkpoint(args.checkpoint_dir)]
    dist.broadcast_object_list(found)  # NEW: what rank 0 finds counts for all
    folder = found[0]
    step = 0
    if folder:
        global_batch = args.batch_size * dist.get_world_size()
        step = load_checkpoint(model, optimizer, global_batch, folder, args.run)
    if dist.get_rank() == 0 and args.checkpoint_dir:
        runs.claim(args.checkpoint_dir, args.run["script"], folder)
        done = folder and f"step {step}"
        print(runs.begin(args.checkpoint_dir, done, step >= args.steps))
    return step


def load_checkpoint(model, optimizer, global_batch, folder, run=None):
    """Read on every rank the pieces of its own shards; returns the number of steps done."""
    state = state_of(model, optimizer, 0, 0, run)
    with checkpoint_files.explain_loading(folder, dcp.CheckpointException):
        dcp.load(state, checkpoint_id=folder)
    checkpoint_files.check_global_batch(state["global_batch"], global_batch)
    runs.check_same(folder, json.loads(state["run"]), run)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    sd.set_state_dict(model, optimizer, **parts)
    generators.restore(state["generators"])
    return state["step"]


def export(model, path):
    """Gather the whole model on rank 0, and write a file that plain PyTorch reads."""
    options = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=options)  # all ranks take part
    if dist.get_rank() == 0:
        with checkpoint_files.write_whole(path) as file:
            torch.save(weights, file)


def under_torchrun(args):
    """Train in this process, which torchrun has started as one rank of several."""
    device = settings.set_device()
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend(args), device_id=own_gpu)  # NEW
    report = train(args)
    # What is sharded holds on to the process group: free it first, or the exit may abort.
    gc.collect()
    dist.destroy_process_group()  # NEW
    return report


def with_ray(args):
    """Let Ray Train start the workers, here or on a cluster, and once more if one dies."""
    from utils.cluster import start_ray  # isort: split

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from utils import failures, preflight

    name, folder = command_line.new_run(args)
    start_ray(args.num_workers, log_to_driver=True)
    torchrun_or_ray.check_shared(args, folder)
    trainer = TorchTrainer(  # NEW
        lambda config: train(Namespace(**config)),
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(
            num_workers=args.num_workers, use_gpu=preflight.use_gpu()
        ),
        torch_config=TorchConfig(backend=backend(args)),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[failures.NoRestartOnBadInput()],
        ),
    )
    with stopping.passed_on(args.stop_file), failures.in_a_sentence():
        return trainer.fit().return_value


def backend(args):
    """Return the backend of the process group: with offload, CPUs send, too."""
    return "cpu:gloo,cuda:nccl" if args.offload else settings.backend()


def parse_args():
    """Parse the command line, and check what cannot work on this machine."""
    parser = torchrun_or_ray.Parser(__doc__, batch_size=16)
    add = parser.add_argument
    add("--clip", type=command_line.positive, default=1.0, help="gradient norm")
    add("--no-reshard", action="store_true", help="reshard_after_forward=False")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--offload", action="store_true", help="keep shards in CPU memory")
    add("--async-save", action="store_true", help="write while training goes on")
    args = parser.parse_args()
    if args.offload and settings.device().type == "cpu":
        parser.error("--offload needs a GPU to offload from: leave it out on a CPU.")
    args.run = runs.defining(args, "model", "text", "lr", "clip", "seed", "bf16")
    return args


def main():
    args = parse_args()
    torchrun_or_ray.check_launch(args)
    report = with_ray(args) if args.num_workers else under_torchrun(args)
    torchrun_or_ray.end(args, report)


if __name__ == "__main__":
    command_line.run(main)
