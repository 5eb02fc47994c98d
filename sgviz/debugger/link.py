"""How a Debugger reaches the scheduler: through the engine in this process, or over HTTP. Imports: launch, messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

import httpx2
import msgspec

from sgviz.debugger.bridge import Asked, DebugBridge, DebugReply
from sgviz.debugger.routes import PATH
from sgviz.errors import BadRequest, NotFound, SgvizError, Unavailable, from_status
from sgviz.events import Event
from sgviz.launch.loop_thread import LoopThread
from sgviz.messages.debug import Renew
from sgviz.recording import Recording
from sgviz.scheduler.gate.host import ONLY_THREADS, LocalPredicates
from sgviz.tokenizer_manager import TokenizerManager

BEATS_IN_A_LEASE = 4
HTTP_TIMEOUT_S = 90.0


class Link(Protocol):
    """`ask` does a command of a session. `local` names a Python predicate. `recording`: of the run, if there is one."""

    def ask(self, session: str, command: Asked) -> DebugReply: ...

    def local(self, function: Callable[[Event], object]) -> str: ...

    def recording(self) -> Recording | None: ...

    def close(self) -> None: ...


class EngineLink:
    """To the engine in this process, whose scheduler may be a thread or a process.

    Args:
        predicates: where Python predicates go; None: the scheduler is another process.
    """

    def __init__(
        self,
        loop: LoopThread,
        manager: TokenizerManager,
        predicates: LocalPredicates | None,
        recording: Callable[[], Recording],
    ) -> None:
        self._loop = loop
        self._bridge = DebugBridge(manager)
        self._predicates = predicates
        self._recording = recording

    def ask(self, session: str, command: Asked) -> DebugReply:
        return self._loop.call(self._bridge.ask(session, command))

    def local(self, function: Callable[[Event], object]) -> str:
        if self._predicates is None:
            raise BadRequest(ONLY_THREADS)
        return self._predicates.add(function)

    def recording(self) -> Recording | None:
        return self._recording()

    def close(self) -> None:
        if self._predicates is not None:
            self._predicates.clear()


class HttpLink:
    """To a server by its URL. `key`: the admin key if it has one, else the API key."""

    def __init__(
        self, url: str, key: str | None = None, recording: Callable[[], Recording] | None = None
    ) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=HTTP_TIMEOUT_S)
        self._recording = recording

    def ask(self, session: str, command: Asked) -> DebugReply:
        body = {"session": session, **msgspec.to_builtins(command)}
        try:
            response = self._client.post(PATH, json=body)
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self.url} cannot be reached: {error}") from error
        if response.status_code != 200:
            raise self._error(response.status_code, response.content)
        return msgspec.json.decode(response.content, type=DebugReply)

    def _error(self, status: int, content: bytes) -> SgvizError:
        try:
            message = msgspec.json.decode(content)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            message = f"the server answered {status}"
        if status == NotFound.status and "no such path" in message:
            message = f"{self.url} has no debugger: start the server with --enable-debugger"
        return from_status(status, message)

    def local(self, function: Callable[[Event], object]) -> str:
        raise BadRequest(ONLY_THREADS)

    def recording(self) -> Recording | None:
        return self._recording() if self._recording is not None else None

    def close(self) -> None:
        self._client.close()


class Heartbeat:
    """Renews the lease of a session, in a thread that knows the link only: its debugger can be forgotten."""

    def __init__(self, link: Link, session: str, lease_s: float) -> None:
        self._link, self._session = link, session
        self._pause = lease_s / BEATS_IN_A_LEASE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgviz-debugger-lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            with contextlib.suppress(
                Unavailable
            ):  # perhaps only this once; the lease says when it is too late
                try:
                    self._link.ask(self._session, Renew())
                except (NotFound, RuntimeError):
                    return

    def stop(self) -> None:
        """End the thread; harmless if it has ended."""
        self._ended.set()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()
