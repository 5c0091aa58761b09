"""GPT, text, memory and traffic: what the notebooks of part 03 build on."""

import lzma

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests import sharding
from tests.simulate import fsdp2_step
from utils import comms, datasets, memory
from utils.datasets import shipped
from utils.launch import run_ranks
from utils.models import GPT, GPT2_124M, SMOKE, GPTConfig, generate


def test_gpt2_has_the_shape_of_gpt2():
    with torch.device("meta"):
        model = GPT(GPT2_124M)
    parameters = sum(p.numel() for p in model.parameters())
    # GPT-2's published size, whose output layer shares the weights of the embedding
    assert parameters - model.head.weight.numel() == 124_439_808
    assert list(model.buffers()) == []


def test_a_token_sees_only_what_comes_before_it():
    torch.manual_seed(0)
    model = GPT(SMOKE)
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] += 1
    same = model(tokens) == model(changed % 256)
    assert same[:, :10].all()
    assert not same[:, 10:].all(dim=-1).any()


def test_init_weights_gives_a_meta_model_the_same_weights():
    expected = GPT(SMOKE)
    torch.manual_seed(0)
    expected.init_weights()  # once more: building it drew default weights as well
    with torch.device("meta"):
        model = GPT(SMOKE)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    theirs = expected.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_generate_continues_with_the_most_likely_token():
    torch.manual_seed(0)
    model = GPT(SMOKE)
    start = torch.randint(0, 256, (1, 70))  # longer than the block size
    tokens = generate(model, start, 3)
    assert tokens.shape == (1, 73)
    assert tokens[0, -1] == model(tokens[:, -65:-1])[0, -1].argmax()


def test_a_gpt_says_what_is_wrong():
    with pytest.raises(ValueError, match="choose a multiple of the number of heads"):
        GPT(GPTConfig(width=65))
    with pytest.raises(ValueError, match="reads at most 64"):
        GPT(SMOKE)(torch.zeros(1, 65, dtype=torch.long))


def test_text_is_the_topics_and_targets_are_the_next_bytes():
    raw = lzma.decompress(shipped.TEXT_FILE.read_bytes())
    assert len(raw) == 466_273
    train, test = datasets.text("train"), datasets.text("test")
    inputs, targets = train.tensors
    assert inputs.shape == targets.shape == (6556, 64)
    assert (inputs.flatten()[1:] == targets.flatten()[:-1]).all()
    assert bytes(inputs.flatten().tolist()) == raw[: inputs.numel()]
    # the splits share no byte
    test_start = len(raw) - len(raw) // 10
    assert inputs.numel() < test_start
    assert bytes(test.tensors[0].flatten().tolist()) in raw[test_start:]


def test_text_of_any_file(tmp_path):
    path = tmp_path / "hello.txt"
    path.write_bytes(bytes(range(200)))
    inputs, targets = datasets.text(block_size=8, path=path).tensors
    assert inputs.shape == (22, 8)
    assert (targets == inputs + 1).all()


def test_text_says_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"nowhere\.txt cannot be read"):
        datasets.text(path=tmp_path / "nowhere.txt")
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(ValueError, match="lower block_size"):
        datasets.text(path=short)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        datasets.text("valid")
    monkeypatch.setattr(shipped, "TEXT_FILE", short)
    with pytest.raises(OSError, match="damaged"):
        datasets.text()


def test_the_zero_paper():
    """7.5 billion parameters on 64 GPUs, figure 1 of arXiv 1910.02054."""
    gigabytes = [
        round(memory.predict(7_500_000_000, 64, stage, memory.MIXED).total / 1e9, 1)
        for stage in range(4)
    ]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


def test_formulas_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
        memory.predict(1, 1, 4)
    with pytest.raises(ValueError, match="choose from ddp"):
        comms.predict("zero4", 1, 1)


def test_state_bytes_of_one_process():
    model = GPT(SMOKE)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    measured = memory.state_bytes(model, optimizer)
    assert measured == memory.predict(parameters, 1, 0)
    assert measured.total == 16 * parameters


def test_count_memory_follows_what_lives():
    with memory.count_memory() as counted:
        kept = torch.zeros(1000)  # 4,000 bytes
        gone = kept + 1
        assert (counted.live, counted.peak) == (8000, 8000)
        view = kept[10:]  # no memory of its own
        kept += 1
        del gone
        assert (counted.live, counted.peak) == (4000, 8000)
        view.untyped_storage().resize_(400)
        assert counted.live == 400
    assert torch.UntypedStorage.resize_ is counted._resize


def test_memory_of_a_gpu_is_asked_of_its_allocator(monkeypatch):
    """With numbers of an allocator, as a machine without a GPU has none."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    with memory.follow_memory(torch.device("cuda", 0)) as followed:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert (followed.live, followed.peak) == (200, 400)
    with memory.follow_memory(torch.device("cpu")) as followed:
        torch.zeros(1000)
    assert (followed.live, followed.peak) == (0, 4000)


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("keep", [False, True])
def test_fsdp2_on_simulated_ranks_follows_the_formulas(world_size, keep):
    config = GPTConfig(layers=2)
    parameters = sum(p.numel() for p in GPT(config).parameters())
    state, counted = fsdp2_step(config, world_size, keep)
    for measured, predicted in zip(state, memory.predict(parameters, world_size, 3)):
        assert measured == pytest.approx(predicted, rel=0.02)
    strategy = "fsdp2-keep" if keep else "fsdp2"
    predicted = comms.predict(strategy, 4 * parameters, world_size)
    assert counted.sent(world_size) == pytest.approx(predicted, rel=0.01)


def every_collective():
    dist.init_process_group("gloo")
    ones = torch.ones(6)  # 24 bytes
    half = torch.ones(3)
    calls = {
        "allreduce": lambda: dist.all_reduce(ones),
        "broadcast": lambda: dist.broadcast(ones, src=0),
        "reduce": lambda: dist.reduce(ones, dst=1),
        "reducescatter": lambda: dist.reduce_scatter_tensor(half, ones),
        "allgather": lambda: dist.all_gather_into_tensor(ones, half),
        "alltoall": lambda: dist.all_to_all_single(torch.empty(6), ones),
        "list": lambda: dist.all_gather([torch.empty(3), torch.empty(3)], half),
        "functional": lambda: dist._functional_collectives.all_gather_tensor(
            half, 0, dist.group.WORLD
        ).wait(),
        "barrier": lambda: dist.barrier(),
    }
    found = {}
    for name, call in calls.items():
        with comms.count_comms() as counted:
            call()
        found[name] = (dict(counted.calls), counted.sent(2))
    return found


def test_every_collective_is_counted_once_with_what_a_ring_sends():
    found = run_ranks(every_collective, 2)[1]
    assert found == {
        "allreduce": ({"allreduce": 1}, 24),
        "broadcast": ({"broadcast": 1}, 12),
        "reduce": ({"reduce": 1}, 12),
        "reducescatter": ({"reducescatter": 1}, 12),
        "allgather": ({"allgather": 1}, 12),
        "alltoall": ({"alltoall": 1}, 12),
        "list": ({"allgather": 1}, 12),
        "functional": ({"allgather": 1}, 12),
        "barrier": ({}, 0),
    }


def test_zero_trains_without_a_compiler(monkeypatch):
    """Left alone, DeepSpeed would compile an operator when it starts on a CPU."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    losses = run_ranks(lambda: sharding.zero(3, torch.float32, 2)["losses"], 2)[0]
    assert losses[1] < losses[0]
