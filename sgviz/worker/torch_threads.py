"""TorchThreads: how many threads torch's operators use, while one worker wants so; `one_thread` for work beside it.

Imports: torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


class TorchThreads:
    """The number is one for all threads that begin to use torch later: `set` remembers it, `restore` puts it back.

    Where somebody else has set another number since, that one stays.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._before = count

    def set(self) -> None:
        """Call it in the thread that will run the operators: threads that use torch already keep their number."""
        self._before = threads_of_new_threads()
        torch.set_num_threads(self._count)

    def restore(self) -> None:
        if threads_of_new_threads() == self._count:
            torch.set_num_threads(self._before)


def threads_of_new_threads() -> int:
    """What a thread gets that uses torch for the first time."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(torch.get_num_threads).result()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operators run in the calling thread alone; other threads keep their number.

    For work beside a stream. OpenMP keeps a team of threads for each thread that wants one, and once there are more
    of them than cores, those of the stream sleep and wake at every operator, for the rest of the process.
    """
    mine, others = torch.get_num_threads(), threads_of_new_threads()
    torch.set_num_threads(1)
    _set_for_new_threads(others)
    try:
        yield
    finally:
        others = threads_of_new_threads()
        torch.set_num_threads(mine)
        _set_for_new_threads(others)


def _set_for_new_threads(count: int) -> None:
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(torch.set_num_threads, count).result()
