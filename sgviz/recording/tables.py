"""The folded state as pandas tables. Times end in `_ms` (milliseconds), sizes are tokens.

Absolute times count from the first event of the recording (`t0`); NaN or <NA> means "not reached".

Imports: events, recording, pandas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from sgviz.events.schema import KIND_OF, BatchPlanned, Body, Event
from sgviz.events.time_stats import STAGES, stages
from sgviz.recording.explain import Explainer
from sgviz.recording.explanation import WAITS, Cause
from sgviz.recording.fold import BatchState, KvRow, State
from sgviz.recording.requests import RequestState
from sgviz.recording.store import UnknownEvent

NS_PER_MS = 1e6
DETAIL_LIMIT = 160  # characters of `detail`
EVENT_COLUMNS = ("seq", "t_ns", "t_ms", "component", "iteration", "kind", "rid", "bid", "detail")
KV_COLUMNS = ("t_ms", "iteration", "kind", "free", "evictable", "protected", "private", "total", "exact")
BATCH_COLUMNS = (
    "bid", "iteration", "mode", "member", "rid", "extend_len", "prefix_len", "token", "planned_ms",
    "processed_ms",
)  # fmt: skip
ITERATION_COLUMNS = (
    "iteration", "bid", "mode", "batch_size", "new_tokens", "cached_tokens", "running", "waiting", "kv_used",
    "kv_free", "kv_evictable", "kv_protected", "kv_private", "new_token_ratio", "planned_ms", "launched_ms",
    "start_ms", "end_ms", "finished_ms", "processed_ms", "device_ms", "forward_ms", "sample_ms", "copy_ms",
    "host_ms", "gap_ms",
)  # fmt: skip
_SLOT_BYTES = 4
_NOT_DETAIL = frozenset({"rid", "bid"})
_WAIT_COLUMNS = tuple((cause, f"wait_{cause}_ms") for cause in Cause if cause in WAITS)
_STAGE_COLUMNS = tuple((name, f"{name}_ms") for _, name in STAGES)


# ---------------------------------------------------------------- events


def events_table(events: Sequence[Event], unknown: Sequence[UnknownEvent], t0: int) -> pd.DataFrame:
    """One row an event. `rid`, `bid`: whose it is, if it is one's; `detail`: the other fields in short."""
    describe: dict[type, Callable[[Any], str]] = {}
    rows: list[tuple[object, ...]] = []
    for event in events:
        body = event.body
        kind = type(body)
        text = describe.get(kind) or describe.setdefault(kind, _describer(kind))
        rows.append((
            event.seq, event.t, (event.t - t0) / NS_PER_MS, event.component, event.iteration, KIND_OF[kind],
            getattr(body, "rid", ""), getattr(body, "bid", None), text(body),
        ))  # fmt: skip
    for other in unknown:
        rows.append((
            other.seq, other.t, (other.t - t0) / NS_PER_MS, other.component, other.iteration, other.kind,
            "", None, "(kind or value unknown to this version)",
        ))  # fmt: skip
    table = pd.DataFrame(rows, columns=list(EVENT_COLUMNS)).astype({"bid": "Int64"})
    if unknown:
        table = table.sort_values(["t_ns", "component", "seq"], ignore_index=True, kind="stable")
    return table


def _describer(kind: type[Body]) -> Callable[[Body], str]:
    names = [name for name in kind.__struct_fields__ if name not in _NOT_DETAIL]

    def describe(body: Body) -> str:
        text = " ".join([f"{name}={_short(getattr(body, name))}" for name in names])
        return text if len(text) <= DETAIL_LIMIT else text[: DETAIL_LIMIT - 1] + "…"

    return describe


def _short(value: object) -> str:
    """A field in a few characters: slot lists by their length, long tuples by their head."""
    if isinstance(value, bytes):
        return f"[{len(value) // _SLOT_BYTES}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        shown = ",".join([_short(item) for item in value[:4]])
        return f"({shown},… {len(value)})" if len(value) > 4 else f"({shown})"
    return str(value)


