"""The live recording of a served engine: its events followed over HTTP, and resumed where the stream broke.

Mirrors nothing of SGLang. Imports: events, errors, recording, standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

import msgspec

from sgviz.errors import SgvizError
from sgviz.events import Event, RingSink
from sgviz.recording.recording import Recording
from sgviz.recording.store import Header

CAPACITY = 1_000_000
TIMEOUT_S = 30.0  # longer than the server's beat
RETRY_S = 0.5


class RemoteRecording(Recording):
    """A live recording of a served engine; `close` ends the following, what came stays."""

    link: Remote

    def state(self, seq: int | None = None) -> dict[str, Any]:
        """The state after `seq` events as the server folds it (None: now)."""
        return self.link.state(seq)

    def wait_for(self, count: int, timeout: float = 10.0) -> bool:
        """Wait until `count` events have come; says whether they have."""
        return self.link.wait_for(count, timeout)

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> RemoteRecording:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Remote:
    """Follows the events of `url` in a thread until `close`.

    Raises:
        SgvizError: nobody answers there, or not with events.
    """

    def __init__(self, url: str, api_key: str | None = None, capacity: int = CAPACITY) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._ring = RingSink(capacity)
        self._seen = 0
        self._lost = 0
        self._decode = msgspec.json.Decoder(list[Event]).decode
        self._closing = threading.Event()
        self.header = msgspec.json.decode(self._get("/sgviz/header").read(), type=Header)
        self._stream = self._get("/sgviz/events")
        self._lock = threading.Lock()  # of the stream: it is cut from another thread
        self._thread = threading.Thread(target=self._run, name="sgviz-remote", daemon=True)
        self._thread.start()

    def state(self, seq: int | None = None) -> dict[str, Any]:
        """The state after `seq` events as the server folds it (None: now)."""
        answer: dict[str, Any] = json.load(self._get("/sgviz/state" + ("" if seq is None else f"?seq={seq}")))
        return answer

    def wait_for(self, count: int, timeout: float = 10.0) -> bool:
        """Wait until `count` events have come; says whether they have."""
        end = time.monotonic() + timeout
        while self._seen < count and time.monotonic() < end:
            time.sleep(0.01)
        return self._seen >= count

    def close(self) -> None:
        """Stop following: at once, also while nothing comes."""
        with self._lock:
            self._closing.set()
            _cut(self._stream)
        self._thread.join(TIMEOUT_S + 1)

    def snapshot(self) -> list[Event]:
        return self._ring.snapshot()

    def since(self, count: int, most: int) -> tuple[int, list[Event]]:
        """Events as they came here; numbers count what came here."""
        return self._ring.since(count, most)

    @property
    def total(self) -> int:
        return self._ring.total

    @property
    def dropped(self) -> int:
        """Events that this side lost, or that the server no longer had."""
        return self._ring.dropped + self._lost

    def _get(self, path: str) -> HTTPResponse:
        request = urllib.request.Request(
            self.url + path, headers=self._headers | {"Last-Event-ID": str(self._seen)}
        )
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise SgvizError(
                f"{self.url}{path} answered {error.code}: {error.read().decode()[:200]}"
            ) from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise SgvizError(f"cannot follow {self.url!r}: {error}") from error
        return answer

    def _run(self) -> None:
        while not self._closing.is_set():
            with (
                contextlib.suppress(SgvizError, OSError, ValueError, HTTPException),
                self._opened() as stream,
            ):
                for seq, data in _messages(stream):
                    self._take(seq, data)
            self._closing.wait(RETRY_S)

    def _opened(self) -> HTTPResponse:
        """The stream that is open, or another that goes on where it broke. SgvizError if there is none to be had."""
        if self._stream.closed:
            stream = self._get("/sgviz/events")
            with self._lock:
                self._stream = stream
                if self._closing.is_set():
                    _cut(stream)
        return self._stream

    def _take(self, seq: int, data: bytes) -> None:
        events = self._decode(data)
        self._lost += max(0, seq - len(events) - self._seen)
        self._seen = seq
        self._ring.extend(events)


def connect(url: str, api_key: str | None = None) -> RemoteRecording:
    """Follow a served engine: `connect("http://127.0.0.1:30000")` is a live recording like the engine's own.

    Args:
        api_key: the server's admin key if it has one, else its API key.

    Raises:
        SgvizError: nobody answers there, or not with events.
    """
    link = Remote(url, api_key)
    rec = RemoteRecording.live(
        link.snapshot, link.header, total=lambda: link.total, dropped=lambda: link.dropped, since=link.since
    )
    rec.link, rec.source = link, link.url
    return rec


def _cut(stream: HTTPResponse) -> None:
    """Ends a read that waits in another thread; closing alone would wait for it."""
    ended = contextlib.suppress(OSError, ValueError, AttributeError)  # by itself: it has no file any more
    with ended, socket.socket(fileno=os.dup(stream.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _messages(stream: HTTPResponse) -> Iterator[tuple[int, bytes]]:
    """`(id, data)` of each SSE message; comments are skipped, also as signs of life."""
    seq = 0
    for line in stream:
        if line.startswith(b"id: "):
            seq = int(line[4:])
        elif line.startswith(b"data: "):
            yield seq, line[6:]
        elif line.startswith(b":"):
            continue
