"""Prometheus metrics from events, under SGLang's names, types and labels (`names.py`).

Each scrape folds the events that came since the last one. Where SGLang refreshes its gauges every 40th
decode, these are those of the newest event.

Imports: events, recording, observe.series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sgviz.events.schema import (
    AdmitOk,
    BatchFinished,
    BatchPlanned,
    ChunkSent,
    DpChose,
    DpRankChanged,
    EngineConfigured,
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
from sgviz.observe.names import DP_RANK, HIT_SOURCES
from sgviz.observe.rank_state import RankState
from sgviz.observe.series import NONE, Labels, Series
from sgviz.observe.side_metrics import SideMetrics, side_gauges
from sgviz.recording.rank_split import SCHEDULER, rank_of
from sgviz.recording.requests import Requests, RequestState

SLOT_BYTES = 4
MAX_CALLS = 16_384  # more than can be under way
FOR_ALL = (EngineConfigured, RequestAborted)  # what any component may say and a scheduler's state depends on


class Metrics:
    """One engine's metrics with a registry of their own.

    Args:
        model_name: label of every series. custom: labels that requests may bring (`request.received`).
        ranks: the schedulers where there are several; each has gauges and counters of its own, requests are counted
            together. side: prefill or decode, of a server of one side.
    """

    def __init__(
        self, model_name: str, custom: Sequence[str] = (), ranks: Sequence[int] = (), side: str = ""
    ) -> None:
        self.series = Series(model_name, custom, ranks, side)
        self._custom = tuple(custom)
        self._side = SideMetrics(self.series, lambda: self._here) if side else None
        many = {rank: RankState({DP_RANK: str(rank)}, side) for rank in ranks}
        self._ranks = many or {0: RankState(side=side)}
        self._single = None if ranks else self._ranks[0]
        self._here = self._ranks[min(self._ranks)]  # of the scheduler whose event is folded
        self._homes: dict[str, Labels] = {}  # by rid, where there are several
        self._now = 0
        self._requests = Requests()
        self._last_token: dict[str, int] = {}
        self._calls: dict[str, tuple[int, str, Labels]] = {}  # by rid: when it came, the function, its labels
        self._handlers = self._make_handlers()

    def text(self) -> bytes:
        """The exposition format."""
        for state in self._ranks.values():
            values = state.gauges(self._now) | (side_gauges(state) if self._side is not None else {})
            for name, value in values.items():
                self.series.set(name, value, state.label)
        return self.series.text()

    def fold(self, events: Iterable[Event]) -> None:
        """Count further events (in the order of time)."""
        for event in events:
            self._now = event.t
            for state in self._states(event):
                self._here = state
                state.engine.apply(event)
            handler = self._handlers.get(type(event.body))
            if handler is not None:
                handler(event, event.body)

    def _states(self, event: Event) -> Iterable[RankState]:
        """The schedulers whose state an event is of: its own, or those that it names."""
        if self._single is not None:
            return (self._single,)
        rank = event.body.rank if isinstance(event.body, DpRankChanged) else rank_of(event.component)
        if rank is not None:
            return (self._ranks[rank],) if rank in self._ranks else ()
        return self._ranks.values() if isinstance(event.body, FOR_ALL) else ()

    def lost(self, count: int) -> None:
        """Events that fell out of the ring before they were folded."""
        self.series.count("trace_dropped_events", count)

    def _make_handlers(self) -> dict[type, Callable[[Event, Any], None]]:
        requests = self._requests
        return (self._side.handlers() if self._side is not None else {}) | {
            RequestReceived: self._on_received,
            RequestConverted: requests.converted,
            RequestTokenized: requests.tokenized,
            RequestDispatched: requests.dispatched,
            GrammarQueued: self._on_grammar_queued,
            GrammarReady: self._on_grammar_ready,
            DpChose: self._on_chosen,
            DpRankChanged: self._on_rank,
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
            SessionClosed: lambda event, body: self._here.streaming.pop(body.session_id, None),
            TraceDropped: lambda event, body: self.lost(body.count),
        }

    # ------------------------------------------------------------ scheduler

    def _on_chosen(self, event: Event, body: DpChose) -> None:
        if body.rank in self._ranks:
            self._homes[body.rid] = self._ranks[body.rank].label
            while len(self._homes) > MAX_CALLS:  # whose end came before
                del self._homes[next(iter(self._homes))]

    def _on_rank(self, event: Event, body: DpRankChanged) -> None:
        if body.rank in self._ranks:
            self._ranks[body.rank].begin_anew()

    def _on_paused(self, event: Event, body: GenerationPaused) -> None:
        if _of_a_scheduler(event):
            self._here.paused = body.requests

    def _on_continued(self, event: Event, body: GenerationContinued) -> None:
        if _of_a_scheduler(event):
            self._here.paused = 0

    def _on_session(self, event: Event, body: SessionOpened) -> None:
        if body.streaming:
            self._here.streaming[body.session_id] = None

    def _on_queued(self, event: Event, body: QueueEntered) -> None:
        here = self._here
        self._requests.queued(event, body)
        if here.idle_since:
            until = body.received_ns or event.t
            idle = max(0, until - here.idle_since) / 1e9
            self.series.count("scheduler_idle_seconds", idle, here.label)
            here.idle_since = 0
        probes = self._requests.probes
        while len(probes) > 2 * len(self._ranks):  # no event says that one is over, and more of it may come
            self._forget(next(iter(probes)))

    def _on_grammar_queued(self, event: Event, body: GrammarQueued) -> None:
        self._requests.grammar_queued(event, body)
        self._here.compiling[body.rid] = None

    def _on_grammar_ready(self, event: Event, body: GrammarReady) -> None:
        self._requests.grammar_ready(event, body)
        self._here.compiling.pop(body.rid, None)
        series, own = self.series, self._here.label
        series.count("num_grammar", 1, own)
        series.count("num_grammar_cache_hit", int(body.hit), own)
        if body.compile_ns:
            series.observe("grammar_compilation_time_seconds", body.compile_ns / 1e9, own)
        if not body.error:
            series.count("num_so_requests", 1, self._labels(self._requests.of(body.rid)))

    def _on_idle(self, event: Event, body: LoopIdle) -> None:
        self._here.idle_since = event.t

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        series, own = self.series, self._here.label
        begins = bool(body.need or body.have)  # else it is a further chunk, whose prefix is its own
        found = body.prefix if begins else 0
        series.count("realtime_tokens", body.extend, own, mode="prefill_compute")
        series.count("realtime_tokens", found, own, mode="prefill_cache")
        state = self._requests.by_rid.get(body.rid)
        if state is not None and state.retractions:
            return
        series.count("prefill_effective_tokens", body.extend, own, mode="input")
        for source in HIT_SOURCES:
            hit = found if source == "device_hit" else 0
            series.count("prefill_effective_tokens", hit, own, mode=source)
        self._here.admitted(event.t, found, found + body.extend)

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        here, by_rid = self._here, self._requests.by_rid
        waited = [state for rid in body.rids if (state := by_rid.get(rid)) is not None and state.queued_at]
        firsts = [state for state in waited if not state.stats.forward_entry]
        self._requests.planned(event, body)
        if body.mode == "decode":
            here.decode_tokens = sum(body.prefix_lens) + sum(body.extend_lens)
        for state in firsts:
            self.series.observe("queue_time_seconds", state.stats.queue_ns / 1e9, here.label)
        for state in waited:
            here.retracted.pop(state.rid, None)

    def _on_batch_finished(self, event: Event, body: BatchFinished) -> None:
        here = self._here
        plan = here.engine.in_flight.get(body.bid)
        category = plan.mode if plan is not None else "unknown"
        spent = max(0, body.end_ns - body.start_ns)
        self.series.count("forward_execution_seconds", spent / 1e9, here.label, category=category)
        here.ran(event.t, spent)
        here.graph = body.can_run_cuda_graph
        kind = "decode" if category == "decode" else "prefill"
        mode = f"{kind}_{'cuda_graph' if here.graph else 'none'}"
        self.series.count("cuda_graph_passes", 1, here.label, mode=mode)

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        self._requests.sampled(event, body)
        self._here.sampled(event.t, len(body.rids))
        self.series.count("realtime_tokens", len(body.rids), self._here.label, mode="decode")

    def _on_retracted(self, event: Event, body: RequestRetracted) -> None:
        self._requests.retracted(event, body)
        self._here.retracted[body.rid] = None
        series, own = self.series, self._here.label
        series.count("num_retracted_requests", 1, own)
        series.count("num_retracted_input_tokens", self._requests.of(body.rid).prompt_tokens or 0, own)
        series.count("num_retracted_output_tokens", body.output_tokens, own)

    def _on_returned(self, event: Event, body: PoolReturned) -> None:
        if body.why == "evict":
            self.series.count("evicted_tokens", len(body.slots) // SLOT_BYTES, self._here.label)

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
        home = self._homes.get(body.rid, NONE)
        for stage in stages(state.stats):
            series.observe("per_stage_req_latency_seconds", stage.duration_ns / 1e9, home, stage=stage.name)
        self._forget(body.rid)

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        if body.rid in self._requests.by_rid:
            self._requests.aborted(event, body)
        if self._side is not None:
            self._side.aborted(body)
        if body.where == "grammar":
            series, here = self.series, self._here
            series.count("num_grammar_aborted", 1, here.label)
            late = body.reason is Reason.GRAMMAR and body.rid in here.compiling
            series.count("num_grammar_timeout", int(late), here.label)
            here.compiling.pop(body.rid, None)

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
        self._homes.pop(rid, None)
        for state in self._ranks.values():
            state.retracted.pop(rid, None)


def _flag(state: RequestState) -> str:
    return "true" if state.stream else "false"


def _of_a_scheduler(event: Event) -> bool:
    return event.component == SCHEDULER or rank_of(event.component) is not None
