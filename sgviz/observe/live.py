"""The live page: GET /viz, and what it draws of GET /sgviz/events?what=...: the events, folded into views.

The views are made here, by the code that feeds the widgets of a notebook, so the page computes nothing of its own.
SSE: each message has the number of events it stands for as id and the views as data. A view is whole, so who comes
back after a broken connection has missed nothing: what happened meanwhile is in it. SGLang has no counterpart.
Imports: events, recording, serving, viz.views.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from sgviz.errors import BadRequest
from sgviz.events import RingSink
from sgviz.recording import Recording
from sgviz.serving.auth import AccessRules, AuthLevel, check_access
from sgviz.serving.context import Keys, Tokenizer
from sgviz.viz.live_page import key_page, live_page
from sgviz.viz.views import RankedViews, Wanted, check_rank, pause

BEAT_S = 15.0
RANK_DIGITS = 9  # at most
KEPT = 16  # views of one moment, for several viewers


class ViewDesk:
    """One fold for all viewers; what two of them want of the same moment is made once."""

    def __init__(self, ring: RingSink, recording: Callable[[], Recording], tokenizer: Tokenizer) -> None:
        self._ring = ring
        self._rec = recording()
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self._views: RankedViews | None = None
        self._made: dict[Wanted, tuple[int, bytes]] = {}
        self._turn = asyncio.Lock()  # so that who waits takes no thread
        # a viewer who is cancelled gives up its turn, but its thread goes on
        self._folding = threading.Lock()

    async def view(self, wanted: Wanted) -> tuple[int, bytes]:
        """The number of events and the views as JSON. Raises BadRequest as `LiveViews.make` does."""
        async with self._turn:
            return await asyncio.to_thread(self._view, wanted)

    async def state(self, count: int | None, rank: int = 0) -> bytes:
        """A rank's moment after the first `count` events that arrived (None: all), as JSON.

        Raises:
            BadRequest: no such rank, or the moment is forgotten.
        """
        check_rank(rank, self.ranks)
        async with self._turn:
            return await asyncio.to_thread(self._state, count, rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The schedulers where there are several; else empty."""
        return self._rec.named_ranks

    @property
    def total(self) -> int:
        """Events that have come."""
        return self._ring.total

    def _followed(self, rank: int) -> RankedViews:
        """Nothing is folded before somebody looks."""
        if self._views is None:
            self._views = RankedViews(self._rec, self._decode)
        self._views.refresh(rank)
        return self._views

    def _state(self, count: int | None, rank: int) -> bytes:
        with self._folding:
            views = self._followed(rank)
            return msgspec.json.encode(views.moment(views.count if count is None else count, rank))

    def _view(self, wanted: Wanted) -> tuple[int, bytes]:
        with self._folding:
            views = self._followed(wanted.rank)
            newest = views.count
            kept = self._made.get(wanted)
            if kept is None or kept[0] != newest:
                made = views.make(wanted)
                kept = self._made[wanted] = (newest, msgspec.json.encode(made))
                while len(self._made) > KEPT:
                    del self._made[next(iter(self._made))]
            return kept


def live_mount(desk: ViewDesk, keys: Keys, title: str, *, debuggable: bool) -> Callable[[FastAPI], None]:
    """What adds the page and its stream to an app. `debuggable`: it has /sgviz/debug as well."""

    async def viz(request: Request) -> Response:
        # a browser cannot send a key with the first request, so the refusal is a page that asks for it
        error = check_access(AuthLevel.ADMIN_OPTIONAL, keys, request.headers.get("authorization", ""))
        if error is not None:
            return HTMLResponse(key_page("admin" if keys.admin_api_key else "API"), error.status)
        rank = check_rank(rank_of_query(request), desk.ranks)
        return HTMLResponse(live_page(title, debuggable=debuggable, rank=rank if desk.ranks else None))

    def mount(app: FastAPI) -> None:
        rules: AccessRules = app.state.access
        rules.declare("/viz", AuthLevel.OPEN)
        app.add_api_route("/viz", viz, methods=["GET"], response_model=None)

    return mount


async def view_stream(desk: ViewDesk, request: Request) -> AsyncIterator[bytes]:
    """The messages for who asks for views by `?what=dashboard,kv,...` and the other fields of `Wanted`.

    Raises:
        BadRequest: no such view, or no such moment is remembered.
    """
    wanted = _wanted(request).check()
    return _stream(desk, wanted, await desk.view(wanted), request)


async def is_over(request: Request) -> bool:
    """Whether the reader of a stream has left, or its server is leaving."""
    ending: bool = request.app.state.ending
    return ending or await request.is_disconnected()


def rank_of_query(request: Request) -> int:
    """`?rank=`, 0 without one; whether there is such a rank is not asked. Raises BadRequest if it is no number."""
    text = request.query_params.get("rank", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= RANK_DIGITS):
        raise BadRequest(f"rank is {text[:40]!r}; it must be the number of a rank, 0 or more", param="rank")
    return int(text)


def _wanted(request: Request) -> Wanted:
    query = dict(request.query_params)
    named: dict[str, object] = {**query, "what": tuple(filter(None, query.get("what", "").split(",")))}
    named["rank"] = rank_of_query(request)
    if not named["what"]:
        del named["what"]
    try:
        return msgspec.convert(named, Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"no such view: {error}") from None


async def _stream(
    desk: ViewDesk, wanted: Wanted, first: tuple[int, bytes], request: Request
) -> AsyncIterator[bytes]:
    """Messages whenever something happened, at most ten a second, until the reader or the server leaves.

    Views take the interpreter from the requests of this process, so the next comes later where one took long.
    """
    told, data = first
    quiet, rest = 0.0, pause(0.0)
    if request.headers.get("last-event-id") != str(told):
        yield _message(told, data)
    while not await is_over(request):
        await asyncio.sleep(rest)
        quiet += rest
        if desk.total != told:
            begin, news = time.monotonic(), False
            with contextlib.suppress(BadRequest):  # the moment that is looked at fell out of memory
                told, data = await desk.view(wanted)
                news = True
            rest = pause(time.monotonic() - begin)  # what the view took, not what its reader takes
            if news:
                quiet = 0.0
                yield _message(told, data)
        if quiet >= BEAT_S:
            quiet = 0.0
            yield b": still here\n\n"


def _message(seq: int, data: bytes) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (seq, data)
