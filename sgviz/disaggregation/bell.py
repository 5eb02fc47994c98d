"""Bell: what another thread rings to end the poll in which a scheduler waits.

A pipe, since that is what a poll can watch beside sockets. Imports: nothing of the package.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Bell:
    """Rung from any thread; watched, silenced and closed by one. `fd`: readable while it rings."""

    def __init__(self) -> None:
        self.fd, self._ringing = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._ringing, False)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        """Nothing after `close`."""
        with self._lock, suppress(BlockingIOError):  # full: it rings as loudly as it can
            if not self._closed:
                os.write(self._ringing, b"\0")

    def silence(self) -> None:
        """What rang until now is heard."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._ringing)
