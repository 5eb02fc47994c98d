"""The live recording of a served engine: its events followed over HTTP, and resumed where the stream broke.

A break is mended in silence only while it can be: who answers must be the same run, and let us in.
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
from typing import Any, Self

import msgspec

from sgviz.errors import BadRequest, SgvizError, Unavailable, from_status
from sgviz.events import Event, RingSink
from sgviz.recording.recording import Recording
from sgviz.recording.store import Header

CAPACITY = 1_000_000
TIMEOUT_S = 30.0  # longer than the server's beat
RETRY_S = 0.5


class RemoteRecording(Recording):
    """A live recording of a served engine; `close` ends the following, what came stays."""

    link: Remote

    def state(self, seq: int | None = None, rank: int = 0) -> dict[str, Any]:
        """The state of a rank's scheduler after `seq` events of all, as the server folds it (None: now)."""
        return self.link.state(seq, rank)

    def wait_for(self, count: int, timeout: float = 10.0) -> bool:
        """Wait until `count` events have come; says whether they have."""
        return self.link.wait_for(count, timeout)

    @property
    def fault(self) -> str:
        """Why no events come; empty while they do."""
        return self.link.fault

    def close(self) -> None:
        self.link.close()

    def freeze(self) -> Self:
        return self._linked(super().freeze())

    def sibling(self) -> Self:
        return self._linked(super().sibling())

    def _linked(self, other: Self) -> Self:
        other.link = self.link
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Remote:
    """Follows the events of `url` in a thread until `close`, or until another run answers, or nobody who lets us in.

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
        self._fault = ""
        self.header = self._header()
        self._stream = self._get("/sgviz/events")
        self._lock = threading.Lock()  # of the stream: it is cut from another thread
        self._thread = threading.Thread(target=self._run, name="sgviz-remote", daemon=True)
        self._thread.start()

    def state(self, seq: int | None = None, rank: int = 0) -> dict[str, Any]:
        """The state of a rank's scheduler after `seq` events of all, as the server folds it (None: now)."""
        at = "" if seq is None else f"&seq={seq}"
        answer: dict[str, Any] = json.load(self._get(f"/sgviz/state?rank={rank}{at}"))
        return answer

    def wait_for(self, count: int, timeout: float = 10.0) -> bool:
        """Wait until `count` events have come; says whether they have."""
        end = time.monotonic() + timeout
        while self._seen < count and time.monotonic() < end:
            time.sleep(0.01)
        return self._seen >= count

    @property
    def fault(self) -> str:
        """Why no events come; empty while they do."""
        again = "; trying again" if self._thread.is_alive() else "; followed no longer"
        return self._fault and self._fault + again

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

    def _header(self) -> Header:
        with self._get("/sgviz/header") as answer:
            try:
                return msgspec.json.decode(answer.read(), type=Header)
            except msgspec.DecodeError as error:
                raise BadRequest(
                    f"{self.url} does not answer as this version of sgviz does: {error}"
                ) from error

    def _get(self, path: str) -> HTTPResponse:
        """Raises Unavailable if nobody answers, else the SgvizError of the answer's status."""
        request = urllib.request.Request(
            self.url + path, headers=self._headers | {"Last-Event-ID": str(self._seen)}
        )
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            message = f"{self.url}{path} answered {error.code}: {error.read().decode()[:200]}"
            raise from_status(error.code, message) from error
        except (urllib.error.URLError, OSError, ValueError, HTTPException) as error:
            raise Unavailable(f"cannot follow {self.url!r}: {error}") from error
        return answer

    def _run(self) -> None:
        while not self._closing.is_set():
            why, over = self._follow()
            if self._closing.is_set():
                return
            self._fault = why
            if over:
                return
            self._closing.wait(RETRY_S)

    def _follow(self) -> tuple[str, bool]:
        """Take what comes until the stream breaks; why it did, and whether no second try can help."""
        try:
            with self._opened() as stream:
                self._fault = ""
                for seq, data in _messages(stream):
                    self._take(seq, data)
        except SgvizError as error:
            return str(error), error.status < 500
        except msgspec.DecodeError as error:
            return f"{self.url} sends events that this version cannot read: {error}", True
        except (OSError, ValueError, HTTPException) as error:
            return f"the connection to {self.url} broke: {error or type(error).__name__}", False
        return f"{self.url} ended the stream of events", False

    def _opened(self) -> HTTPResponse:
        """The stream that is open, or another that goes on where it broke.

        Raises:
            BadRequest: another run answers. SgvizError: there is none to be had.
        """
        if self._stream.closed:
            stream = self._get("/sgviz/events")
            try:
                self._check_run()
            except BaseException:
                stream.close()
                raise
            with self._lock:
                self._stream = stream
                if self._closing.is_set():
                    _cut(stream)
        return self._stream

    def _check_run(self) -> None:
        """Asked behind the opening of a stream: if the run is still ours then, so is the stream."""
        if self._header().anchors != self.header.anchors:
            raise BadRequest(f"{self.url} was started anew; connect again to follow its new run")

    def _take(self, seq: int, data: bytes) -> None:
        events = self._decode(data)
        self._lost += max(0, seq - len(events) - self._seen)
        self._seen = seq
        self._ring.extend(events)


def _cut(stream: HTTPResponse) -> None:
    """Ends a read that waits in another thread; closing alone would wait for it."""
    ended = contextlib.suppress(OSError, ValueError, AttributeError)  # by itself: it has no file any more
    with ended, socket.socket(fileno=os.dup(stream.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _messages(stream: HTTPResponse) -> Iterator[tuple[int, bytes]]:
    """`(id, data)` of each SSE message; comments are skipped, also as signs of life."""
    seq = 0
    for line in stream:
        if not line.endswith(b"\n"):
            return  # it broke within a line
        if line.startswith(b"id: "):
            seq = int(line[4:])
        elif line.startswith(b"data: "):
            yield seq, line[6:]
        elif line.startswith(b":"):
            continue
