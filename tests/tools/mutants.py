"""Small changes of the code that no one chose, and how many of them a test rejects.

    pip install --no-deps --target FOLDER cosmic-ray==8.4.3
    PYTHONPATH=FOLDER python -m tests.tools.mutants         # all of MODULES
    PYTHONPATH=FOLDER python -m tests.tools.mutants comms   # with this word in their name
    PYTHONPATH=FOLDER python -m tests.tools.mutants --left  # that were left last time

Where cosmic-ray has several changes for a place (`+` becomes any of eleven), one is drawn
with a fixed seed. Two of our own are added: a call without its result, or an `x += y`,
is left out; a named argument is left out. Results go to mutants.json, and from there into
MISTAKES.md, with the reasons that mutants.toml gives for those that no test rejects.
"""

import ast
import contextlib
import gc
import importlib
import io
import json
import multiprocessing.forkserver as forkserver
import os
import random
import re
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.tools.mistakes import ROOT, TABLE, copy_workshop

RESULTS = ROOT / "tests" / "tools" / "mutants.json"
REASONS = ROOT / "tests" / "tools" / "mutants.toml"
HEADING = "## Mutants that no one chose"
SECONDS = 120  # that a mutant may take, then it counts as rejected: it hangs
NOT_LOOKED_AT = "not looked at yet"
PRELOAD = ["torch.nn.parallel", "torchvision.models"]  # as `utils.launch` does
# what tests import besides, and what does not change
ALSO = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"]
ALSO += ["torch.distributed.checkpoint.state_dict", "torchvision.datasets"]
ALSO += ["nbval.plugin", "scipy.optimize", "pyarrow.parquet", "cloudpickle"]

_DATA = "tests/test_datasets.py"
_SHARES = ["batches_that_cannot_be_shared_are_refused"]
_SHARES += ["the_shares_of_all_ranks_are_the_batch_and_every_epoch_has_its_order"]
_DIGITS = ["digits", "splits_are_fixed_and_together_the_whole_file", "unknown_names"]
_DIGITS += ["pictures_show_their_labels", "damaged_file_is_named"]
_EQUAL = "tests/test_scripts_agree.py::test_functions_of_several_scripts_are_equal"
_CHECKPOINTS = "tests/test_sharding_checkpoints.py"
_SCRIPTS = "tests/test_training_scripts.py::test_"
# of every script with images, and of those that deal out a list of them
_EPOCHS = [
    "evaluation_sees_the_model_as_it_predicts_and_leaves_it_training",
    "the_loss_of_an_epoch_is_the_mean_over_ranks_and_steps",
    "a_step_is_one_of_gradient_descent",
    "an_epoch_ends_after_the_step_at_which_ranks_agree_to_stop",
    "a_checkpoint_is_loaded_to_the_cpu",
    "only_rank_0_writes_the_checkpoint",
    "a_run_goes_on_with_what_it_saved",
    "noise_goes_on_from_a_checkpoint",
]
_LISTED = [
    "epochs_go_on_where_they_were_and_are_evaluated_and_saved",
    "loaders_of_a_gpu_work_ahead",
    "what_a_loader_draws_is_other_on_each_rank_and_in_each_epoch",
]
_STEPS = [
    "evaluation_sees_the_model_as_it_predicts_and_leaves_it_training",
    "steps_go_on_where_they_were_and_are_printed_and_saved",
    "a_run_with_all_of_its_steps_is_evaluated_and_exported",
    "weights_and_noise_come_from_the_seed",
    "all_ranks_resume_from_what_rank_0_finds",
    "noise_goes_on_from_a_checkpoint_of_shards",
    "two_ranks_train_like_one",
]


def _of(script: str, names: list[str], *more: str) -> list[str]:
    """Return tests of a script, and others; what comes first is tried first."""
    found = [f"{_SCRIPTS}{name}[{script}]" for name in names]
    return found + [each if "::" in each else _SCRIPTS + each for each in more]


