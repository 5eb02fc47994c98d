"""What the events say about each request: its stamps, phases, counts and the events that mark its way.

The stamps fill the same `TimeStats` that the engine carries in its messages, so both are read alike.
A phase is what the request is doing: they lie end to end from its arrival to its last event.

Imports: events, recording.families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sgviz.events.schema import (
    BatchFinished,
    BatchPlanned,
    BatchProcessed,
    ChunkSent,
    EmbeddingsPooled,
    Event,
    GrammarQueued,
    GrammarReady,
    OutputReceived,
    OutputStreamed,
    QueueEntered,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRefused,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    SessionTurn,
    TextEmitted,
    TokensSampled,
)
from sgviz.events.time_stats import TimeStats
from sgviz.recording.families import parent_name

_ABORT_GOES_ON = frozenset({"tokenizer", "running"})  # the scheduler still has to end the request itself


class PhaseName(StrEnum):
    """What a request is doing."""

    TOKENIZE = "tokenize"
    BOOTSTRAP = "bootstrap"
    PREALLOC = "prealloc"
    TRANSFER = "transfer"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    OUTPUT = "output"


@dataclass(slots=True)
class Phase:
    """One stretch of a request's life; `end` is 0 while it lasts (monotonic ns)."""

    name: PhaseName
    start: int
    end: int = 0


@dataclass(slots=True)
class RequestState:
    """One request as folded so far.

    Attributes:
        marks: first event of each kind that the journey shows, by kind.
        bids: batches it was a member of, in order. sampled: tokens appended to it.
        cached_tokens: prefix found at the first admission. end: stamp of its last event, 0 while it lives.
        refusal: the event that says why it was refused before the scheduler heard of it, at `refused_at`.
        grammar_at: when it began to wait for its grammar (0: it did not). grammar: what was said of that.
        embedding: it wants a vector and no token. side: prefill or decode, on a server of one side.
        parent: the request it is one sample or prompt of. children: those it fanned out into; then it has
            no life of its own in the scheduler.
    """

    rid: str
    stats: TimeStats = field(default_factory=TimeStats)
    marks: dict[str, Event] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    bids: list[int] = field(default_factory=list)
    stream: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    sampled: int = 0
    finish_reason: str = ""
    matched: str = ""
    abort: str = ""
    status: int | None = None
    refusal: RequestRefused | None = None
    refused_at: int = 0
    retractions: int = 0
    queued_at: int = 0
    embedding: bool = False
    side: str = ""
    grammar_at: int = 0
    grammar: str = ""
    end: int = 0
    parent: str = ""
    children: list[str] = field(default_factory=list)

    def mark(self, event: Event) -> None:
        self.marks.setdefault(event.kind, event)

    def enter(self, name: PhaseName, t: int) -> None:
        """Begin a phase; the one before ends here."""
        self.leave(t)
        self.phases.append(Phase(name, t))

    def leave(self, t: int) -> None:
        if self.phases and not self.phases[-1].end:
            self.phases[-1].end = t

    @property
    def phase(self) -> PhaseName | None:
        return self.phases[-1].name if self.phases else None