# ---------------------------------------------------------------- requests


def requests_table(requests: Iterable[RequestState], t0: int, explainer: Explainer) -> pd.DataFrame:
    """One row a request, in the order of arrival.

    `ttft_ms`: to the first token (streamed: at the tokenizer manager; else where the scheduler had it).
    `total_ms` is end to end, until the last byte was handed over, and the sum of the stages; `e2e_ms` is the
    engine's part of it, until the tokenizer manager was done. `queue_ms`: all stays in the waiting queue.
    `tpot_ms`: a token after the first. `batches`: the bids it ran in. `parent`: the request it is a sample or
    prompt of; such a parent has a row with sizes missing. `wait_<cause>_ms`: the part of `queue_ms` that each
    cause has.
    """
    rows = [_request_row(request, t0) | _wait_columns(request, explainer) for request in requests]
    counts = ["prompt_tokens", "completion_tokens", "cached_tokens", "status"]
    return pd.DataFrame(rows, columns=_request_columns()).astype(dict.fromkeys(counts, "Int64"))


def _request_columns() -> list[str]:
    return [
        "rid", "arrival_ms", "prompt_tokens", "completion_tokens", "cached_tokens", "stream", "finish_reason",
        "matched", "status", "ttft_ms", "e2e_ms", "tpot_ms", "queue_ms", "total_ms",
        *(name for _, name in _STAGE_COLUMNS), "retractions", "n_batches", "batches", "abort", "parent",
        *(name for _, name in _WAIT_COLUMNS),
    ]  # fmt: skip


def _wait_columns(request: RequestState, explainer: Explainer) -> dict[str, object]:
    waits = explainer.queue_waits(request)
    return {name: waits.get(cause, 0) / NS_PER_MS for cause, name in _WAIT_COLUMNS}


def _request_row(request: RequestState, t0: int) -> dict[str, object]:
    stats = request.stats
    reached = {stage.name: stage.duration_ns for stage in stages(stats)}
    row: dict[str, object] = {
        "rid": request.rid,
        "arrival_ms": _at(stats.created, t0),
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.completion_tokens,
        "cached_tokens": request.cached_tokens,
        "stream": request.stream,
        "finish_reason": request.finish_reason,
        "matched": request.matched,
        "status": request.status,
        "ttft_ms": _since(first_token_ns(request), stats.created),
        "e2e_ms": _since(stats.finished, stats.created),
        "tpot_ms": tpot_ms(request),
        "queue_ms": stats.queue_ns / NS_PER_MS if stats.wait_queue_entry else math.nan,
        "total_ms": sum(reached.values()) / NS_PER_MS,
        "retractions": request.retractions,
        "n_batches": len(request.bids),
        "batches": tuple(request.bids),
        "abort": request.abort,
        "parent": request.parent,
    }
    for name, column in _STAGE_COLUMNS:
        row[column] = reached[name] / NS_PER_MS if name in reached else math.nan
    return row


def first_token_ns(request: RequestState) -> int:
    """When the first token was there: for a stream when it reached the tokenizer manager (0: not yet)."""
    stats = request.stats
    in_scheduler = stats.prefill_finished if request.sampled else 0
    return (stats.first_token if request.stream else in_scheduler) or stats.first_token


def tpot_ms(request: RequestState) -> float:
    """Time per output token after the first; NaN with fewer than two."""
    first, done = first_token_ns(request), request.stats.finished
    tokens = request.completion_tokens or 0
    return (done - first) / NS_PER_MS / (tokens - 1) if first and done and tokens > 1 else math.nan


def _at(t: int, t0: int) -> float:
    """On the axis of the recording; NaN for a stamp not reached."""
    return (t - t0) / NS_PER_MS if t else math.nan


def _since(t: int, origin: int) -> float:
    """From one stamp to another; NaN unless both are there."""
    return (t - origin) / NS_PER_MS if t and origin else math.nan


# ---------------------------------------------------------------- batches


