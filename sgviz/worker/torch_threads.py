"""TorchThreads: how many threads torch's operators use, while one worker wants so. Imports: torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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
