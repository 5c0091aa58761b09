"""Collectives and bytes, counted for tensors of known sizes, and for DDP."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.waiting import TIMEOUT_S
from utils import comms
from utils.errors import BadInput
from utils.launch import run_ranks
from utils.models import resnet18

N = 2  # ranks


def zeros(n, dtype=torch.float32):
    return torch.zeros(n, dtype=dtype)


# the name it is counted by, bytes that a rank hands in, bytes that it sends over a ring
# (the mean of both ranks), the call
COLLECTIVES = [
    ("allreduce", 40, 40, lambda: dist.all_reduce(zeros(10))),
    ("allreduce", 80, 80, lambda: dist.all_reduce(zeros(10, torch.float64))),
    ("broadcast", 12, 6, lambda: dist.broadcast(zeros(3), src=0)),
    ("reduce", 12, 6, lambda: dist.reduce(zeros(3), dst=1)),
    ("allgather", 20, 20, lambda: dist.all_gather([zeros(5)] * N, zeros(5))),
    ("allgather", 20, 20, lambda: dist.all_gather_into_tensor(zeros(10), zeros(5))),
    ("reducescatter", 40, 20, lambda: dist.reduce_scatter(zeros(5), [zeros(5)] * N)),
    ("reducescatter", 40, 20, lambda: dist.reduce_scatter_tensor(zeros(5), zeros(10))),
    ("alltoall", 24, 12, lambda: dist.all_to_all_single(zeros(6), zeros(6))),
    (
        "allreduce",
        28,
        28,
        lambda: functional.all_reduce(zeros(7), "sum", dist.group.WORLD).sum(),
    ),
    (
        "allgather",
        28,
        28,
        lambda: functional.all_gather_single(zeros(7), 0, dist.group.WORLD).sum(),
    ),
]


def test_calls_and_bytes():
    def count_each():
        dist.init_process_group("gloo")
        counted = []
        for *_, collective in COLLECTIVES:
            with comms.count_comms() as counts:
                for _ in range(3):
                    collective()
            collective()  # not counted: the block has ended
            counted.append((dict(counts.calls), dict(counts.payload), counts.sent(N)))
            assert counts.groups == {(0, 1): comms.Comms(counts.calls, counts.payload)}
        with comms.count_comms() as counts:
            (zeros(5) + 1).sum()
            dist.barrier()
        counted.append((dict(counts.calls), dict(counts.payload), counts.sent(N)))
        dist.destroy_process_group()
        return counted

    expected = [
        ({name: 3}, {name: 3 * payload}, 3 * sent)
        for name, payload, sent, _ in COLLECTIVES
    ]
    expected.append(({}, {}, 0))  # neither arithmetic nor a barrier sends a tensor
    for counted in run_ranks(count_each, N, timeout=TIMEOUT_S):
        assert counted == expected


def test_ddp_sends_each_gradient_once():
    def run(bucket_cap_mb):
        dist.init_process_group("gloo")
        model = DDP(resnet18(), bucket_cap_mb=bucket_cap_mb)
        images = torch.rand(2, 1, 28, 28)
        for _ in range(2):  # DDP orders its buckets anew once, after the first step
            model(images).sum().backward()
        with comms.count_comms() as counts, model.no_sync():
            model(images).sum().backward()
        assert not counts.calls
        with comms.count_comms() as counts:
            model(images).sum().backward()
        parameters = sum(p.numel() * p.itemsize for p in model.parameters())
        del model
        gc.collect()
        dist.destroy_process_group()
        return dict(counts.calls), dict(counts.payload), parameters

    few, many = (run_ranks(run, N, mb, timeout=TIMEOUT_S)[0] for mb in (100, 5))
    for calls, payload, parameters in (few, many):
        assert payload == {"allreduce": parameters}
        assert list(calls) == ["allreduce"]
    assert few[0]["allreduce"] < many[0]["allreduce"]  # smaller buckets, more of them


def test_formulas_of_a_ring_and_of_each_strategy():
    assert [comms.allreduce_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]
    assert comms.Comms(payload={"send": 10}).sent(4) == 10
    sent = {name: comms.predict(name, 100, 4) for name in comms.TRIPS}
    assert sent == {
        **{"ddp": 150, "zero1": 150, "zero2": 150, "zero3": 225},
        **{"fsdp2": 225, "fsdp2-keep": 150},
    }
    with pytest.raises(BadInput, match="choose from ddp"):
        comms.predict("zero4", 1, 1)


def test_what_leaves_a_node_is_what_rings_send_across():
    """Four ranks on two nodes. A ring of all has two of its four links between nodes, one
    within a node none, one across both of its two."""
    for ranks, leaving in (((0, 1, 2, 3), 150), ((0, 1), 0), ((0, 2), 200)):
        counted = comms.Comms(payload={"allreduce": 100})
        found = comms.Comms(groups={ranks: counted}).leaving_node(ranks_per_node=2)
        assert found == leaving
    both = {(0, 1): counted, (0, 2): counted}
    assert comms.Comms(groups=both).leaving_node(2) == 200


def test_ring_sends_what_the_formula_says():
    """An all-reduce written as a ring of sends: count what really goes to a neighbour."""

    def ring():
        dist.init_process_group("gloo")
        rank, n = dist.get_rank(), dist.get_world_size()
        chunks, sent = list(torch.arange(12.0).add(rank).chunk(n)), 0
        for step in range(2 * (n - 1)):
            outgoing = chunks[(rank - step) % n]
            incoming = torch.empty_like(outgoing)
            request = dist.isend(outgoing, (rank + 1) % n)
            dist.recv(incoming, (rank - 1) % n)
            request.wait()
            sent += outgoing.numel() * outgoing.itemsize
            target = (rank - step - 1) % n
            # the first half adds up (reduce-scatter), the second passes on (all-gather)
            chunks[target] = incoming + chunks[target] if step < n - 1 else incoming
        dist.destroy_process_group()
        return torch.cat(chunks).tolist(), sent

    expected = [3 * value + 0 + 1 + 2 for value in range(12)]
    for result, sent in run_ranks(ring, 3, timeout=TIMEOUT_S):
        assert result == expected
        assert sent == comms.allreduce_bytes(12 * 4, 3)
