"""What a router did with a request: each attempt with a pair of servers, which of them failed, and by whose fault.

Mirrors nothing of SGLang, whose routers keep no record. Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from sgviz.events.schema import ChunkSent, Event, RouterFailed, RouterPaired
from sgviz.recording.explanation import Cause, Explanation, Part
from sgviz.recording.requests import Requests

ROUTER = "router"
BLAMED = MappingProxyType({
    "prefill": "by the fault of the prefill server", "decode": "by the fault of the decode server",
    "both": "by the fault of both servers", "request": "as a server refused what was asked",
    "unknown": "and whose fault it is the router cannot know",
})  # fmt: skip
ELSEWHERE = "what these two did of it, their own recordings tell"
ENDING = "both calls are ended, and another pair is chosen"


@dataclass(slots=True)
class Attempt:
    """One pair that a request was given at `t`; it `failed` at `ended` (None and 0: it did not)."""

    t: int
    body: RouterPaired
    ended: int = 0
    failed: RouterFailed | None = None

    @property
    def words(self) -> str:
        """Who, by what, and how it failed."""
        body, failed = self.body, self.failed
        number = f"attempt {body.attempt}, " if body.attempt > 1 or failed is not None else ""
        pair = f"{number}to {body.prefill} and {body.decode} by {body.policy}"
        return pair if failed is None else f"{pair}, {self.failure}"

    @property
    def failure(self) -> str:
        """How it failed, "" if it did not."""
        failed = self.failed
        if failed is None:
            return ""
        what = "broke off in the middle of its answer" if failed.began else "failed"
        return f"{what}, {BLAMED.get(failed.side, failed.side)}: {failed.why}"

    @property
    def holds(self) -> dict[str, str]:
        """For the journey."""
        body, failed = self.body, self.failed
        facts = {"bootstrap_room": str(body.room), "prefill": body.prefill, "decode": body.decode}
        if body.attempt > 1 or failed is not None:
            facts["attempt"] = str(body.attempt)
        return facts if failed is None else {**facts, "failed": f"{failed.side}: {failed.why}"}


@dataclass(slots=True)
class Route:
    """One request's way: its attempts, its first and last event, when text was first passed on (monotonic ns)."""

    start: int
    end: int
    first: int = 0
    attempts: list[Attempt] = field(default_factory=list)

    def parts(self, until: int) -> Iterator[Part]:
        """From its arrival up to `until`, when others begin to tell."""
        behind = [attempt.t for attempt in self.attempts[1:]]
        for attempt, following in zip(self.attempts, [*behind, until]):
            end = min(following, until)
            if attempt.failed is not None and attempt.ended <= end:
                yield from _part(attempt.t, attempt.ended, Cause.ATTEMPT, attempt.words)
                yield from _part(attempt.ended, end, Cause.ATTEMPT, ENDING)
            else:
                yield from _part(attempt.t, end, Cause.ROUTE, attempt.words)

    def explanation(self, rid: str) -> Explanation:
        """Where nothing but the router was recorded: until its last pair was chosen, or had failed."""
        parts = list(self.parts(self.end))
        if self.attempts and (last := self.attempts[-1]).failed is None:
            parts.append(Part(self.end, 0, Cause.ROUTE, (), f"{last.words}; {ELSEWHERE}", 0, ROUTER))
        return Explanation(rid, self.end - self.start, tuple(parts))


class Routes:
    """Those of a router's recording, by rid; a rid that was used again has several. `shift` is added to all times."""

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift
        self._by_rid: dict[str, list[Route]] = {}

    def read(self, events: Iterable[Event]) -> Routes:
        """Take in events, in order; returns itself."""
        for event in events:
            if rid := getattr(event.body, "rid", ""):
                self._add(rid, event.t + self._shift, event)
        return self

    def of(self, rid: str, start: int = 0) -> Route | None:
        """The one that began at `start`; 0: the last of that name."""
        routes = self._by_rid.get(rid, [])
        return next((route for route in reversed(routes) if start in (0, route.start)), None)

    @property
    def start(self) -> int | None:
        """The earliest event of a request."""
        return min((routes[0].start for routes in self._by_rid.values()), default=None)

    def _add(self, rid: str, t: int, event: Event) -> None:
        body, routes = event.body, self._by_rid.setdefault(rid, [])
        if not routes or (isinstance(body, RouterPaired) and body.attempt == 1 and routes[-1].attempts):
            routes.append(Route(t, t))
        route = routes[-1]
        route.end = t
        if isinstance(body, RouterPaired):
            route.attempts.append(Attempt(t, body))
        elif isinstance(body, RouterFailed):
            _fail(route, t, body)
        elif isinstance(body, ChunkSent) and body.chars and not route.first:
            route.first = t


def paired(requests: Requests, event: Event, body: RouterPaired) -> None:
    """A router's recording knows the request by this alone."""
    if body.attempt == 1:
        requests.make_place(body.rid)
    state = requests.of(body.rid)
    state.stats.created = state.stats.created or event.t
    state.mark(event)


def _fail(route: Route, t: int, body: RouterFailed) -> None:
    for attempt in reversed(route.attempts):
        if attempt.body.room == body.room and attempt.failed is None:
            attempt.ended, attempt.failed = t, body
            return


def _part(start: int, end: int, cause: Cause, words: str) -> Iterator[Part]:
    if end > start:
        yield Part(start, end - start, cause, (), words, 0, ROUTER)