def iterations_table(state: State, t0: int) -> pd.DataFrame:
    """One row a batch, in the order of planning.

    `new_tokens` run in it, `cached_tokens` were found in the tree for requests admitted with it. The
    `kv_*` numbers are those stated by the batch; `kv_used` is protected and private. `device_ms`: the device ran
    it, which is `forward_ms` and `sample_ms` together (between the two a delayed sampling may be waited for);
    `copy_ms`: the results on their way to the host, beside the next batch on a GPU. The three are NaN where the
    device does not tell. `host_ms`: launching and processing; `gap_ms`: the device stood still before it.
    """
    rows: list[tuple[object, ...]] = []
    last_end = 0
    for batch in state.batches.values():
        rows.append(_iteration_row(batch, state.ledger.total, last_end, t0))
        last_end = max(last_end, batch.end)
    return pd.DataFrame(rows, columns=list(ITERATION_COLUMNS))


def _iteration_row(batch: BatchState, total: int, last_end: int, t0: int) -> tuple[object, ...]:
    plan = batch.plan
    private = total - plan.kv_free - plan.kv_evictable - plan.kv_protected
    stamps = (batch.planned, batch.launched, batch.start, batch.end, batch.finished, batch.processed)
    return (
        batch.iteration, plan.bid, plan.mode, len(plan.rids), sum(plan.extend_lens), batch.cached,
        plan.running, plan.waiting, plan.kv_protected + private, plan.kv_free, plan.kv_evictable,
        plan.kv_protected, private, plan.new_token_ratio, *(_at(t, t0) for t in stamps),
        *_device_ms(batch), _host_ms(batch), _gap_ms(batch.start, last_end),
    )  # fmt: skip


def _device_ms(batch: BatchState) -> tuple[float, float, float, float]:
    """The device's part of a batch: the whole, forward, sampling, copy."""
    if not batch.forward_end:
        return _since(batch.end, batch.start), math.nan, math.nan, math.nan
    forward, sample = _since(batch.forward_end, batch.start), _since(batch.end, batch.sample_start)
    return forward + sample, forward, sample, _since(batch.copy_end, batch.copy_start)


def _gap_ms(start: int, last_end: int) -> float:
    """How long the device stood still; NaN before the first batch and while one has not run."""
    return max(0, start - last_end) / NS_PER_MS if start and last_end else math.nan


def _host_ms(batch: BatchState) -> float:
    """From planned to launched, and from the result's arrival to its being in the requests."""
    return _since(batch.launched, batch.planned) + _since(batch.processed, batch.finished)


def batches_table(state: State, t0: int) -> pd.DataFrame:
    """One row a member of a batch; `token`: the id sampled for it, if one was kept."""
    rows: list[tuple[object, ...]] = []
    for batch in state.batches.values():
        rows.extend(_member_rows(batch.plan, batch, t0))
    return pd.DataFrame(rows, columns=list(BATCH_COLUMNS)).astype({"token": "Int64"})


def _member_rows(plan: BatchPlanned, batch: BatchState, t0: int) -> Iterable[tuple[object, ...]]:
    planned, processed = _at(batch.planned, t0), _at(batch.processed, t0)
    for member, (rid, extend, prefix) in enumerate(zip(plan.rids, plan.extend_lens, plan.prefix_lens)):
        yield (
            plan.bid, batch.iteration, plan.mode, member, rid, extend, prefix, batch.tokens.get(rid),
            planned, processed,
        )  # fmt: skip


# ---------------------------------------------------------------- memory


def kv_table(rows: Sequence[KvRow], t0: int) -> pd.DataFrame:
    """Tokens by state after every event that moved some; `exact` is False after a loss of events."""
    return pd.DataFrame(
        [
            (
                (row.t - t0) / NS_PER_MS, row.iteration, row.kind, row.free, row.evictable, row.protected,
                row.private, row.total, row.exact,
            )
            for row in rows
        ],
        columns=list(KV_COLUMNS),
    )  # fmt: skip
