"""Prometheus metrics from events, under SGLang's names, types and labels (`names.py`).

Each scrape folds the events that came since the last one. Where SGLang refreshes its gauges every 40th
decode, these are those of the newest event.

Imports: events, recording, observe.series.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sgviz.events.schema import (
    AdmitOk,
    BatchFinished,
    BatchPlanned,
    ChunkSent,
    Event,
    GenerationContinued,
    GenerationPaused,
    GrammarQueued,
    GrammarReady,
    LoopIdle,
    OutputReceived,
    PoolReturned,
    QueueEntered,
    Reason,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    SessionClosed,
    SessionOpened,
    TextEmitted,
    TokensSampled,
    TraceDropped,
)
from sgviz.events.time_stats import stages
from sgviz.observe.names import HIT_SOURCES
from sgviz.observe.series import Labels, Series
from sgviz.recording.engine_fold import EngineFold
from sgviz.recording.requests import Requests, RequestState

RATE_WINDOW_NS = 10_000_000_000
QUIET_NS = 30_000_000_000
HIT_WINDOW_NS = 15_000_000_000
SLOT_BYTES = 4
MAX_CALLS = 16_384  # more than can be under way
SCHEDULER_COMPONENT = "scheduler"


class Metrics:
    """One engine's metrics with a registry of their own.

    Args:
        model_name: label of every series. custom: labels that requests may bring (`request.received`).
    """

    def __init__(self, model_name: str, custom: Sequence[str] = ()) -> None:
        self.series = Series(model_name, custom)
        self._custom = tuple(custom)
        self._engine = EngineFold()
        self._requests = Requests()
        self._last_token: dict[str, int] = {}
        self._retracted: dict[str, None] = {}
        self._compiling: dict[str, None] = {}
        self._calls: dict[str, tuple[int, str, Labels]] = {}  # by rid: when it came, the function, its labels
        self._streaming: dict[str, None] = {}
        self._paused = 0
        self._decoded: deque[tuple[int, int]] = deque()
        self._hits: deque[tuple[int, int, int]] = deque()
        self._busy: deque[tuple[int, int]] = deque()
        self._idle_since = 0
        self._graph = False
        self._decode_tokens = 0
        self._handlers = self._make_handlers()

    def text(self) -> bytes:
        """The exposition format."""
        self._set_gauges()
        return self.series.text()

    def fold(self, events: Iterable[Event]) -> None:
        """Count further events (in the order of time)."""
        for event in events:
            self._engine.apply(event)
            handler = self._handlers.get(type(event.body))
            if handler is not None:
                handler(event, event.body)

    def lost(self, count: int) -> None:
        """Events that fell out of the ring before they were folded."""
        self.series.count("trace_dropped_events", count)

    def _make_handlers(self) -> dict[type, Callable[[Event, Any], None]]:
        requests = self._requests
        return {
            RequestReceived: self._on_received,
            RequestConverted: requests.converted,
            RequestTokenized: requests.tokenized,
            RequestDispatched: requests.dispatched,
            GrammarQueued: self._on_grammar_queued,
            GrammarReady: self._on_grammar_ready,
            QueueEntered: self._on_queued,
            AdmitOk: self._on_admitted,
            BatchPlanned: self._on_planned,
            BatchFinished: self._on_batch_finished,
            TokensSampled: self._on_sampled,
            RequestRetracted: self._on_retracted,
            PoolReturned: self._on_returned,
            LoopIdle: self._on_idle,
            TextEmitted: requests.emitted,
            OutputReceived: self._on_output,
            RequestFinished: self._on_finished,
            RequestAborted: self._on_aborted,
            ChunkSent: requests.chunk_sent,
            ResponseFinished: self._on_response,
            GenerationPaused: self._on_paused,
            GenerationContinued: self._on_continued,
            SessionOpened: self._on_session,
            SessionClosed: lambda event, body: self._streaming.pop(body.session_id, None),
            TraceDropped: lambda event, body: self.lost(body.count),
        }

    # ------------------------------------------------------------ scheduler

    def _on_paused(self, event: Event, body: GenerationPaused) -> None:
        if event.component == SCHEDULER_COMPONENT:
            self._paused = body.requests

    def _on_continued(self, event: Event, body: GenerationContinued) -> None:
        if event.component == SCHEDULER_COMPONENT:
            self._paused = 0

    def _on_session(self, event: Event, body: SessionOpened) -> None:
        if body.streaming:
            self._streaming[body.session_id] = None

    def _on_queued(self, event: Event, body: QueueEntered) -> None:
        self._requests.queued(event, body)
        if self._idle_since:
            until = body.received_ns or event.t
            self.series.count("scheduler_idle_seconds", max(0, until - self._idle_since) / 1e9)
            self._idle_since = 0
        probes = self._requests.probes
        while len(probes) > 2:  # no event says that one is over; events of the one before may still come
            self._forget(next(iter(probes)))

    def _on_grammar_queued(self, event: Event, body: GrammarQueued) -> None:
        self._requests.grammar_queued(event, body)
        self._compiling[body.rid] = None

    def _on_grammar_ready(self, event: Event, body: GrammarReady) -> None:
        self._requests.grammar_ready(event, body)
        self._compiling.pop(body.rid, None)
        series = self.series
        series.count("num_grammar", 1)
        series.count("num_grammar_cache_hit", int(body.hit))
        if body.compile_ns:
            series.observe("grammar_compilation_time_seconds", body.compile_ns / 1e9)
        if not body.error:
            series.count("num_so_requests", 1, self._labels(self._requests.of(body.rid)))

    def _on_idle(self, event: Event, body: LoopIdle) -> None:
        self._idle_since = event.t

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        begins = bool(body.need or body.have)  # else it is a further chunk, whose prefix is its own
        found = body.prefix if begins else 0
        self.series.count("realtime_tokens", body.extend, mode="prefill_compute")
        self.series.count("realtime_tokens", found, mode="prefill_cache")
        state = self._requests.by_rid.get(body.rid)
        if state is not None and state.retractions:
            return
        self.series.count("prefill_effective_tokens", body.extend, mode="input")
        for source in HIT_SOURCES:
            self.series.count("prefill_effective_tokens", found if source == "device_hit" else 0, mode=source)
        self._hits.append((event.t, found, found + body.extend))

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        by_rid = self._requests.by_rid
        waited = [state for rid in body.rids if (state := by_rid.get(rid)) is not None and state.queued_at]
        firsts = [state for state in waited if not state.stats.forward_entry]
        self._requests.planned(event, body)
        if body.mode == "decode":
            self._decode_tokens = sum(body.prefix_lens) + sum(body.extend_lens)
        for state in firsts:
            self.series.observe("queue_time_seconds", state.stats.queue_ns / 1e9)
        for state in waited:
            self._retracted.pop(state.rid, None)

    def _on_batch_finished(self, event: Event, body: BatchFinished) -> None:
        plan = self._engine.in_flight.get(body.bid)
        category = plan.mode if plan is not None else "unknown"
        spent = max(0, body.end_ns - body.start_ns)
        self.series.count("forward_execution_seconds", spent / 1e9, category=category)
        self._busy.append((event.t, spent))
        self._graph = body.can_run_cuda_graph
        kind = "decode" if category == "decode" else "prefill"
        self.series.count("cuda_graph_passes", 1, mode=f"{kind}_{'cuda_graph' if self._graph else 'none'}")

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        self._requests.sampled(event, body)
        self._decoded.append((event.t, len(body.rids)))
        self.series.count("realtime_tokens", len(body.rids), mode="decode")

    def _on_retracted(self, event: Event, body: RequestRetracted) -> None:
        self._requests.retracted(event, body)
        self._retracted[body.rid] = None
        self.series.count("num_retracted_requests", 1)
        self.series.count("num_retracted_input_tokens", self._requests.of(body.rid).prompt_tokens or 0)
        self.series.count("num_retracted_output_tokens", body.output_tokens)

    def _on_returned(self, event: Event, body: PoolReturned) -> None:
        if body.why == "evict":
            self.series.count("evicted_tokens", len(body.slots) // SLOT_BYTES)

    # ------------------------------------------------------------ tokenizer manager and http

    def _on_output(self, event: Event, body: OutputReceived) -> None:
        for rid, tokens in zip(body.rids, body.tokens):
            state = self._requests.by_rid.get(rid)
            if state is None or not tokens:
                continue
            before, self._last_token[rid] = self._last_token.get(rid), event.t
            labels = self._labels(state)
            if before is None:
                waited = (event.t - (state.stats.created or event.t)) / 1e9
                self.series.observe("time_to_first_token_seconds", waited, labels, is_streaming=_flag(state))
            else:
                for _ in range(tokens):
                    gap = (event.t - before) / 1e9 / tokens
                    self.series.observe("inter_token_latency_seconds", gap, labels)
        self._requests.output_received(event, body)

    def _on_finished(self, event: Event, body: RequestFinished) -> None:
        self._requests.finished(event, body)
        state, series = self._requests.by_rid[body.rid], self.series
        labels = self._labels(state)
        series.count("num_requests", 1, labels, is_streaming=_flag(state))
        series.count("prompt_tokens", body.prompt_tokens, labels)
        series.count("generation_tokens", body.completion_tokens, labels)
        series.count("cached_tokens", body.cached_tokens, labels, cache_source="device")
        series.observe("prompt_tokens_histogram", body.prompt_tokens, labels)
        series.observe("uncached_prompt_tokens_histogram", body.prompt_tokens - body.cached_tokens, labels)
        series.observe("generation_tokens_histogram", body.completion_tokens, labels)
        series.observe(
            "e2e_request_latency_seconds", (event.t - (state.stats.created or event.t)) / 1e9, labels
        )
        if body.completion_tokens > 1 and state.stats.first_token:
            each = (event.t - state.stats.first_token) / 1e9 / (body.completion_tokens - 1)
            series.observe("request_time_per_output_token_seconds", each, labels)
        if body.reason == "abort":
            series.count("num_aborted_requests", 1, labels)
        for stage in stages(state.stats):
            series.observe("per_stage_req_latency_seconds", stage.duration_ns / 1e9, stage=stage.name)
        self._forget(body.rid)

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        if body.rid in self._requests.by_rid:
            self._requests.aborted(event, body)
        if body.where == "grammar":
            self.series.count("num_grammar_aborted", 1)
            late = body.reason is Reason.GRAMMAR and body.rid in self._compiling
            self.series.count("num_grammar_timeout", int(late))
            self._compiling.pop(body.rid, None)

    def _on_received(self, event: Event, body: RequestReceived) -> None:
        self._requests.received(event, body)
        self._calls[body.rid] = (event.t, body.path.strip("/").replace("/", "_"), self._allowed(body))
        while len(self._calls) > MAX_CALLS:  # whose end was lost, or came while no events were emitted
            del self._calls[next(iter(self._calls))]

    def _on_response(self, event: Event, body: ResponseFinished) -> None:
        """What is still known then was refused before it was dispatched, or lived on as its samples."""
        if (call := self._calls.pop(body.rid, None)) is not None:
            came, name, labels = call
            self.series.observe("func_latency_seconds", (event.t - came) / 1e9, labels, name=name)
        state = self._requests.by_rid.get(body.rid)
        if state is not None and (state.children or not state.stats.api_server_dispatch):
            self._forget(body.rid)

    def _labels(self, state: RequestState) -> Labels:
        """The custom labels that the request brought (a sample: its parent), of those that are allowed."""
        came = state.marks.get("request.received")
        if not self._custom or came is None or not isinstance(came.body, RequestReceived):
            return {}
        return self._allowed(came.body)

    def _allowed(self, body: RequestReceived) -> Labels:
        return {name: value for name, value in body.labels if name in self._custom}

    def _forget(self, rid: str) -> None:
        """A finished request is counted; what is kept does not grow with the run."""
        self._requests.by_rid.pop(rid, None)
        self._requests.probes.pop(rid, None)
        self._requests.doubles.pop(rid, None)
        self._last_token.pop(rid, None)
        self._retracted.pop(rid, None)

    # ------------------------------------------------------------ gauges

    def _set_gauges(self) -> None:
        engine, ledger = self._engine, self._engine.ledger
        used = ledger.protected + ledger.private_total
        values: dict[str, float] = {
            "num_running_reqs": len(engine.running),
            "num_queue_reqs": len(engine.waiting),
            "num_grammar_queue_reqs": len(self._compiling),
            "num_paused_reqs": self._paused,
            "num_streaming_sessions": len(self._streaming),
            "num_retracted_reqs": len(self._retracted),
            "gen_throughput": self._throughput(),
            "cache_hit_rate": self._hit_rate(),
            "decode_sum_seq_lens": self._decode_tokens if engine.running else 0,
            "new_token_ratio": engine.ratio,
            "fwd_occupancy": self._occupancy(),
            "is_cuda_graph": self._graph,
            "token_usage": used / ledger.total if ledger.total else 0.0,
            "full_token_usage": used / ledger.total if ledger.total else 0.0,
            "num_used_tokens": used,
            "kv_available_tokens": ledger.free,
            "kv_evictable_tokens": ledger.evictable,
            "kv_used_tokens": used,
            "max_total_num_tokens": ledger.total,
            "page_size": ledger.page_size,
            "num_pages": ledger.total // ledger.page_size,
            "context_len": engine.configured.context_len if engine.configured else 0,
        }
        for name, value in values.items():
            self.series.set(name, value)

    def _throughput(self) -> float:
        now = self._engine.t
        while self._decoded and self._decoded[0][0] < now - RATE_WINDOW_NS:
            self._decoded.popleft()
        if not self._decoded or now - self._decoded[-1][0] > QUIET_NS:
            return 0.0
        span = max(now - self._decoded[0][0], 1)
        return sum(count for _, count in self._decoded) / (span / 1e9)

    def _occupancy(self) -> float:
        now = self._engine.t
        while self._busy and self._busy[0][0] < now - RATE_WINDOW_NS:
            self._busy.popleft()
        if not self._busy:
            return 0.0
        first_t, first_ns = self._busy[0]
        span = max(now - first_t + first_ns, 1)
        return min(100.0, 100 * sum(spent for _, spent in self._busy) / span)

    def _hit_rate(self) -> float:
        while self._hits and self._hits[0][0] < self._engine.t - HIT_WINDOW_NS:
            self._hits.popleft()
        total = sum(tokens for *_, tokens in self._hits)
        return sum(cached for _, cached, _ in self._hits) / total if total else 0.0


def _flag(state: RequestState) -> str:
    return "true" if state.stream else "false"
