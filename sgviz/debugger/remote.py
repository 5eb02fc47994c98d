"""A served engine by its URL: its live recording, and its debugger. Imports: debugger, recording."""

from __future__ import annotations

from collections.abc import Callable

from sgviz.debugger.debugger import TIMEOUT_S, Debugger
from sgviz.debugger.link import HttpLink
from sgviz.messages.debug import LEASE_S
from sgviz.recording import Recording
from sgviz.recording.remote import Remote, RemoteRecording

CATCH_UP_S = 30.0


class Connection(RemoteRecording):
    """A live recording of a served engine that also gives its debugger."""

    api_key: str | None = None

    def debugger(self, *, lease_s: float = LEASE_S, timeout_s: float = TIMEOUT_S) -> Debugger:
        """A step debugger on the server, as a context manager; which steps back in this recording."""
        return connect_debugger(
            self.link.url, self.api_key, recording=lambda: self, lease_s=lease_s, timeout_s=timeout_s
        )


def connect(url: str, api_key: str | None = None) -> Connection:
    """Follow a served engine: `connect("http://127.0.0.1:30000")` is a live recording like the engine's own.

    Args:
        api_key: the server's admin key if it has one, else its API key.

    Raises:
        SgvizError: nobody answers there, or not with events.
    """
    link = Remote(url, api_key)
    rec = Connection.live(
        link.snapshot, link.header, total=lambda: link.total, dropped=lambda: link.dropped, since=link.since
    )
    rec.link, rec.source, rec.api_key = link, link.url, api_key
    link.wait_for(link.state()["count"], CATCH_UP_S)  # what was before is there with the first look
    return rec


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
