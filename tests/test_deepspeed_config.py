"""ds_config.json and the command line: what each decides, and what cannot be."""

import json
from pathlib import Path

import pytest
import torch

from tests import scripts, sharding
from utils import zero, zero_config
from utils.errors import BadInput
from utils.launch import run_ranks

pytestmark = pytest.mark.part03

SHIPPED = sharding.TRAIN_DEEPSPEED.with_name("ds_config.json")
NAMES = list(zero_config.BY_COMMAND_LINE)


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """Return a function that reads the file that ships with changes, on a CPU."""
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")

    def read(command_line=(), zero=(), stage=None, **changes) -> dict:
        config = json.loads(SHIPPED.read_text())
        config["zero_optimization"] |= dict(zero)
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(config | changes))
        return zero_config.read_config(path, *command_line, stage=stage)

    return read


@pytest.mark.parametrize(
    ("in_file", "command_line", "expected"),
    [
        (["auto", "auto", "auto"], (None, None, None), [16, 1, 1.0]),
        (["auto", "auto", "auto"], (6, 2, 0.5), [6, 2, 0.5]),
        ([8, 4, 0.0], (None, None, None), [8, 4, 0.0]),
        ([8, 4, 0.0], (8, 4, 0.0), [8, 4, 0.0]),
        (["auto", 4, "auto"], (6, None, 0.0), [6, 4, 0.0]),
        ([None, None, None], (None, None, None), [16, None, None]),  # DeepSpeed's own
        ([None, None, None], (6, 2, 0.5), [6, 2, 0.5]),
    ],
)
def test_the_command_line_decides_where_the_file_says_auto(
    in_file, command_line, expected, config_of
):
    found = config_of(command_line, **dict(zip(NAMES, in_file)))
    assert [found[name] for name in NAMES] == expected


def test_the_script_takes_a_batch_size(monkeypatch):
    """The file that ships leaves it to the command line."""
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    flags = ["--batch-size", "6", "--gradient-accumulation-steps", "2", "--stage", "2"]
    monkeypatch.setattr("sys.argv", ["train_deepspeed.py", *flags])
    config = scripts.load(sharding.TRAIN_DEEPSPEED).parse_args().engine_config
    assert [config[name] for name in NAMES] == [6, 2, 1.0]
    assert config["zero_optimization"] == {"stage": 2}


def test_the_whole_batch_may_be_auto(config_of):
    assert "train_batch_size" not in config_of(train_batch_size="auto")


@pytest.mark.parametrize(
    ("command_line", "changes", "says"),
    [
        ((), {"stage": 4}, "must be 0, 1, 2 or 3"),
        ((), {"zero": {"stage": -1}}, "must be 0, 1, 2 or 3"),
        ((), {"fp16": {"enabled": True}}, "enable bf16 instead"),
        ((8,), {NAMES[0]: 16}, f"says {NAMES[0]} 16, and --batch-size says 8"),
        ((None, 2), {NAMES[1]: 4}, "--gradient-accumulation-steps says 2: change one"),
        ((None, None, 0.0), {NAMES[2]: 1.0}, "and --clip says 0.0: change one"),
        ((), {NAMES[0]: 0}, f"{NAMES[0]} 0, but it has to be a whole number"),
        ((), {NAMES[1]: "2"}, f'{NAMES[1]} "2", but it has to be a whole number'),
        (
            (),
            {"train_batch_size": "64"},
            'train_batch_size "64", but it has to be a whole',
        ),
        (
            (),
            {"zero_optimization": True},
            "zero_optimization is true, but has to be an",
        ),
        ((), {"bf16": [1]}, r"bf16 is \[1\], but has to be an object"),
        ((), {"zero": {"offload_optimizer": {"device": "cpu"}}}, "needs a GPU"),
        ((), {"zero": {"offload_param": {"device": "nvme"}}}, "libaio"),
    ],
)
def test_what_cannot_be_is_a_sentence(command_line, changes, says, config_of):
    with pytest.raises(BadInput, match=says):
        config_of(command_line, **changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", r"the whole of it is \[1\], but has to be an object, in braces"),
        ("{", "is no readable JSON file"),
        ("ä".encode("latin-1"), "is no readable JSON file"),
        (None, "is no readable JSON file"),
    ],
)
def test_a_file_that_is_no_configuration_is_a_sentence(text, says, tmp_path):
    path = tmp_path / "changed.json"
    if text:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=says):
        zero_config.read_config(path)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("has_folder", [True, False])
def test_nvme_needs_a_library_and_a_folder(
    has_library, has_folder, tmp_path, monkeypatch
):
    compatible = zero.load_deepspeed().ops.__compatible_ops__
    monkeypatch.setitem(compatible, "async_io", has_library)
    folder = tmp_path if has_folder else tmp_path / "missing"
    offload = [{"device": "nvme", "nvme_path": str(folder)}]
    assert zero.nvme_is_ready(offload) == (has_library and has_folder)


@pytest.mark.parametrize(
    ("whole", "passes", "fits"),
    [
        (None, 1, True),
        (64, 2, True),
        (64, None, True),
        (64, 1, False),
        (40, None, False),
    ],
)
def test_batch_sizes_of_a_config_have_to_agree(whole, passes, fits):
    """On two workers with 16 texts each."""
    config = dict(zip(NAMES, (16, passes))) | {"train_batch_size": whole}
    if fits:
        zero_config.check_batch_size(config, 2)
    else:
        with pytest.raises(BadInput, match=r"says train_batch_size .*leave out"):
            zero_config.check_batch_size(config, 2)


def test_offload_leaves_the_optimizer_to_the_script(config_of, monkeypatch):
    """DeepSpeed would insist on one of its own; `null` means no offload."""
    config = config_of(zero={"offload_optimizer": None})
    assert "zero_force_ds_cpu_optimizer" not in config
    monkeypatch.setattr(zero_config.settings, "device", lambda: torch.device("cuda"))
    config = config_of(zero={"offload_optimizer": {"device": "cpu"}})
    assert config["zero_force_ds_cpu_optimizer"] is False


def trained_with(path: Path) -> list[torch.Tensor]:
    """Return the weights after three steps of the script with a configuration."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    config = zero_config.read_config(path) | {NAMES[0]: 6}
    model = script.build(sharding.CONFIG, torch.device("cpu"), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = script.make_engine(model, optimizer, config, None)
    from deepspeed.utils import safe_get_full_fp32_param

    for step in range(3):
        script.train_step(engine, *sharding.share(step, dist.get_rank(), 2))
    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


@pytest.mark.slow
def test_both_files_train_the_same(monkeypatch):
    """DeepSpeed's defaults, and the settings under which bytes are counted exactly."""
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    paths = SHIPPED, sharding.EXACT_COUNTING
    ours, theirs = run_ranks(lambda: list(map(trained_with, paths)), 2)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert not torch.equal(ours[0], sharding.build_model(torch.float32).tokens.weight)
