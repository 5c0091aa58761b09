"""Train a GPT on text with DeepSpeed ZeRO, started by torchrun or by Ray Train.

    torchrun --nproc_per_node=4 train_deepspeed.py --steps 200
    python train_deepspeed.py --num-workers 4 --steps 200
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else: docs/troubleshooting.md
    torchrun --nproc_per_node=4 --max-restarts=1 train_deepspeed.py --checkpoint-dir run

The ZeRO stage, precision and offload are set in ds_config.json; the command line replaces
some of its settings. Runs on GPUs if there are any, else on CPUs. With --checkpoint-dir
the same command starts a run, and goes on with it: after a restart, and when a scheduler
starts the job again. SIGTERM stops it after a step, saved.

To take this along, put your own texts into `train`, your model into `build` and your loss
into `train_step`, and copy `stopping`, `runs`, `generators`, `checkpoint_files` and
`errors` of `utils`, which need nothing else of it. What else comes from `utils` is the
workshop's: its model and texts, its options, its checks of a machine. Steps that a script
for one device lacks end in `# NEW`.
"""

import gc
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
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
    zero_config,
)
from utils.models import GPT, SIZES, fill_by_name
from utils.zero import (
    LOAD_ERRORS,
    check_exportable,
    check_world_size,
    is_universal,
    load_deepspeed,
)


def train(args):
    """Train in a process group that exists already; returns what the run reports.

    Ends early, without a test loss, where a rank has been asked to stop.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.set_device()  # this rank's own GPU, or the CPU
    shape = SIZES[args.model]
    train_set = datasets.text("train", shape.block_size, args.text)
    test_set = datasets.text("test", shape.block_size, args.text)
    model = build(shape, device, args.engine_config, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    folder = checkpoint_to_load(args.checkpoint_dir)
    engine = make_engine(model, optimizer, args.engine_config, folder)
    first_step = resume(engine, folder, args)
    losses = train_steps(engine, train_set, first_step, args)
    report = {"first_step": first_step, "losses": losses, "test_loss": None}
    if first_step + len(losses) >= args.steps:  # more: fewer are asked for now
        report["test_loss"] = evaluate(engine, test_set, rank, world_size, device)
        if args.export:
            export(engine, last_checkpoint(args.checkpoint_dir), args.export)
    return report


def build(shape, device, config, seed=0):
    """Make a model of which, at stage 3, no rank holds more than its part and a layer."""
    deepspeed = load_deepspeed()
    deepspeed.init_distributed(settings.backend())  # NEW: joins the group that exists
    cut = config["zero_optimization"].get("stage") == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=cut):  # NEW
        model = GPT(shape).to(device)  # every layer is cut as soon as it is made
    # whole again one by one; of what the ranks then write, that of rank 0 counts
    gather = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
    fill_by_name(model, gather, seed)  # the same weights on every number of ranks
    generators.seed_rank(seed)  # NEW: equal seeds would make equal noise on all ranks
    return model


def make_engine(model, optimizer, config, folder):
    """Hand over model, optimizer and settings; `folder` is the checkpoint to load."""
    section = config.setdefault("checkpoint", {})
    section["load_universal"] = bool(folder) and is_universal(folder)
    together = {"model": model, "optimizer": optimizer, "config": config}
    return load_deepspeed().initialize(**together)[0]  # NEW


def train_steps(engine, train_set, first_step, args):
    """Take all steps from `first_step` on; returns their losses, means of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = settings.device()
    global_batch = engine.train_batch_size()
    stop = stopping.Stop(args.stop_file, stopping.notice_of_ray())
    losses = []
    start = time.perf_counter()
    for done in range(first_step + 1, args.steps + 1):
        batch = datasets.share_of_batch(  # NEW
            train_set, done - 1, global_batch, rank, world_size, args.seed
        )
        inputs, targets = (settings.send(t, device) for t in batch)
        losses.append(train_step(engine, inputs, targets))
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
            save_checkpoint(engine, done, args.checkpoint_dir, args.run)
            if rank == 0:
                runs.keep_newest(args.checkpoint_dir, args.keep, is_whole)
        if asked == stopping.STOP:
            break
    return mean_of_ranks(losses)


def mean_of_ranks(losses):
    """Return losses as numbers, each the mean of all ranks, which saw different texts."""
    if not losses:  # a run that starts again after its last step
        return []
    together = torch.stack(losses)
    dist.all_reduce(together)  # NEW
    return (together / dist.get_world_size()).tolist()