# of a module: the functions that are changed (none named: all), and the tests that see them
MODULES = {
    "utils/comms.py": ("", ["tests/test_comms.py"]),
    "utils/memory.py": ("", ["tests/test_memory.py"]),
    "utils/timing.py": ("", ["tests/test_timing.py"]),
    "utils/datasets/__init__.py": ("", [f"{_DATA}::test_unknown_names"]),
    "utils/datasets/batches.py": ("", [f"{_DATA}::test_{name}" for name in _SHARES]),
    "utils/datasets/downloaded.py": ("", [_DATA]),
    "utils/datasets/shards.py": ("", ["tests/test_shards.py"]),
    "utils/datasets/shipped.py": (
        "",
        ["tests/test_text.py", *(f"{_DATA}::test_{name}" for name in _DIGITS)],
    ),
    "01-ddp-pytorch-only/train_ddp.py": (
        "load_data build train train_epoch train_step evaluate save_checkpoint "
        "load_checkpoint",
        _of(
            "train_ddp",
            _EPOCHS + _LISTED,
            "every_test_image_counts_once",
            "ddp_trains_on_every_image_once_and_from_the_same_weights",
        ),
    ),
    # what one script's tests show is true of the other where their functions are equal
    "02-ddp-pytorch-ray/train_ray_ddp.py": (
        "load_data train_fn train_epoch train_step evaluate report load_latest",
        _of("train_ray_ddp", _EPOCHS + _LISTED, _EQUAL),
    ),
    "02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py": (
        "train_fn train_epoch train_step evaluate report load_latest",
        _of(
            "train_ray_ddp_with_ray_data",
            _EPOCHS,
            "every_test_image_counts_once",
            "epochs_of_a_stream_are_evaluated_and_reported",
            "tests/test_ray_data_script.py::test_an_epoch_stays_on_its_device",
            "tests/test_ray_data_script.py::test_a_batch_of_corrupt_images_does_not_"
            "hide_the_loss",
            _EQUAL,
        ),
    ),
    "03-fsdp-deepspeed/train_fsdp2.py": (
        "train build shard train_steps mean_of_ranks train_step evaluate "
        "save_checkpoint finish state_of is_whole resume last_checkpoint "
        "load_checkpoint export",
        _of(
            "train_fsdp2",
            _STEPS,
            "fsdp2_gathers_one_block_at_a_time",
            "both_scripts_for_text_train_alike",
            "gradients_are_clipped_by_their_norm_over_all_ranks",
            "a_full_disk_in_the_background_is_said",
            "rank_0_alone_removes_old_checkpoints",
            "a_checkpoint_is_written_before_the_next_and_before_the_end",
            "fsdp2_computes_in_bf16_if_asked_and_keeps_fp32",
            f"{_CHECKPOINTS}::test_what_cannot_be_resumed_from_is_said",
            "a_half_written_checkpoint_is_not_taken",
            "only_rank_0_writes_the_checkpoint[train_fsdp2]",
            "offloaded_shards_are_built_on_meta_and_train_the_same",
            "what_is_saved_in_the_background_is_the_state_of_its_step",
            "no_rank_ever_holds_the_whole_model[build_fsdp2]",
        ),
    ),
    "03-fsdp-deepspeed/train_deepspeed.py": (
        "train build make_engine train_steps mean_of_ranks train_step evaluate "
        "save_checkpoint last_checkpoint is_whole export checkpoint_to_load "
        "resume load_checkpoint",
        _of(
            "train_deepspeed",
            _STEPS,
            "a_half_written_checkpoint_is_not_taken",
            "zero_builds_the_model_that_one_process_builds",
            "both_scripts_for_text_train_alike",
            "no_rank_ever_holds_the_whole_model[build_zero]",
            f"{_CHECKPOINTS}::test_zero_names_a_checkpoint_only_when_all_ranks_have_"
            "written_it",
            f"{_CHECKPOINTS}::test_what_zero_exports_is_what_its_ranks_hold",
            f"{_CHECKPOINTS}::test_a_checkpoint_of_another_world_size_says_how_to_convert",
            f"{_CHECKPOINTS}::test_what_cannot_be_resumed_from_is_said",
            _EQUAL,
        ),
    ),
}


class Mutant(NamedTuple):
    """A change of one place: its line (from 1 on), before and after, and the whole text."""

    kind: str
    line: int
    was: str
    becomes: str
    text: str


