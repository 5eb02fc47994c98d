"""Prometheus metrics from events, under SGLang's names, types and labels (facts 19).

Each scrape folds the events that came since the last one. Where SGLang refreshes its gauges every 40th
decode, these are those of the newest event. Simplified: one rank, no speculation, no LoRA, no host cache.

Imports: events, recording, prometheus_client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sgviz.events.schema import (
    AdmitOk,
    BatchFinished,
    BatchPlanned,
    ChunkSent,
    Event,
    OutputReceived,
    PoolReturned,
    QueueEntered,
    RequestAborted,
    RequestConverted,
    RequestDispatched,
    RequestFinished,
    RequestReceived,
    RequestRetracted,
    RequestTokenized,
    ResponseFinished,
    TextEmitted,
    TokensSampled,
    TraceDropped,
)
from sgviz.events.time_stats import stages
from sgviz.recording.engine_fold import EngineFold
from sgviz.recording.requests import Requests, RequestState

TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_S = (*TTFT_S, 600, 1200, 1800, 2400)
ITL_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
    0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
STAGE_S = tuple(0.001 * 1.62**k for k in range(30))
SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
TOKENIZER = {"engine_type": "unified"}
RATE_WINDOW_NS = 10_000_000_000
QUIET_NS = 30_000_000_000
HIT_WINDOW_NS = 15_000_000_000
SLOT_BYTES = 4
GAUGES = {
    "num_running_reqs": "Requests past the queue.",
    "num_queue_reqs": "Requests in the waiting queue.",
    "num_retracted_reqs": "Requests that were retracted and wait again.",
    "gen_throughput": "Output tokens a second over the last ten seconds; 0 after thirty without any.",
    "cache_hit_rate": "Share of prompt tokens found in the radix tree, first admissions of the last 15 s.",
    "new_token_ratio": "Share of the output limits that admission reserves.",
    "token_usage": "Share of the KV pool that cannot be had.",
    "full_token_usage": "The same for full attention, here all there is.",
    "num_used_tokens": "KV tokens that cannot be had.",
    "kv_available_tokens": "KV tokens that are free.",
    "kv_evictable_tokens": "KV tokens of unlocked tree nodes.",
    "kv_used_tokens": "KV tokens that are locked or private.",
    "max_total_num_tokens": "KV tokens of the pool.",
    "page_size": "Tokens of a page.",
    "num_pages": "Pages of the pool.",
    "context_len": "Positions that the model can address.",
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_retracted_requests": ("Retractions.", ()),
    "num_retracted_output_tokens": ("Output tokens whose KV was given up.", ()),
    "realtime_tokens": ("Tokens computed or found in the tree.", ("mode",)),
    "forward_execution_seconds": ("Time the device ran batches.", ("category",)),
    "evicted_tokens": ("Tokens dropped from the radix tree.", ()),
    "trace_dropped_events": ("Events lost before they were counted here (sgviz's own).", ()),
}
TM_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of finished requests.", ()),
    "generation_tokens": ("Output tokens of finished requests.", ()),
    "num_requests": ("Finished requests.", ("is_streaming",)),
    "cached_tokens": ("Prompt tokens found in the radix tree.", ("cache_source",)),
    "num_aborted_requests": ("Requests that were aborted.", ()),
    "http_requests": ("HTTP requests with a body that the engine took.", ("endpoint", "method")),
    "http_responses": ("HTTP answers that ended.", ("endpoint", "status_code", "method")),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TTFT_S, ("is_streaming",)),
    "inter_token_latency_seconds": ("Between two tokens at the tokenizer manager.", ITL_S, ()),
    "e2e_request_latency_seconds": ("From arrival to the end.", E2E_S, ()),
}
SCHEDULER_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "queue_time_seconds": ("In the waiting queue, up to the first batch.", STAGE_S, ()),
    "per_stage_req_latency_seconds": ("Of each stage of a request.", STAGE_S, ("stage",)),
}


class Metrics:
    """One engine's metrics with a registry of their own.

    Args:
        model_name: label of every series.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._scheduler = {"model_name": model_name, **SCHEDULER}
        self._tokenizer = {"model_name": model_name, **TOKENIZER}
        self._gauges = {name: self._gauge(name, words) for name, words in GAUGES.items()}
        self._counters = self._counters_of(COUNTERS, self._scheduler) | self._counters_of(
            TM_COUNTERS, self._tokenizer
        )
        self._histograms = self._histograms_of(HISTOGRAMS, self._tokenizer)
        self._histograms |= self._histograms_of(SCHEDULER_HISTOGRAMS, self._scheduler)
        self._engine = EngineFold()
        self._requests = Requests()
        self._last_token: dict[str, int] = {}
        self._endpoints: dict[str, str] = {}
        self._retracted: dict[str, None] = {}
        self._seen_cached: dict[str, None] = {}
        self._decoded: deque[tuple[int, int]] = deque()
        self._hits: deque[tuple[int, int, int]] = deque()
        self._handlers = self._make_handlers()

    def text(self) -> bytes:
        """The exposition format."""
        self._set_gauges()
        return generate_latest(self.registry)

    def fold(self, events: Iterable[Event]) -> None:
        """Count further events (in the order of time)."""
        for event in events:
            self._engine.apply(event)
            handler = self._handlers.get(type(event.body))
            if handler is not None:
                handler(event, event.body)

    def lost(self, count: int) -> None:
        """Events that fell out of the ring before they were folded."""
        self._count("trace_dropped_events", count)

    # ------------------------------------------------------------ making

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(f"sglang:{name}", words, list(self._scheduler), registry=self.registry)

    def _counters_of(
        self, table: dict[str, tuple[str, tuple[str, ...]]], labels: dict[str, str]
    ) -> dict[str, tuple[Counter, dict[str, str]]]:
        return {
            name: (Counter(f"sglang:{name}", words, [*labels, *more], registry=self.registry), labels)
            for name, (words, more) in table.items()
        }

    def _histograms_of(
        self, table: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]], labels: dict[str, str]
    ) -> dict[str, tuple[Histogram, dict[str, str]]]:
        return {
            name: (
                Histogram(f"sglang:{name}", words, [*labels, *more], buckets=buckets, registry=self.registry),
                labels,
            )
            for name, (words, buckets, more) in table.items()
        }

    def _count(self, name: str, amount: float, **more: str) -> None:
        counter, labels = self._counters[name]
        counter.labels(**labels, **more).inc(amount)

    def _observe(self, name: str, seconds: float, **more: str) -> None:
        histogram, labels = self._histograms[name]
        histogram.labels(**labels, **more).observe(max(0.0, seconds))

    def _make_handlers(self) -> dict[type, Callable[[Event, Any], None]]:
        requests = self._requests
        return {
            RequestReceived: self._on_received,
            RequestConverted: requests.converted,
            RequestTokenized: requests.tokenized,
            RequestDispatched: requests.dispatched,
            QueueEntered: self._on_queued,
            AdmitOk: self._on_admitted,
            BatchPlanned: self._on_planned,
            BatchFinished: self._on_batch_finished,
            TokensSampled: self._on_sampled,
            RequestRetracted: self._on_retracted,
            PoolReturned: self._on_returned,
            TextEmitted: requests.emitted,
            OutputReceived: self._on_output,
            RequestFinished: self._on_finished,
            RequestAborted: self._on_aborted,
            ChunkSent: requests.chunk_sent,
            ResponseFinished: self._on_response,
            TraceDropped: lambda event, body: self.lost(body.count),
        }

    # ------------------------------------------------------------ scheduler

    def _on_queued(self, event: Event, body: QueueEntered) -> None:
        self._requests.queued(event, body)
        probes = self._requests.probes
        while len(probes) > 2:  # no event says that one is over; events of the one before may still come
            self._forget(next(iter(probes)))

    def _on_admitted(self, event: Event, body: AdmitOk) -> None:
        again = body.rid in self._seen_cached or body.rid in self._retracted
        self._count("realtime_tokens", body.extend, mode="prefill_compute")
        if body.need or body.have:
            self._count("realtime_tokens", body.prefix, mode="prefill_cache")
        if not again:
            self._seen_cached[body.rid] = None
            self._hits.append((event.t, body.prefix, body.prefix + body.extend))

    def _on_planned(self, event: Event, body: BatchPlanned) -> None:
        by_rid = self._requests.by_rid
        waited = [state for rid in body.rids if (state := by_rid.get(rid)) is not None and state.queued_at]
        firsts = [state for state in waited if not state.stats.forward_entry]
        self._requests.planned(event, body)
        for state in firsts:
            self._observe("queue_time_seconds", state.stats.queue_ns / 1e9)
        for state in waited:
            self._retracted.pop(state.rid, None)

    def _on_batch_finished(self, event: Event, body: BatchFinished) -> None:
        plan = self._engine.in_flight.get(body.bid)
        category = plan.mode if plan is not None else "unknown"
        self._count("forward_execution_seconds", max(0, body.end_ns - body.start_ns) / 1e9, category=category)

    def _on_sampled(self, event: Event, body: TokensSampled) -> None:
        self._requests.sampled(event, body)
        self._decoded.append((event.t, len(body.rids)))
        self._count("realtime_tokens", len(body.rids), mode="decode")

    def _on_retracted(self, event: Event, body: RequestRetracted) -> None:
        self._requests.retracted(event, body)
        self._retracted[body.rid] = None
        self._count("num_retracted_requests", 1)
        self._count("num_retracted_output_tokens", body.output_tokens)

    def _on_returned(self, event: Event, body: PoolReturned) -> None:
        if body.why == "evict":
            self._count("evicted_tokens", len(body.slots) // SLOT_BYTES)

    # ------------------------------------------------------------ tokenizer manager and http

    def _on_received(self, event: Event, body: RequestReceived) -> None:
        self._requests.received(event, body)
        self._endpoints[body.rid] = body.path
        self._count("http_requests", 1, endpoint=body.path, method="POST")

    def _on_output(self, event: Event, body: OutputReceived) -> None:
        for rid, tokens in zip(body.rids, body.tokens):
            state = self._requests.by_rid.get(rid)
            if state is None or not tokens:
                continue
            before, self._last_token[rid] = self._last_token.get(rid), event.t
            if before is None:
                waited = (event.t - (state.stats.created or event.t)) / 1e9
                self._observe("time_to_first_token_seconds", waited, is_streaming=_flag(state))
            else:
                for _ in range(tokens):
                    self._observe("inter_token_latency_seconds", (event.t - before) / 1e9 / tokens)
        self._requests.output_received(event, body)

    def _on_finished(self, event: Event, body: RequestFinished) -> None:
        self._requests.finished(event, body)
        state = self._requests.by_rid[body.rid]
        self._count("num_requests", 1, is_streaming=_flag(state))
        self._count("prompt_tokens", body.prompt_tokens)
        self._count("generation_tokens", body.completion_tokens)
        self._count("cached_tokens", body.cached_tokens, cache_source="device")
        self._observe("e2e_request_latency_seconds", (event.t - (state.stats.created or event.t)) / 1e9)
        if body.reason == "abort":
            self._count("num_aborted_requests", 1)
        for stage in stages(state.stats):
            self._observe("per_stage_req_latency_seconds", stage.duration_ns / 1e9, stage=stage.name)
        self._forget(body.rid)

    def _on_aborted(self, event: Event, body: RequestAborted) -> None:
        if body.rid in self._requests.by_rid:
            self._requests.aborted(event, body)

    def _on_response(self, event: Event, body: ResponseFinished) -> None:
        endpoint = self._endpoints.pop(body.rid, None)
        if endpoint is not None:
            self._count("http_responses", 1, endpoint=endpoint, status_code=str(body.status), method="POST")

    def _forget(self, rid: str) -> None:
        """A finished request is counted; what is kept does not grow with the run."""
        self._requests.by_rid.pop(rid, None)
        self._requests.probes.pop(rid, None)
        self._last_token.pop(rid, None)
        self._seen_cached.pop(rid, None)
        self._retracted.pop(rid, None)

    # ------------------------------------------------------------ gauges

    def _set_gauges(self) -> None:
        engine, ledger = self._engine, self._engine.ledger
        used = ledger.protected + ledger.private_total
        values: dict[str, float] = {
            "num_running_reqs": len(engine.running),
            "num_queue_reqs": len(engine.waiting),
            "num_retracted_reqs": len(self._retracted),
            "gen_throughput": self._throughput(),
            "cache_hit_rate": self._hit_rate(),
            "new_token_ratio": engine.ratio,
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
            self._gauges[name].labels(**self._scheduler).set(value)

    def _throughput(self) -> float:
        now = self._engine.t
        while self._decoded and self._decoded[0][0] < now - RATE_WINDOW_NS:
            self._decoded.popleft()
        if not self._decoded or now - self._decoded[-1][0] > QUIET_NS:
            return 0.0
        span = max(now - self._decoded[0][0], 1)
        return sum(count for _, count in self._decoded) / (span / 1e9)

    def _hit_rate(self) -> float:
        while self._hits and self._hits[0][0] < self._engine.t - HIT_WINDOW_NS:
            self._hits.popleft()
        total = sum(tokens for *_, tokens in self._hits)
        return sum(cached for _, cached, _ in self._hits) / total if total else 0.0


def _flag(state: RequestState) -> str:
    return "true" if state.stream else "false"
