"""Rows of free ports for tests of several nodes, below those that systems give out by themselves."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack


def free_row(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
    for _ in range(100):
        first = random.randrange(20000, 32000 - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            return first
    raise AssertionError(f"no {count} neighbouring ports are free")