def mutants_of(source: str, functions: list[str], seed: int = 0) -> list[Mutant]:
    """Return all mutants of a module: one for each place and kind of change.

    Left out are messages of exceptions, and annotations: they change no number.
    """
    tree = ast.parse(source)
    wanted = [
        _span(node)
        for node in tree.body
        if not functions or getattr(node, "name", None) in functions
    ]
    skipped = [_span(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    skipped += [_span(node) for node in ast.walk(tree) for node in _annotations(node)]
    places: dict[tuple, list[str]] = {}
    for kind, place, text in (*_of_cosmic_ray(source), *_our_own(source, tree)):
        inside = any(low <= place[0] and place[1] <= high for low, high in wanted)
        if inside and not any(a <= place[0] and place[1] <= b for a, b in skipped):
            places.setdefault((place, kind), []).append(text)
    draw, found, seen = random.Random(seed), [], {source}
    for (place, kind), texts in sorted(places.items()):
        new = [text for text in texts if text not in seen and _parses(text)]
        if new:
            text = draw.choice(new)
            seen.add(text)
            found.append(Mutant(kind, place[0][0], *_difference(source, text), text))
    return found


def _span(node: Any) -> tuple:
    first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
    start = (first.lineno, first.col_offset - (first is not node))  # with its "@"
    return start, (node.end_lineno, node.end_col_offset)


def _annotations(node: ast.AST) -> list[ast.AST]:
    names = ("annotation", "returns")
    return [found for name in names if (found := getattr(node, name, None))]


def _of_cosmic_ray(source: str) -> Iterator[tuple]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider, tree = OperatorProvider(), get_ast(source)
    count = sum(1 for _ in ast_nodes(tree))
    for name in sorted(provider):
        if name.startswith("Variable"):  # it draws anew in every run
            continue
        operator = provider[name]()
        for number, node in zip(range(count), list(ast_nodes(tree))):
            if node.type == "number" and ast.literal_eval(node.value) >= 100:
                continue  # one more or less is no mistake that anybody makes
            for index, place in enumerate(operator.mutation_positions(node)):
                text = _mutated(source, operator, number, index)
                yield name.partition("_")[0], tuple(place), text


def _mutated(source: str, operator, number: int, index: int) -> str:
    from cosmic_ray.ast import Visitor, get_ast

    class Change(Visitor):
        seen = -1

        def visit(self, node):
            self.seen += 1
            return operator.mutate(node, index) if self.seen == number else node

    return Change().walk(get_ast(source)).get_code()


def _our_own(source: str, tree: ast.AST) -> Iterator[tuple]:
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or isinstance(node, ast.AugAssign):
            yield "no statement", _span(node), _replaced(source, _span(node), "pass")
        for argument in getattr(node, "keywords", []):
            if isinstance(node, ast.Call) and argument.arg:
                start, (line, column) = _span(argument)
                lines = source.splitlines(keepends=True)
                comma = re.match(rb",\s*", lines[line - 1].encode()[column:])
                end = (line, column + (comma.end() if comma else 0))
                if comma and comma.group().endswith(b"\n"):
                    end = (line, column + 1)
                text = _replaced(source, (start, end), "")
                yield "no argument", (start, (line, column)), text


def _replaced(source: str, span: tuple, by: str) -> str:
    """Return the source with other text there; columns are those of ast, in bytes."""
    (first, start), (last, end) = span
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: first - 1]) + lines[first - 1][:start]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    return (before + by.encode() + after).decode()


def _parses(text: str) -> bool:
    """Return whether Python takes it without a warning, as it gives for `1 is 2`."""
    with contextlib.suppress(SyntaxError), warnings.catch_warnings():
        warnings.simplefilter("error")
        return bool(compile(text, "mutant", "exec"))
    return False


def _difference(source: str, text: str) -> tuple[str, str]:
    old, new = source.splitlines(), text.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    was, becomes = (" ".join(" ".join(lines).split()) for lines in (old, new))
    return was, becomes


def warm_up() -> None:
    """Import here, and in the server that ranks are forked from, what never changes."""
    forkserver.set_forkserver_preload([*PRELOAD, *ALSO])
    forkserver.ensure_running()
    for module in (*PRELOAD, *ALSO):
        importlib.import_module(module)
    gc.freeze()


