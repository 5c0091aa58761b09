"""ds_config.json: the command line replaces its keys, and a wrong file is one sentence."""

import contextlib
import io
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
        ([], [8, 1, 1.0], 3),  # what the file says
        (["--batch-size=6", "--accumulate=2"], [6, 2, 1.0], 3),
        (["--clip=0.5", "--stage=0"], [8, 1, 0.5], 0),
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
        (None, "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("ä".encode("latin-1"), "cannot be read as JSON"),
        ("[1]", "has to be a JSON object, in braces"),
        ('{"zero_optimization": true}', "and so has its zero_optimization"),
        ('{"zero_optimization": {"stage": 4}}', "is 4, but must be 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": "auto"}}', "is auto, but must be 0, 1, 2"),
        (f'{{"{BATCH_SIZE}": "auto"}}', "write a number into it, or add --batch-size"),
        (f'{{"{CLIP}": "auto"}}', "write a number into it, or add --clip"),
        (f'{{"{CLIP}": "1.0"}}', 'says gradient_clipping "1.0": write the number'),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(text, says, tmp_path):
    path = tmp_path / "changed.json"
    if text:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=says):
        zero_config.read_config(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "changed.json"
    path.write_bytes(b"\xef\xbb\xbf" + SHIPPED.read_bytes())
    assert zero_config.read_config(path) == zero_config.read_config(SHIPPED)


def test_what_the_script_makes_itself_is_named(tmp_path, capsys):
    path = tmp_path / "changed.json"
    path.write_text(
        '{"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1}}'
    )
    assert "optimizer" not in zero_config.read_config(path)
    said = (
        "changed.json: the key optimizer is ignored. The script uses PyTorch's AdamW."
    )
    assert capsys.readouterr().out == f"{said}\n"


OF_THE_WEB = {
    "zero_optimisation": (
        True,
        "x.json: DeepSpeed ignores zero_optimisation. Is it misspelt?",
    ),
    "reduce_bucket_size": (
        0,
        "x.json (reduce_bucket_size: Input should be greater than",
    ),
    "offload_optimizer": (
        "cpu",
        "refuses x.json (offload_optimizer: Input should be a",
    ),
    "zero_quantized_weights": (True, "x.json (This op had not been implemented on CPU"),
}


def said_of(key: str) -> str:
    """Return what a rank says of a configuration with this key."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    script = scripts.load(sharding.TRAIN_DEEPSPEED)
    value, _ = OF_THE_WEB[key]
    zero = {"stage": 3} if "quantized" in key else {"stage": 2}
    other = {key: value} if key == "zero_optimisation" else {}
    zero |= {} if other else {key: value}
    keys = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": zero} | other
    config = zero_config.Config("x.json", keys)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), zero_config.in_a_sentence(config):
            model = script.build(sharding.CONFIG, torch.device("cpu"), config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            script.make_engine(model, optimizer, config, None)
    except BadInput as error:
        return str(error)
    return said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("key", OF_THE_WEB)
def test_keys_that_deepspeed_ignores_or_refuses_are_named(monkeypatch, key):
    monkeypatch.setenv("WORKSHOP_MODE", "smoke")
    assert OF_THE_WEB[key][1] in run_ranks(said_of, 1, key)[0]


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
