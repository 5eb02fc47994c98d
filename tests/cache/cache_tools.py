"""What the cache's tests share: a request that holds KV, and a tracer whose events can be read."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.cache.req_kv import ReqKvInfo
from sgviz.events.clock import VirtualClock
from sgviz.events.schema import AnyBody, Event
from sgviz.events.tracer import Tracer


@dataclass(eq=False)
class Request:
    """The least that the cache knows of a request, and the ids whose KV it has."""

    rid: str
    ids: list[int]
    namespace: str = ""
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)


class ListSink:
    """Keeps every event."""

    def __init__(self) -> None:
        self.bodies: list[AnyBody] = []

    def put(self, event: Event) -> None:
        self.bodies.append(event.body)

    def flush(self) -> None:
        pass

    def drain(self) -> list[AnyBody]:
        bodies, self.bodies = self.bodies, []
        return bodies


def listening() -> tuple[Tracer, ListSink]:
    sink = ListSink()
    return Tracer("scheduler", sink, VirtualClock()), sink


def silent() -> Tracer:
    return Tracer("scheduler", None, VirtualClock())
