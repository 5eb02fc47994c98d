"""Asking a bootstrap server: one try a job, in a few threads beside the scheduler.

Who wants an answer looks for it; when to try again is decided there. Mirrors the HTTP calls of SGLang's
CommonKVManager. Imports: disaggregation (heart, wire), errors.
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from sgviz.disaggregation.heart import bracketed
from sgviz.disaggregation.wire import RankRoute, ServerRoute
from sgviz.errors import SgvizError

log = logging.getLogger(__name__)
T = TypeVar("T")
TIMEOUT_S = 2.0  # of one try
TELLS = 3  # tries of what nobody asks for again
THREADS = 8  # so that a host that swallows packets does not hold up the others


def get_server(host: str, port: int) -> ServerRoute:
    """What all ranks share. Raises SgvizError, as all of these do, if there is no such answer."""
    everything = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    return ask(host, port, "GET", f"/route?{everything}", ServerRoute)


def get_rank(host: str, port: int, dp_rank: int) -> RankRoute:
    """Where a rank is."""
    one = f"prefill_dp_rank={dp_rank}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    return ask(host, port, "GET", f"/route?{one}", RankRoute)


def put_rank(host: str, port: int, route: RankRoute) -> None:
    call(host, port, "PUT", "/route", msgspec.json.encode(route))


def register_dp_rank(host: str, port: int, room: int, dp_rank: int) -> None:
    """This rank has the request of the room. Said again where it is not heard: the decode side waits for it."""
    body = msgspec.json.encode({"bootstrap_room": room, "dp_rank": dp_rank})
    for left in reversed(range(TELLS)):
        try:
            call(host, port, "POST", "/register_dp_rank", body)
            return
        except SgvizError as error:
            if not left:
                log.warning("decode servers will not find bootstrap_room %d: %s", room, error.message)
                raise


def query_dp_rank(host: str, port: int, room: int) -> int | None:
    """Which rank has it; None: none as yet."""
    body = msgspec.json.encode({"bootstrap_rooms": [room]})
    return ask(host, port, "POST", "/query_dp_ranks", dict[str, int], body).get(str(room))


def ask(host: str, port: int, method: str, path: str, wanted: type[T], body: bytes | None = None) -> T:
    """One request whose answer is a `wanted`. Raises SgvizError."""
    answer = call(host, port, method, path, body)
    try:
        return msgspec.json.decode(answer, type=wanted)
    except msgspec.DecodeError as error:
        said = answer[:80].decode(errors="replace")
        raise SgvizError(
            f"{bracketed(host)}:{port} is no bootstrap server: it answers {path.partition('?')[0]} with {said!r}"
        ) from error


def call(host: str, port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    """One request. Raises SgvizError with the address and what went wrong."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: no name of a host
        why = str(error) or type(error).__name__
        raise SgvizError(f"bootstrap server {bracketed(host)}:{port} does not answer: {why}") from error
    if answer.status != 200:
        said = data[:200].decode(errors="replace")
        raise SgvizError(f"bootstrap server {bracketed(host)}:{port} answered {answer.status}: {said}")
    return data


class Jobs:
    """A few threads that run jobs; they begin with the first job and end with `close`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"sgviz-bootstrap-{number}", daemon=True)
                for number in range(THREADS)
            ]
            for thread in self._threads:
                thread.start()
        self._queue.put(run)
        return future

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def close(self) -> None:
        """End the threads as they become idle; nobody waits for them."""
        for _ in self._threads:
            self._queue.put(None)
