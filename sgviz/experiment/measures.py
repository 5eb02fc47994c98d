"""From a recording to the numbers of a benchmark: throughput, TTFT, ITL, TPOT, E2E. All of it from events.

Names and definitions are those of SGLang's bench_serving, seen from the server: TTFT runs from the arrival at
the engine to the first token (streamed: when it reached the tokenizer manager; else where the scheduler had
it), ITL is the gap between two tokens of a request where the scheduler took them. Imports: recording, pandas.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from sgviz.events.schema import TokensSampled
from sgviz.experiment.stats import most_at_once, most_per_second, spread
from sgviz.recording import Recording
from sgviz.recording.balance import imbalance

NS_PER_MS = 1e6
Number = float | int


def requests_of(recording: Recording) -> pd.DataFrame:
    """One row a finished or failed request, by rid.

    Columns: `prompt_tokens`, `output_tokens`, `cached_tokens`, `ttft_ms`, `tpot_ms`, `max_itl_ms`, `e2e_ms`,
    `queue_ms`, `retractions`, `arrival_ms`, `finish_reason`, `output_ids`.
    """
    table = recording.requests.set_index("rid")
    stamps, ids = _tokens(recording)
    gaps = {rid: [(b - a) / NS_PER_MS for a, b in pairwise(times)] for rid, times in stamps.items()}
    out = table[
        ["prompt_tokens", "cached_tokens", "ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "retractions",
         "arrival_ms", "finish_reason"]
    ].copy()  # fmt: skip
    out.insert(1, "output_tokens", table["completion_tokens"])
    out.insert(5, "max_itl_ms", [max(gaps.get(rid, []), default=float("nan")) for rid in out.index])
    out["output_ids"] = [tuple(ids.get(rid, ())) for rid in out.index]
    return out


def measure(recording: Recording) -> dict[str, Number]:
    """The numbers of one run, by their names in bench_serving; plus iterations, imbalance of ranks and lost events."""
    table = recording.requests
    done = table[table.finish_reason.isin(("stop", "length"))]
    duration = _duration_s(done)
    stamps, _ = _tokens(recording)
    gaps = [(b - a) / NS_PER_MS for times in stamps.values() for a, b in pairwise(times)]
    tokens_in, tokens_out = int(done.prompt_tokens.sum()), int(done.completion_tokens.sum())
    ends = done.arrival_ms + done.e2e_ms
    every = [stamp / 1e9 for times in stamps.values() for stamp in times]
    return {
        "completed": len(done),
        "failed": len(table[table.parent == ""]) - len(done),
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _rate(len(done), duration),
        "input_throughput": _rate(tokens_in, duration),
        "output_throughput": _rate(tokens_out, duration),
        "total_throughput": _rate(tokens_in + tokens_out, duration),
        "concurrency": _rate(float(done.e2e_ms.sum()) / 1000, duration),
        "max_concurrent_requests": most_at_once(list(done.arrival_ms), list(ends)),
        "max_output_tokens_per_s": most_per_second(every, [1] * len(every)),
        **spread(list(done.ttft_ms), "ttft"),
        **spread(list(done.tpot_ms), "tpot"),
        **spread(gaps, "itl"),
        **spread(list(done.e2e_ms), "e2e_latency"),
        "iterations": len(recording.iterations),
        "cached_tokens": int(done.cached_tokens.sum()),
        "retractions": int(table.retractions.sum()),
        "imbalance": imbalance(recording),
        "dropped_events": recording.dropped,
    }


def _tokens(recording: Recording) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """By rid: when each token was taken (ns), and which it was."""
    stamps: dict[str, list[int]] = {}
    ids: dict[str, list[int]] = {}
    for event in recording.stamped():
        body = event.body
        if isinstance(body, TokensSampled):
            for rid, token in zip(body.rids, body.token_ids):
                stamps.setdefault(rid, []).append(event.t)
                ids.setdefault(rid, []).append(token)
    return stamps, ids


def _duration_s(done: pd.DataFrame) -> float:
    """From the first arrival to the last end."""
    if done.empty:
        return 0.0
    return float((done.arrival_ms + done.e2e_ms).max() - done.arrival_ms.min()) / 1000


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
