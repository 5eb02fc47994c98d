"""Newest: outputs on their way to a reader in another thread or loop. Imports: nothing of sgviz."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Newest:
    """Keeps what is not read yet: of every answer its newest output alone, since that holds all earlier ones.

    So a reader that is slow skips outputs, and never waits behind old ones. Safe between two threads.

    Args:
        wake: called after every `put`, in the thread that put.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._outputs: dict[object, object] = {}
        self._others: deque[object] = deque()

    def put(self, item: object) -> None:
        """An output (a dict; `index` tells the answers of one request apart) or anything that follows them."""
        with self._lock:
            if isinstance(item, dict):
                self._outputs[item.get("index")] = item
            else:
                self._others.append(item)
        self._wake()

    def take(self) -> object:
        """What has waited longest, outputs first; None if nothing waits."""
        with self._lock:
            if self._outputs:
                return self._outputs.pop(next(iter(self._outputs)))
            return self._others.popleft() if self._others else None
