"""A running router: its recording, its events, its port; started and stopped as one.

Imports: events, recording (file sink; a bridge may), serving (server), launch (announcement), this folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sgviz.config import HttpConfig
from sgviz.events import Tracer, WallClock
from sgviz.events.schema import ProcessStarted
from sgviz.recording import ClockAnchor, Header
from sgviz.recording.sink import FileSink
from sgviz.router.app import create_router_app
from sgviz.router.options import RouterOptions
from sgviz.router.router import Router
from sgviz.serving.server import ServerHandle

COMPONENT = "router"
STOP_GRACE_S = 10.0


class RunningRouter:
    """A router and its server; `url` is where clients ask."""

    def __init__(self, router: Router, server: ServerHandle) -> None:
        self.router, self.server = router, server

    @property
    def url(self) -> str:
        return self.server.url


@asynccontextmanager
async def running(options: RouterOptions, grace: float = STOP_GRACE_S) -> AsyncGenerator[RunningRouter, None]:
    """A router for the time of the block; at its end answers under way have `grace` seconds.

    Raises:
        StartupError: the port cannot be used. SgvizError: the recording cannot be written.
    """
    async with contextlib.AsyncExitStack() as stack:
        router = Router(options, _tracer(options, stack))
        stack.push_async_callback(router.close)
        await router.start()
        http = HttpConfig(max_body_mb=options.max_body_mb)
        server = await ServerHandle.start(create_router_app(router), options.host, options.port, http)
        stack.push_async_callback(server.stop, grace)
        yield RunningRouter(router, server)


def _tracer(options: RouterOptions, stack: contextlib.AsyncExitStack) -> Tracer:
    """A tracer into the recording, if there is to be one."""
    if options.record is None:
        return Tracer(COMPONENT, None)
    unix_ns, monotonic_ns = WallClock.anchor()
    anchor = ClockAnchor(component=COMPONENT, pid=os.getpid(), unix_ns=unix_ns, monotonic_ns=monotonic_ns)
    sink = stack.enter_context(FileSink(options.record, Header(settings=options.public(), anchors=(anchor,))))
    trace = Tracer(COMPONENT, sink)
    body = ProcessStarted(
        component=COMPONENT, pid=os.getpid(), mode="processes", unix_ns=unix_ns, monotonic_ns=monotonic_ns
    )
    trace.emit(body)
    return trace
