"""A debugger on a server by its URL. Imports: debugger."""

from __future__ import annotations

from collections.abc import Callable

from sgviz.debugger.debugger import TIMEOUT_S, Debugger
from sgviz.debugger.link import HttpLink
from sgviz.messages.debug import LEASE_S
from sgviz.recording import Recording


def connect_debugger(
    url: str,
    key: str | None = None,
    *,
    recording: Callable[[], Recording] | None = None,
    lease_s: float = LEASE_S,
    timeout_s: float = TIMEOUT_S,
) -> Debugger:
    """A debugger on the server at `url`, which was started with --enable-debugger.

    Args:
        key: its admin key if it has one, else its API key.
        recording: what gives the server's recording, to step back in.

    Raises:
        Unauthorized: the key is wrong. NotFound: it has no debugger. Unavailable: it cannot be reached, or is taken.
    """
    link = HttpLink(url, key, recording)
    try:
        return Debugger(link, lease_s=lease_s, timeout_s=timeout_s)
    except BaseException:
        link.close()
        raise
