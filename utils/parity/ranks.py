"""Start processes that belong together, hear from each, and end them all."""

import math
import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection

# One server process imports torch once; every rank is forked from it in milliseconds.
# Unlike the caller, the server has no threads and never touches a GPU.
CONTEXT = mp.get_context("forkserver")


class Died(Exception):
    """Name the rank that ended without an answer, and its exit code."""

    def __init__(self, rank: int, code: int):
        super().__init__(rank, code)
        self.rank, self.code = rank, code


class Late(Exception):
    """Name the ranks from which nothing came in time."""

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


class Ranks:
    """Processes that call `target(*arguments[rank], pipe)`; a context that ends them.

    Attributes:
        processes, pipes: by rank.
        done: ranks from which nothing more is awaited.
    """

    def __init__(self, target: Callable, arguments: list[tuple], daemon: bool = True):
        self.target, self.arguments, self.daemon = target, arguments, daemon
        self.processes: list = []
        self.pipes: list = []
        self.done: set[int] = set()

    def __enter__(self) -> "Ranks":
        try:
            for arguments in self.arguments:
                here, there = CONTEXT.Pipe()
                process = CONTEXT.Process(
                    target=self.target, args=(*arguments, there), daemon=self.daemon
                )
                self.processes.append(process)
                process.start()
                there.close()  # so that this end sees the end of a rank that dies
                self.pipes.append(here)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.pid:  # none if stop was pressed while it started
                process.kill()
                process.join()

    def messages(self, timeout: float, of_each: bool) -> Iterator[tuple[int, bytes]]:
        """Yield each rank and what it sends, until all are in `done`.

        `timeout` is in seconds: of the whole, or `of_each` message.

        Raises:
            Died, Late
        """
        deadline = time.monotonic() + timeout
        while len(self.done) < len(self.pipes):
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in self.done]
            left = max(0, deadline - time.monotonic())
            ready = connection.wait(waiting, None if math.isinf(left) else left)
            if not ready:
                ranks = range(len(self.pipes))
                raise Late([rank for rank in ranks if rank not in self.done])
            if of_each:
                deadline = time.monotonic() + timeout
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    message = self.pipes[rank].recv_bytes()
                except (EOFError, OSError):
                    self.processes[rank].join()
                    raise Died(rank, self.processes[rank].exitcode) from None
                yield rank, message