def passes(copy: Path, tests: list[str]) -> bool:
    """Return whether tests of the copy pass, run in a fork of this process."""
    child = os.fork()
    if child == 0:
        _run_tests(copy, tests)
    deadline, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    for rank in server.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    return status == 0


def _run_tests(copy: Path, tests: list[str]) -> None:
    os.setsid()
    # it runs already, as a child of another process, which is what this would object to
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    with open(copy / "output", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "utils")]:
        del sys.modules[name]
    code = 3
    try:
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    finally:
        sys.stdout.flush()
        os._exit(code)


def try_module(name: str, copy: Path, before: dict | None = None) -> dict:
    """Try mutants of a module; return what mutants.json holds of it.

    before: what it held; then only those are tried again that no test rejected.
    """
    functions, tests = MODULES[name][0].split(), MODULES[name][1]
    start, path = time.monotonic(), copy / name
    source = path.read_text()
    if not passes(copy, tests):
        raise SystemExit(
            f"{name}: {tests} fail as it is\n{(copy / 'output').read_text()}"
        )
    mutants, left = mutants_of(source, functions), []
    tried = len(mutants)
    if before:
        tried = before["tried"]
        again = [(each["was"], each["becomes"]) for each in before["survivors"]]
        mutants = [m for m in mutants if (m.was, m.becomes) in again]
    for mutant in mutants:
        path.write_text(mutant.text)
        if passes(copy, tests):
            left.append(mutant)
            print(f"  {name}:{mutant.line}  {mutant.was}  ->  {mutant.becomes}")
    path.write_text(source)
    seconds = time.monotonic() - start
    print(f"{name}: {len(mutants) - len(left)} of {len(mutants)}, {seconds:.0f} s")
    survivors = [{"was": m.was, "becomes": m.becomes} for m in left]
    return {"functions": functions, "survivors": survivors, "tried": tried}


def section(results: dict[str, dict], reasons: list[dict]) -> str:
    """Return the section of MISTAKES.md: counts, and why mutants are not rejected."""
    out = io.StringIO()
    print(HEADING, "", sep="\n", file=out)
    print(
        "The mistakes above were chosen with their tests in hand. These were made by a "
        "program, one for each\nplace and kind of change "
        "(`python -m tests.tools.mutants`), "
        "and tried with the module's own unit tests:\nno notebook, no Ray. A mutant that "
        "hangs counts as rejected. Left out are messages of exceptions,\nannotations, and "
        "one more or less of a number from 100 on; and of the scripts their command\n"
        "lines, what starts a run, and what needs a Ray (the functions that are changed "
        "stand in mutants.json).\n",
        file=out,
    )
    print("| module | tried | rejected | share |", file=out)
    print("|---|---:|---:|---:|", file=out)
    total, rejected, groups = 0, 0, Counter()
    for name in (name for name in MODULES if name in results):
        tried, left = results[name]["tried"], results[name]["survivors"]
        total += tried
        rejected += (seen := tried - len(left))
        print(f"| `{name}` | {tried} | {seen} | {seen / tried:.0%} |", file=out)
        groups.update(_reason(name, each, reasons) for each in left)
    share = f"{rejected / total:.0%}"
    print(f"| together | {total} | {rejected} | {share} |", file=out)
    print("\n| not rejected, as | mutants |\n|---|---:|", file=out)
    for reason, count in groups.most_common():
        print(f"| {reason} | {count} |", file=out)
    return out.getvalue()


def _reason(name: str, survivor: dict, reasons: list[dict]) -> str:
    for group in reasons:
        for file, was in group["places"]:
            if file == name and was in survivor["was"]:
                return group["reason"]
    return NOT_LOOKED_AT


def main(words: list[str]) -> int:
    only_left = "--left" in words
    words = [word for word in words if word != "--left"]
    chosen = [name for name in MODULES if all(word in name for word in words)]
    warm_up()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        copy_workshop(copy)
        for name in chosen:
            before = results.get(name) if only_left else None
            results[name] = try_module(name, copy, before)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    reasons = tomllib.loads(REASONS.read_text())["group"]
    chosen_ones = TABLE.read_text().partition(HEADING)[0].rstrip()
    TABLE.write_text(f"{chosen_ones}\n\n{section(results, reasons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
