"""Groups of processes that stay alive beside each other, and measure when they are asked.

What is compared shall alternate within seconds, but starting Ray Train or torchrun takes
longer than that. So each group starts once, and waits, asleep, for its turn.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from tests import scripts

# glibc's default; but where one of its variables is set, utils.processes changes nothing
AS_IT_COMES: dict[str, Any] = {"MALLOC_ARENA_TEST_": "8"}
TIMEOUT = 300  # seconds: a partner that died shall not be waited for


def torchrun(*arguments, **environment: Any) -> subprocess.Popen:
    """Start two ranks of loop.py, with further variables in their environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", "-m", f"{__package__}.loop"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=scripts.ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


class Partner:
    """A group that `start(port)` starts, and whose rank 0 calls `orders(port)`."""

    def __init__(self, start: Callable[[int], Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT)
            self.started = start(server.getsockname()[1])
            connection, _ = server.accept()
        connection.settimeout(TIMEOUT)
        self._file = connection.makefile("rw")

    def ask(self, order):
        """Send an order, as the answer for the answer, anything that JSON can hold."""
        self._file.write(json.dumps(order) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def end(self) -> None:
        self._file.write("null\n")
        self._file.close()


def orders(port: int) -> Iterator[tuple[str, Callable]]:
    """Yield orders of the driver, each with a function that sends the answer.

    In a process group, rank 0 talks to the driver, and all ranks get the order.
    """
    alone = not dist.is_initialized()
    file = None
    if alone or dist.get_rank() == 0:
        connection = socket.create_connection(("127.0.0.1", port))
        file = connection.makefile("rw")

    def answer(value) -> None:
        if file:
            file.write(json.dumps(value) + "\n")
            file.flush()

    while True:
        order = [json.loads(file.readline() or "null") if file else None]
        if not alone:
            dist.broadcast_object_list(order)  # from rank 0, to all ranks
        if order[0] is None:
            return
        yield order[0], answer
