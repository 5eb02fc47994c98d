"""Sockets that a server listens on: a port of its own, a port that several processes share, a path in a folder.

Imports: errors.
"""

from __future__ import annotations

import socket

from sgviz.errors import StartupError

BACKLOG = 2048


def open_port(host: str, port: int, *, listen: bool = True) -> socket.socket:
    """A socket on `host:port` that nobody else has, so that a taken port shows at once and port 0 is known.

    Raises:
        StartupError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"host {host!r} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if listen:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener


def share_port(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` bound sockets of one port; the kernel spreads connections over those that listen.

    Only the first had to be alone on the port: it is made shareable after it was bound, so that another server is
    still noticed, also one that shares its port.

    Raises:
        StartupError: the address cannot be used, or this system cannot share ports.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise StartupError(
            "this system cannot share a port between processes (SO_REUSEPORT): tokenizer_worker_num must be 1"
        )
    shared = [open_port(host, port, listen=False)]
    first = shared[0]
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        while len(shared) < count:
            other = socket.socket(first.family, first.type, first.proto)
            shared.append(other)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(first.getsockname())
            other.setblocking(False)
    except OSError as error:
        for each in shared:
            each.close()
        raise StartupError(f"cannot share {host}:{port} between processes: {error.strerror}") from error
    return shared


def open_path(path: str) -> socket.socket:
    """A listening Unix socket.

    Raises:
        StartupError: the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on the path {path!r}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
