"""ds_config.json: the command line replaces its keys, and a wrong file is one sentence."""

from pathlib import Path

import pytest
import torch

from tests import scripts, sharding
from utils import zero_config
from utils.errors import BadInput
from utils.launch import run_ranks

SHIPPED = sharding.TRAIN_DEEPSPEED.with_name("ds_config.json")
BATCH_SIZE, ACCUMULATION, CLIP = zero_config.OPTIONS


@pytest.mark.parametrize(
    ("flags", "expected", "stage"),
    [
        ([], [16, 1, 1.0], 3),  # what the file says
        (["--batch-size=6", "--accumulate=2"], [6, 2, 1.0], 3),
        (["--clip=0.5", "--stage=0"], [16, 1, 0.5], 0),
    ],
)
def test_options_of_the_script_replace_keys_of_the_file(
    flags, expected, stage, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["train_deepspeed.py", "--num-workers=2", *flags])
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    config = script.parse_args().ds_config
    assert [config[key] for key in (BATCH_SIZE, ACCUMULATION, CLIP)] == expected
    assert config["zero_optimization"] == {"stage": stage}
    assert config["bf16"] == {"enabled": False}  # and the rest stays


def test_a_batch_size_replaces_the_global_one_of_the_file(tmp_path):
    """DeepSpeed would refuse both, as they contradict each other."""
    path = tmp_path / "changed.json"
    path.write_text('{"train_batch_size": 64}')
    assert zero_config.read_config(path)["train_batch_size"] == 64
    assert "train_batch_size" not in zero_config.read_config(path, batch_size=8)
    path.write_text('{"train_batch_size": "auto"}')
    assert "train_batch_size" not in zero_config.read_config(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is no readable JSON file"),
        ("{", "is no readable JSON file"),
        ("ä".encode("latin-1"), "is no readable JSON file"),
        ("[1]", "has to be a JSON object, in braces"),
        ('{"zero_optimization": true}', "and so has its zero_optimization"),
        ('{"zero_optimization": {"stage": 4}}', "is 4, but must be 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": "auto"}}', "is auto, but must be 0, 1, 2"),
        (f'{{"{BATCH_SIZE}": "auto"}}', "write a number into it, or add --batch-size"),
        (f'{{"{CLIP}": "auto"}}', "write a number into it, or add --clip"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(text, says, tmp_path):
    path = tmp_path / "changed.json"
    if text:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=says):
        zero_config.read_config(path)


def trained_with(path: Path) -> list[torch.Tensor]:
    """Return the weights after three steps of the script with a configuration."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    config = zero_config.read_config(path, batch_size=6)
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