@dataclass(slots=True)
class Requests:
    """All requests by rid, in the order of their first event; a rid used again leaves `rid#n` behind.

    Attributes:
        probes: the server's own health checks by rid; they take part in batches but are nobody's requests.
        doubles: by rid a request that came while another of that name was under way; once it is refused for that
            it is `rid#n` in `by_rid`.
    """

    by_rid: dict[str, RequestState] = field(default_factory=dict)
    probes: dict[str, RequestState] = field(default_factory=dict)
    doubles: dict[str, RequestState] = field(default_factory=dict)

    def of(self, rid: str) -> RequestState:
        found = self.by_rid.get(rid) or self.probes.get(rid)
        if found is None:
            found = self.by_rid[rid] = RequestState(rid)
        return found

    def begin(self, rid: str, t: int) -> RequestState:
        """The request `rid`, created at `t` unless it is there already; a finished one makes place."""
        old = self.by_rid.get(rid)
        if old is not None and (old.stats.finished or old.refusal is not None):
            self.make_place(rid)
        state = self.of(rid)
        if not state.stats.created:
            state.stats.created = t
            state.enter(PhaseName.TOKENIZE, t)
        return state

    def make_place(self, rid: str) -> None:
        """Whoever has the name becomes `rid#n`."""
        if (old := self.by_rid.get(rid)) is not None:
            old.rid = self._past_name(rid)
            self.by_rid[old.rid] = self.by_rid.pop(rid)

    def _past_name(self, rid: str) -> str:
        number = 1 + sum(1 for name in self.by_rid if name.startswith(f"{rid}#"))
        return f"{rid}#{number}"

    def _arriving(self, rid: str, t: int) -> RequestState:
        """The request that comes by this name, which is another one while that of the name is under way."""
        old = self.by_rid.get(rid)
        if old is None or old.end or old.stats.finished or not old.stats.tokenize_finish:
            return self.begin(rid, t)
        double = self.doubles.get(rid)
        if double is None:
            double = self.doubles[rid] = RequestState(rid, TimeStats(created=t))
            double.enter(PhaseName.TOKENIZE, t)
        return double

    def _adopt(self, rid: str) -> None:
        """A rid that serving never saw is a prompt or sample of one that it saw, if the name says so."""
        parent = self._parent_of(rid)
        if parent is None or parent.end:
            return
        child = self.begin(rid, parent.stats.created)
        child.stats.tokenize_start = parent.stats.tokenize_start
        child.parent, child.stream, child.marks = parent.rid, parent.stream, dict(parent.marks)
        parent.children.append(rid)

    def _parent_of(self, rid: str) -> RequestState | None:
        name = parent_name(rid, self.by_rid)
        return None if name is None else self.by_rid[name]

    # ------------------------------------------------------------ http and tokenizer manager

    def received(self, event: Event, body: RequestReceived) -> None:
        self.doubles.pop(body.rid, None)
        state = self._arriving(body.rid, event.t)
        state.stream = body.stream
        state.mark(event)

    def converted(self, event: Event, body: RequestConverted) -> None:
        state = self.doubles.get(body.rid) or self.begin(body.rid, event.t)
        state.stats.tokenize_start = state.stats.tokenize_start or event.t
        state.embedding = body.embedding
        if body.prompt_kind == "input_ids" and state.prompt_tokens is None:
            state.prompt_tokens = body.size
        state.mark(event)

    def tokenized(self, event: Event, body: RequestTokenized) -> None:
        if body.rid not in self.by_rid:
            self._adopt(body.rid)
        state = self.begin(body.rid, event.t)
        state.embedding = body.embedding
        state.stats.tokenize_finish = event.t
        state.prompt_tokens = body.prompt_tokens
        state.mark(event)

    def dispatched(self, event: Event, body: RequestDispatched) -> None:
        self.of(body.rid).stats.api_server_dispatch = event.t

    def output_received(self, event: Event, body: OutputReceived) -> None:
        find = self.by_rid.get
        for rid, tokens in zip(body.rids, body.tokens):
            stats = (find(rid) or self.of(rid)).stats
            if tokens and not stats.first_token:
                stats.first_token = event.t

    def finished(self, event: Event, body: RequestFinished) -> None:
        state = self.of(body.rid)
        state.stats.finished = event.t
        state.finish_reason, state.matched = body.reason, body.matched
        state.prompt_tokens = body.prompt_tokens or state.prompt_tokens  # 0: refused before they were counted
        state.completion_tokens = body.completion_tokens
        state.cached_tokens = body.cached_tokens
        self._end(state, event.t)

    def refused(self, event: Event, body: RequestRefused) -> None:
        if body.rid not in self.by_rid:
            self._adopt(body.rid)
        state = self._arriving(body.rid, event.t)
        if self.by_rid.get(body.rid) is not state:
            state.rid = self._past_name(body.rid)
            self.by_rid[state.rid] = state
        state.refusal, state.refused_at = body, event.t
        state.finish_reason, state.abort = "abort", f"{body.where}: {body.why}"
        state.status = body.status
        if body.prompt_tokens is not None:
            state.prompt_tokens = body.prompt_tokens
        self._end(state, event.t)

    def aborted(self, event: Event, body: RequestAborted) -> None:
        if body.rid not in self.by_rid:
            self._adopt(body.rid)  # it was refused before it had tokens
        state = self.of(body.rid)
        state.abort = state.abort or f"{body.where}: {body.why}"
        if body.where not in _ABORT_GOES_ON:
            self.complete(state, event.t)

    def chunk_sent(self, event: Event, body: ChunkSent) -> None:
        state = self.of(body.rid)
        if body.part == "error":
            state = self.doubles.get(body.rid, state)
        if (body.chars or body.part == "body") and "chunk.sent" not in (marks := state.marks):
            marks["chunk.sent"] = event

    def response_finished(self, event: Event, body: ResponseFinished) -> None:
        double = self.doubles.get(body.rid)
        state = self.of(body.rid)
        if double is not None and double.refusal is not None:
            state = self.doubles.pop(body.rid)
        state.stats.response_sent = event.t
        state.status = body.status
        self._end(state, event.t)

    @staticmethod
    def _end(state: RequestState, t: int) -> None:
        state.end = max(state.end, t)
        if state.phases:
            state.phases[-1].end = state.end

    # ------------------------------------------------------------ scheduler

    def session_turn(self, event: Event, body: SessionTurn) -> None:
        self.of(body.rid).mark(event)

    def grammar_queued(self, event: Event, body: GrammarQueued) -> None:
        state = self.of(body.rid)
        state.grammar_at, state.stats.scheduler_recv = event.t, body.received_ns
        state.grammar = f"{body.grammar} of {body.chars:,} characters"

    def grammar_ready(self, event: Event, body: GrammarReady) -> None:
        state = self.of(body.rid)
        state.stats.scheduler_recv = body.received_ns
        took = "from the cache" if body.hit else f"compiled in {body.compile_ns / 1e6:.2f} ms"
        state.grammar = f"{body.grammar} of {body.chars:,} characters, {body.error or took}"

    def queued(self, event: Event, body: QueueEntered) -> None:
        if body.probe:
            self.probes.setdefault(body.rid, RequestState(body.rid))
        state = self.of(body.rid)
        state.queued_at = event.t
        state.enter(PhaseName.QUEUE, event.t)
        if body.again:
            return
        stats = state.stats
        state.embedding = body.embedding
        # without a stamp of its own the way through the socket ends where the queue begins
        stats.scheduler_recv = body.received_ns or event.t
        stats.wait_queue_entry = event.t
        state.prompt_tokens = body.prompt_tokens
        state.stream = body.stream if state.stream is None else state.stream
        state.mark(event)

    def planned(self, event: Event, body: BatchPlanned) -> None:
        find, bid = self.by_rid.get, body.bid
        for rid in body.rids:
            state = find(rid) or self.of(rid)
            state.bids.append(bid)
            if state.queued_at:
                state.stats.queue_ns += event.t - state.queued_at
                state.queued_at = 0
                prebuilt = body.mode == "prebuilt"  # its prompt was computed elsewhere
                state.enter(PhaseName.DECODE if prebuilt else PhaseName.PREFILL, event.t)
            if not state.stats.forward_entry:
                state.stats.forward_entry = event.t
                state.mark(event)

    def batch_finished(self, event: Event, body: BatchFinished, rids: tuple[str, ...]) -> None:
        find, bid = self.by_rid.get, body.bid
        for rid in rids:
            state = find(rid) or self.of(rid)
            if state.bids and state.bids[0] == bid:
                state.mark(event)

    def sampled(self, event: Event, body: TokensSampled) -> None:
        find, t = self.by_rid.get, event.t
        for rid in body.rids:
            state = find(rid) or self.of(rid)
            state.sampled += 1
            state.stats.prefill_finished = state.stats.prefill_finished or t
            phases = state.phases
            if phases and phases[-1].name is PhaseName.PREFILL:
                state.enter(PhaseName.TRANSFER if state.side == "prefill" else PhaseName.DECODE, t)

    def pooled(self, event: Event, body: EmbeddingsPooled) -> None:
        for rid in body.rids:
            state = self.of(rid)
            state.stats.prefill_finished = state.stats.prefill_finished or event.t
            state.mark(event)

    def processed(self, event: Event, body: BatchProcessed) -> None:
        for rid in body.finished:
            self.complete(self.of(rid), event.t)

    def retracted(self, event: Event, body: RequestRetracted) -> None:
        self.of(body.rid).retractions += 1

    def streamed(self, event: Event, body: OutputStreamed) -> None:
        find = self.by_rid.get
        for rid, finished in zip(body.rids, body.finished):
            state = find(rid) or self.of(rid)
            state.mark(event)
            if finished:
                state.stats.output_streamed = event.t
                if not state.stats.completion:
                    self.complete(state, event.t)

    @staticmethod
    def complete(state: RequestState, t: int) -> None:
        """Its work in the scheduler is over."""
        stats = state.stats
        stats.completion = min(t, stats.output_streamed or t)
        if stats.forward_entry and not stats.prefill_finished:  # it ended without a token: no decoding
            stats.prefill_finished = stats.completion
        if state.phase is not PhaseName.OUTPUT and not state.end:
            state.enter(PhaseName.OUTPUT, t)

    # ------------------------------------------------------------ detokenizer

    def emitted(self, event: Event, body: TextEmitted) -> None:
        find = self.by_rid.get
        for rid, finished in zip(body.rids, body.finished):
            state = find(rid) or self.of(rid)
            state.mark(event)
            if finished:
                state.stats.detokenized = event.t
