"""Side: what the rest of a scheduler asks of its side of a prefill/decode pair, and what both sides share.

A health probe has no other side: it runs as on any server. Imports: batch, disaggregation (protocol), messages, events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.batch.transfer import Bootstrap
from sgviz.disaggregation.protocol import TransferStats
from sgviz.events import schema
from sgviz.messages import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.state import SchedulerState


class HandOver(Protocol):
    """Told of prompts that are computed here and decoded elsewhere."""

    def computed(self, req: Req, end: int) -> None:
        """A chunk that ends at `end` is computed, and the prompt goes on."""
        ...

    def prefilled(self, req: Req) -> None:
        """The whole prompt is computed, and the first token is there."""
        ...


class Side(Protocol):
    """One side of a pair."""

    @property
    def busy(self) -> bool:
        """Something is awaited that no message to the scheduler tells of: look again soon."""
        ...

    @property
    def wait_ms(self) -> int:
        """How soon, if nothing wakes the wait."""
        ...

    def meet(self, req: Req, message: TokenizedGenerateReqInput) -> None:
        """Begin to look for the other side, where `message` says.

        Raises BadRequest if the room is another request's.
        """
        ...

    def turn_away(self, message: TokenizedGenerateReqInput, why: str, status: int) -> None:
        """A request is refused: its other side must know, and answer the same."""
        ...

    def enter(self, req: Req) -> None:
        """It may begin: into the first of the queues."""
        ...

    def look(self) -> None:
        """Move on whom the transfers let; never waits."""
        ...

    def before_launch(self, batch: ScheduleBatch) -> None:
        """`batch` has rows and slots, and is about to run."""
        ...

    def while_running(self, done: Callable[[], bool]) -> None:
        """A forward is waited for until `done`: let what travels go on."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hall:
    """What both sides work with.

    Args:
        name: prefill or decode. default_port: of the bootstrap server, where a request names none.
        announce: tells that a request is in the waiting queue, at this place of it.
    """

    name: str
    default_port: int
    state: SchedulerState
    ender: RequestEnder
    announce: Callable[[Req, int], None]

    def bootstrap(self, message: TokenizedGenerateReqInput) -> Bootstrap | None:
        """Where the request is to meet its other side; None if it does not say."""
        host, room = message.bootstrap_host, message.bootstrap_room
        if host is None or room is None:
            return None
        port = self.default_port if message.bootstrap_port is None else message.bootstrap_port
        return Bootstrap(host, port, room, message.disagg_prefill_dp_rank)

    def queue(self, req: Req) -> None:
        """Into the bootstrap queue."""
        state, bootstrap = self.state, req.bootstrap
        assert bootstrap is not None
        state.disagg.bootstrap.append(req)
        if state.trace.on:
            body = schema.DisaggQueued(
                rid=req.rid, side=self.name, room=bootstrap.room, peer=bootstrap.address,
                prompt_tokens=len(req.origin_input_ids), received_ns=req.time_stats.scheduler_recv,
            )  # fmt: skip
            state.trace.emit(body)

    def met(self, req: Req, *, prefix: int = 0, rank: int = 0) -> None:
        """Both sides know of each other."""
        bootstrap = req.bootstrap
        assert bootstrap is not None
        if self.state.trace.on:
            body = schema.DisaggBootstrapped(
                rid=req.rid, side=self.name, room=bootstrap.room, peer=bootstrap.address,
                decode_prefix_len=prefix, prefill_dp_rank=rank,
            )  # fmt: skip
            self.state.trace.emit(body)

    def transferred(self, req: Req, stats: TransferStats, failure: str = "") -> None:
        """The transfer ended, in a failure if there is one."""
        bootstrap = req.bootstrap
        assert bootstrap is not None
        if self.state.trace.on:
            body = schema.DisaggTransferred(
                rid=req.rid, side=self.name, room=bootstrap.room, ok=not failure, why=failure,
                bytes=stats.bytes, pieces=stats.pieces, start_ns=stats.start_ns, end_ns=stats.end_ns,
                backend=stats.backend,
            )  # fmt: skip
            self.state.trace.emit(body)


def is_probe(rid: str) -> bool:
    """A health probe of the server itself."""
    return rid.startswith(HEALTH_CHECK_PREFIX)


def one_side_refusal(message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> str:
    """Why a server with one side only cannot take the request; "" if it can."""
    if is_probe(message.rid):
        return ""
    if isinstance(message, TokenizedEmbeddingReqInput):
        return "a prefill or decode server makes no vectors; ask a server with disaggregation_mode null"
    if message.session_params is not None:
        return "sessions are not kept by prefill and decode servers; send the whole prompt"
    for name in ("bootstrap_room", "bootstrap_host"):
        if getattr(message, name) is None:
            return f"a request to a prefill or decode server needs {name}; send it to the router, which gives it one"
    return ""
