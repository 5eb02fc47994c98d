"""GrammarQueue: requests wait here for their grammars and then enter the waiting queue. Mirrors facts 10.

Compiling happens elsewhere; the loop only looks, once a turn, who is ready. A grammar that is there already costs
no turn; one that cannot be compiled, or not in time, ends its own request with 400, a fault of the backend with 500.
Simplified: one rank, so nothing is agreed on. Imports: batch, grammar, messages, events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgviz.batch.req import Req
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import Reason, schema
from sgviz.grammar import GrammarCompiler, Key, Ticket
from sgviz.messages import FinishReason
from sgviz.scheduler.requests import RequestEnder
from sgviz.scheduler.state import SchedulerState


@dataclass(slots=True)
class _Waiting:
    """A request and its claim, since `since_ns`."""

    req: Req
    ticket: Ticket
    since_ns: int


class GrammarQueue:
    """The requests whose grammars are being compiled.

    Args:
        compiler: None: every request with a grammar is refused.
        timeout_s: seconds a request may wait here.
        enter: takes a request on into the waiting queue.
    """

    def __init__(
        self,
        state: SchedulerState,
        ender: RequestEnder,
        compiler: GrammarCompiler | None,
        timeout_s: float,
        enter: Callable[[Req], None],
    ) -> None:
        self._state = state
        self._ender = ender
        self._compiler = compiler
        self._timeout_ns = round(timeout_s * 1e9)
        self._enter = enter
        self._waiting: list[_Waiting] = []

    def take(self, req: Req) -> None:
        """Send `req` on with its grammar, at once or when that is compiled; without a grammar at once."""
        key = req.sampling_params.grammar_key
        if key is None:
            self._enter(req)
            return
        if self._compiler is None:
            self._fail(
                req, f"{key[0]} needs a grammar backend, and this server has none (grammar_backend none)"
            )
            return
        ticket = self._compiler.ask(Key(*key, req.require_reasoning))
        waiting = _Waiting(req, ticket, self._state.clock.now())
        if waiting.ticket.done:
            self._settle(waiting)
            return
        self._waiting.append(waiting)
        self._state.grammar_queue.append(req)
        if self._state.trace.on:
            body = schema.GrammarQueued(
                rid=req.rid,
                grammar=key[0],
                chars=len(key[1]),
                waiting=len(self._waiting),
                received_ns=req.time_stats.scheduler_recv,
            )
            self._state.trace.emit(body)

    def look(self) -> None:
        """Send on who is ready, end who cannot be helped."""
        if not self._waiting:
            return
        state, now = self._state, self._state.clock.now()
        leaving = [each for each in self._waiting if self._leaves(each, now)]
        if not leaving:
            return
        names = set(map(id, leaving))  # membership only
        self._waiting = [each for each in self._waiting if id(each) not in names]
        state.grammar_queue = [each.req for each in self._waiting]  # `enter` asks whether there is a place
        for each in leaving:
            if each.req.finished:  # aborted
                self._give_back(each)
            elif each.ticket.done:
                self._settle(each)
            else:
                self._give_back(each)
                limit = self._timeout_ns / 1e9
                self._fail(each.req, f"the {each.ticket.key[0]} was not compiled within {limit:g} s")

    def _leaves(self, each: _Waiting, now: int) -> bool:
        return each.req.finished or each.ticket.done or now - each.since_ns >= self._timeout_ns

    def clear_cache(self) -> None:
        """Forget the compiled grammars."""
        if self._compiler is not None:
            self._compiler.clear()

    def _settle(self, waiting: _Waiting) -> None:
        """Its ticket is done: the grammar, or the error of whoever compiled it."""
        req, ticket = waiting.req, waiting.ticket
        self._give_back(waiting)
        try:
            req.grammar = ticket.result().start()
        except SgvizError as error:
            self._tell(req, ticket, error.message)
            self._end(req, error)
            return
        self._tell(req, ticket, "")
        self._enter(req)

    def _give_back(self, waiting: _Waiting) -> None:
        assert self._compiler is not None
        self._compiler.give_back(waiting.ticket)

    def _fail(self, req: Req, message: str) -> None:
        self._end(req, BadRequest(message))

    def _end(self, req: Req, error: SgvizError) -> None:
        message = error.message
        reason = FinishReason(type="abort", message=message, status_code=error.status, err_type=error.type)
        self._ender.drop(req, "grammar", message, reason, cause=Reason.GRAMMAR)

    def _tell(self, req: Req, ticket: Ticket, error: str) -> None:
        if self._state.trace.on:
            kind, text, *_ = ticket.key
            body = schema.GrammarReady(
                rid=req.rid,
                grammar=kind,
                chars=len(text),
                hit=ticket.hit,
                compile_ns=ticket.compile_ns,
                error=error,
                received_ns=req.time_stats.scheduler_recv,
            )
            self._state.trace.emit(body)
