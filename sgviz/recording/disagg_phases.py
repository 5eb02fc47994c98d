"""What the events of a prefill or decode server say about a request: its phases and the marks of its journey.

Imports: events, recording.requests.
"""

from __future__ import annotations

from sgviz.events.schema import (
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    Event,
)
from sgviz.recording.requests import PhaseName, Requests


def queued(requests: Requests, event: Event, body: DisaggQueued) -> None:
    """It came to the scheduler, and its other side is awaited."""
    state = requests.of(body.rid)
    state.side, state.prompt_tokens = body.side, body.prompt_tokens
    state.stats.scheduler_recv = body.received_ns or event.t
    state.enter(PhaseName.BOOTSTRAP, event.t)
    state.mark(event)


def bootstrapped(requests: Requests, event: Event, body: DisaggBootstrapped) -> None:
    """On the prefill side the waiting queue follows at once."""
    if body.side == "decode":
        requests.of(body.rid).enter(PhaseName.PREALLOC, event.t)


def preallocated(requests: Requests, event: Event, body: DisaggPreallocated) -> None:
    """Its KV may come."""
    state = requests.of(body.rid)
    state.enter(PhaseName.TRANSFER, event.t)
    state.mark(event)


def transferred(requests: Requests, event: Event, body: DisaggTransferred) -> None:
    """On the decode side the queue follows at once; on the prefill side it is over."""
    state = requests.of(body.rid)
    state.mark(event)
    if body.side == "prefill" and body.ok:
        state.enter(PhaseName.OUTPUT, event.t)
