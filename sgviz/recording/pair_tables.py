"""The requests of a pair of servers as a table: one row with both sides. Imports: recording, pandas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from sgviz.recording.pair_explain import Seen
from sgviz.recording.tables import NS_PER_MS, first_token_ns

if TYPE_CHECKING:
    from sgviz.recording.pairing import PairedRecording

COLUMNS = (
    "rid", "arrival_ms", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason", "room",
    "bootstrap_ms", "prefill_queue_ms", "prefill_ms", "prealloc_ms", "awaits_kv_ms", "transfer_ms", "after_prefill_ms",
    "transfer_bytes", "pieces", "bytes_per_s", "backend", "decode_queue_ms", "decode_ms", "ttft_ms", "itl_ms",
    "itl_p99_ms", "total_ms", "failed", "prefill_rank", "decode_rank",
)  # fmt: skip


def pair_table(pair: PairedRecording) -> pd.DataFrame:
    """One row a request, in the order of arrival at the prefill side.

    `bootstrap_ms`: the prefill side waited for the decode side, which found room in `prealloc_ms`; `prefill_ms`: from
    its first batch to its prompt's result. `transfer_ms`: from the first piece being read to the last one in its pages,
    `bytes_per_s` over that; `after_prefill_ms`: from that result until the decode side saw that all was there.
    `ttft_ms`: from the arrival (at the router, if recorded) to the first token as it was handed to the client;
    `itl_ms`: the mean between two tokens.
    """
    gaps = token_gaps(pair)
    rows = [_row(pair, pair.seen(rid), gaps.get(rid)) for rid in pair.rids]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    counts = ["prompt_tokens", "completion_tokens", "cached_tokens", "prefill_rank", "decode_rank"]
    return table.astype(dict.fromkeys(counts, "Int64"))


def _row(pair: PairedRecording, seen: Seen, gaps: pd.Series | None) -> tuple[object, ...]:
    sent, came, shift = seen.sent, seen.came, seen.shift
    one, two = seen.prefill.stats, seen.decode.stats
    start = _arrival(seen)
    first = seen.routed.first if seen.routed is not None and seen.routed.first else _first(seen)
    last = (two.response_sent or two.finished or two.completion) + shift
    assert sent is not None and came is not None
    out = came.outcome or sent.outcome
    begun = min((piece.start_ns for piece in came.received), default=came.transferred)
    travelled, rate = (took, came.bytes * 1e9 / took) if (took := seen.travelled_ns) else (math.nan, math.nan)
    return (
        seen.rid, _between(pair.t0, start), came.prompt_tokens, seen.decode.completion_tokens or seen.decode.sampled,
        seen.prefill.cached_tokens, seen.decode.finish_reason, came.room,
        _between(sent.queued, sent.bootstrapped), _ms(one.queue_ns) if one.forward_entry else math.nan,
        _between(one.forward_entry, sent.computed), _between(came.bootstrapped, came.preallocated),
        _between(came.preallocated, begun), travelled / NS_PER_MS,
        _between(sent.computed, seen.arrived), came.bytes, out.pieces if out is not None else len(came.received), rate,
        out.backend if out is not None else "", _ms(two.queue_ns) if two.forward_entry else math.nan,
        _between(two.forward_entry, two.completion), _between(start, first),
        gaps.mean() if gaps is not None and len(gaps) else math.nan,
        gaps.quantile(0.99) if gaps is not None and len(gaps) else math.nan,
        _between(start, last if last > shift else 0), out.why if out is not None and not out.ok else "", *seen.ranks,
    )  # fmt: skip


def _arrival(seen: Seen) -> int:
    one, two = seen.prefill.stats, seen.decode.stats
    theirs = two.created or two.scheduler_recv
    starts = [one.created or one.scheduler_recv, theirs + seen.shift if theirs else 0]
    starts += [seen.routed.start] if seen.routed is not None else []
    return min((t for t in starts if t), default=0)


def _first(seen: Seen) -> int:
    """The first text handed to the HTTP layer on the decode side; where only a scheduler is recorded, its token."""
    chunk = seen.decode.marks.get("chunk.sent")
    at = chunk.t if chunk is not None else first_token_ns(seen.decode) or seen.decode.stats.prefill_finished
    return at + seen.shift if at else 0


def token_gaps(pair: PairedRecording) -> dict[str, pd.Series]:
    """By rid the ms between neighbouring tokens, as the decode side received them (not streamed: had them)."""
    table = pair.decode.tokens
    streamed = [rid for rid in pair.rids if pair.decode.request(rid).stream]
    table["at"] = table.received_ms.where(table.rid.isin(streamed), table.sampled_ms).fillna(table.sampled_ms)
    grouped = table.sort_values(["rid", "index"]).groupby("rid")["at"]
    return {str(rid): times.diff().dropna() for rid, times in grouped}


def _between(start: int, end: int) -> float:
    return _ms(end - start) if start and end else math.nan


def _ms(ns: int) -> float:
    return ns / NS_PER_MS
