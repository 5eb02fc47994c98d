"""The endpoints: metrics, the stream of events, the state at a moment.

`/sgviz/events` is SSE: each message has the number of its last event as id and a JSON array of events as data,
so that `Last-Event-ID` (or `?seq=`) goes on where a reader stopped. With `?what=dashboard,kv,...` the data are views,
folded here: what the page `/viz` draws. Of several data parallel ranks `?rank=` says whose state or views; events are
of all. `/sgviz/*` takes the admin key if one is set.
Mirrors SGLang's `/metrics`; it has nothing like the other two.
Imports: events, recording, serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from sgviz.errors import BadRequest
from sgviz.events import RingSink
from sgviz.observe.http_counts import HttpCounts
from sgviz.observe.live import ViewDesk, is_over, rank_of_query, view_stream
from sgviz.observe.metrics import Metrics
from sgviz.recording import Recording
from sgviz.serving.auth import AccessRules, AuthLevel
from sgviz.serving.counting import CountingMiddleware, Counts

PAGE = 256  # events in one message
POLL_S = 0.1
BEAT_S = 15.0  # a comment in a quiet stream, so that proxies keep it
DIGITS = 18  # of an event's number, at most: more can never come
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def observe_mount(
    ring: RingSink,
    recording: Callable[[], Recording],
    model_name: str,
    desk: ViewDesk,
    custom_labels: Sequence[str] = (),
    also_counted: Callable[[Counts], None] = lambda counts: None,
) -> Callable[[FastAPI], None]:
    """What adds the endpoints to an app (`ServingContext.mounts`).

    Args:
        ring: where the events of all components arrive. recording: the live recording over it.
        desk: what folds it for viewers, and knows earlier states.
        custom_labels: labels that requests may bring by header.
        also_counted: gets the counters of HTTP requests, for those that come in elsewhere.
    """
    live = recording()
    measured = Metrics(model_name, custom_labels, live.named_ranks, _side_of(live))
    scrapes, counts = _Scrapes(ring, measured), HttpCounts(measured.series.registry)
    also_counted(counts)
    lock = asyncio.Lock()

    async def metrics() -> Response:
        async with lock:
            body = await asyncio.to_thread(scrapes.text)
        return Response(body, media_type=CONTENT_TYPE)

    async def events(request: Request) -> Response:
        if "what" in request.query_params:
            stream = await view_stream(desk, request)
        else:
            start = _number(request.headers.get("last-event-id") or request.query_params.get("seq") or "0")
            stream = _events(ring, start, request)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def state(request: Request) -> Response:
        seq = request.query_params.get("seq")
        body = await desk.state(None if seq is None else _number(seq), rank_of_query(request))
        return Response(body, media_type="application/json")

    async def header() -> Response:
        return Response(msgspec.json.encode(live.header), media_type="application/json")

    def mount(app: FastAPI) -> None:
        rules: AccessRules = app.state.access
        rules.declare("/sgviz", AuthLevel.ADMIN_OPTIONAL)
        app.add_middleware(CountingMiddleware, counts=counts)  # outermost: what is refused counts too
        for path, handler in (
            ("/metrics", metrics),
            ("/sgviz/events", events),
            ("/sgviz/state", state),
            ("/sgviz/header", header),
        ):
            app.add_api_route(path, handler, methods=["GET"], response_model=None)

    return mount


def _side_of(live: Recording) -> str:
    """Prefill or decode, of a server of one side; else empty."""
    mode = live.header.settings.get("disaggregation_mode")
    return mode if isinstance(mode, str) and mode in ("prefill", "decode") else ""


class _Scrapes:
    """Folds what came since the last scrape."""

    def __init__(self, ring: RingSink, metrics: Metrics) -> None:
        self._ring, self._metrics = ring, metrics
        self._seen = 0

    def text(self) -> bytes:
        first, events = self._ring.since(self._seen)
        if first > self._seen:
            self._metrics.lost(first - self._seen)
        self._seen = first + len(events)
        self._metrics.fold(sorted(events, key=lambda event: event.sort_key))
        return self._metrics.text()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise BadRequest(f"seq is {text[:40]!r}; it must be the number of an event, 0 or more", param="seq")
    return int(text)


async def _events(ring: RingSink, start: int, request: Request) -> AsyncIterator[bytes]:
    """Messages from event number `start` on, until the reader or the server leaves."""
    quiet = 0.0
    while not await is_over(request):
        first, events = ring.since(start, PAGE)
        if events:
            start, quiet = first + len(events), 0.0
            yield b"id: %d\ndata: %s\n\n" % (start, msgspec.json.encode(events))
            continue
        await asyncio.sleep(POLL_S)
        quiet += POLL_S
        if quiet >= BEAT_S:
            quiet = 0.0
            yield b": still here\n\n"