def train_step(engine, inputs, targets):
    """Take a step on this rank's share of the batch; returns the loss of that share."""
    passes = engine.gradient_accumulation_steps()
    mean = 0
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


def save_checkpoint(engine, step, folder, run=None):
    """Save on all ranks, each its own partition; then `latest` names it."""
    tag = f"step-{step:06d}"
    extra = {
        "step": step,
        "global_batch": engine.train_batch_size(),
        "run": run,
        "generators": generators.states(),
    }
    with checkpoint_files.explain_writing(folder / tag):  # a disk may be full
        # DeepSpeed's rank 0 would write `latest` while another rank may still be writing
        engine.save_checkpoint(folder, tag, client_state=extra, save_latest=False)
    dist.barrier()  # NEW
    if dist.get_rank() == 0:
        with checkpoint_files.write_whole(folder / "latest") as file:
            file.write(tag.encode())


def last_checkpoint(folder):
    """Return the newest whole checkpoint in `folder`, or None; `latest` is written last."""
    latest = folder / "latest"
    return folder / latest.read_text().strip() if latest.exists() else None


def is_whole(checkpoint):
    """Return whether all ranks have written a checkpoint: no later than `latest`."""
    last = last_checkpoint(checkpoint.parent)
    return bool(last) and runs.steps(checkpoint) <= runs.steps(last)


def checkpoint_to_load(folder):
    """Return the last checkpoint, if any: what rank 0 finds counts for all."""
    found = [folder and last_checkpoint(folder)]
    dist.broadcast_object_list(found)  # NEW
    return found[0]


def resume(engine, folder, args):
    """Load the checkpoint `folder`, if there is one; returns the number of steps done."""
    step = load_checkpoint(engine, folder, args.run) if folder else 0
    if args.export and step >= args.steps:
        check_exportable(folder)
    if dist.get_rank() == 0 and args.checkpoint_dir:
        runs.claim(args.checkpoint_dir, args.run["script"], folder)
        if step < args.steps:
            # what a killed save has left would count once `latest` names a later one
            runs.remove_cut_off(args.checkpoint_dir, is_whole)
        done = folder and f"step {step}"
        print(runs.begin(args.checkpoint_dir, done, step >= args.steps))
    return step


def load_checkpoint(engine, folder, run=None):
    """Read on every rank its own partition; returns the number of steps done."""
    check_world_size(folder, dist.get_world_size())
    with checkpoint_files.explain_loading(folder, *LOAD_ERRORS):
        _, saved = engine.load_checkpoint(folder.parent, folder.name)
        step, global_batch = saved["step"], saved["global_batch"]
    checkpoint_files.check_global_batch(global_batch, engine.train_batch_size())
    runs.check_same(folder, saved["run"], run)
    generators.restore(saved["generators"])
    return step


def export(engine, checkpoint, path):
    """Put the partitions of a checkpoint together in a file that plain PyTorch reads."""
    from deepspeed.utils import zero_to_fp32

    if dist.get_rank() == 0:  # all have written: `save_checkpoint` waits for that
        if engine.zero_optimization_stage() == 0:  # nothing is in partitions
            weights = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        else:
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                checkpoint.parent, checkpoint.name
            )
        with checkpoint_files.write_whole(path) as file:
            torch.save(dict(weights), file)


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
    """Return the backend of the process group."""
    return settings.backend()


def parse_args():
    """Parse the command line, and check it against the configuration's file."""
    parser = torchrun_or_ray.Parser(__doc__, batch_size=None)
    add = parser.add_argument
    add("--clip", type=command_line.positive, help="gradient norm")
    add("--gradient-accumulation-steps", type=command_line.count)
    file = Path(__file__).with_name("ds_config.json")
    add("--ds-config", type=settings.local_path, default=file, help="a JSON file")
    add("--stage", type=int, help="of ZeRO, instead of the file's")
    args = parser.parse_args()
    passes = args.gradient_accumulation_steps
    args.engine_config = zero_config.read_config(
        args.ds_config, args.batch_size, passes, args.clip, args.stage
    )
    if args.export and not args.checkpoint_dir:
        parser.error("--export needs --checkpoint-dir: it reads a checkpoint.")
    args.run = runs.defining(args, "model", "text", "lr", "seed")
    args.run["gradient_clipping"] = args.engine_config.get("gradient_clipping")
    return args


def main():
    args = parse_args()
    torchrun_or_ray.check_launch(args)
    report = with_ray(args) if args.num_workers else under_torchrun(args)
    torchrun_or_ray.end(args, report)


if __name__ == "__main__":
    command_line.run(main)
