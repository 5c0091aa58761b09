"""Sample the memory of Ray's processes and of its object store while something runs."""

import threading
import time
from typing import NamedTuple

import psutil
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray._private.utils import get_system_memory, get_used_memory


class Sample(NamedTuple):
    """At `time` (`time.time()`), all in bytes. spilled: written to disk since the start."""

    time: float
    object_store: int
    by_process: dict[int, int]
    spilled: int

    @property
    def processes(self) -> int:
        return sum(self.by_process.values())


class sample_memory:
    """`with sample_memory() as samples:` fills the list `samples`, every `interval` s.

    `object_store` is what Ray's shared-memory store holds. `by_process` is the private
    memory, by process id, of the processes that the Ray of this session started on this
    machine, and `processes` its sum; shared pages are left out, so that the store, which
    they all map, is not counted twice.

    Raises:
        RuntimeError: no Ray of this process runs here.
    """

    def __init__(self, interval: float = 0.25) -> None:
        if not ray.is_initialized():
            raise RuntimeError("Ray does not run: call start_ray() before sampling.")
        self._interval = interval
        self._state = get_state_from_address(ray.get_runtime_context().gcs_address)
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> list[Sample]:
        self._samples.append(self._take())
        self._thread.start()
        return self._samples

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._samples.append(self._take())

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._samples.append(self._take())

    def _take(self) -> Sample:
        store = get_memory_info_reply(self._state).store_stats
        processes = psutil.Process().children(recursive=True)
        return Sample(
            time.time(),
            store.object_store_bytes_used,
            # without one that has ended since: as 0 bytes it would count as given back
            {p.pid: nbytes for p in processes if (nbytes := private_bytes(p))},
            store.spilled_bytes_total,
        )


def private_bytes(process: psutil.Process) -> int:
    """Return a process' resident memory that it shares with no other; 0 once it ended."""
    try:
        memory = process.memory_info()
        return memory.rss - getattr(memory, "shared", 0)  # `shared` is known on Linux
    except psutil.Error:
        return 0


def used_memory() -> int:
    """Return the bytes in use, of this machine or its container, as a node counts them.

    For a machine `ray._private.utils` counts less than Ray's own memory monitor does: 0.6
    GiB of 24 were seen. The monitor takes what is not available.
    """
    machine = psutil.virtual_memory()
    in_container = get_system_memory() < machine.total
    return get_used_memory() if in_container else machine.total - machine.available


def share_of_memory(nbytes: int) -> float:
    """Return `nbytes` over all there are, for Ray's `RAY_memory_usage_threshold`."""
    return nbytes / get_system_memory()
