"""Give a group of gloo one thread, in the process that ranks are forked from.

Torch 2.15 gives it two, which write the name of the collective that each finished last
into one string, without a lock (`ProcessGroupGloo::runLoop`). Where the name is longer
than 15 characters, as with DTensors, a rank dies by SIGSEGV or SIGABRT now and then: with
two gathers at a time within seconds (tests/test_launch.py), else about once in a million.
"""

import torch.distributed as dist


def create(group, _) -> dist.ProcessGroupGloo:
    """Create a group as torch does, but with one thread, and within this machine."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    options._timeout = group.timeout
    options.global_ranks_in_group = group.global_ranks_in_group
    options.group_name = group.group_id
    return dist.ProcessGroupGloo(
        group.store, group.group_rank, group.group_size, options
    )


dist.Backend.register_backend(
    "gloo",
    create,
    extended_api=True,
    devices=dist.Backend.backend_capability["gloo"],
    _backend_type=dist.ProcessGroup.BackendType.GLOO,
)
