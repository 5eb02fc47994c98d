"""What `sgviz bench` tells: the table and the JSON line of SGLang's bench_serving, and the join with server events.

Names, order and layout are bench_serving's, so that results can be laid beside each other and read by the same
scripts. Imports: experiment (numbers), recording.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sgviz.cli.bench_answers import Measured
from sgviz.experiment.stats import most_at_once, most_per_second, spread, tpot

if TYPE_CHECKING:
    from sgviz.recording import Recording

WIDTH, LABEL, VALUE = 50, 40, 10
MS = 1000.0
LATENCIES = (
    ("e2e_latency", "E2E Latency", "End-to-End Latency"),
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-Token Latency"),
)
WHICH = (("mean", "Mean"), ("median", "Median"), ("p90", "P90"), ("p95", "P95"), ("p99", "P99"))
Result = dict[str, Any]


def result_of(measured: Sequence[Measured], *, duration: float, facts: Mapping[str, Any]) -> Result:
    """The result under bench_serving's keys. `duration`: seconds of the whole run. `facts`: tag, backend, ..."""
    good = [each for each in measured if each.ok]
    tokens_in, tokens_out = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    stamps = [each.start + stamp for each in good for stamp in each.stamps]
    counts = [count for each in good for count in each.counts]
    streamed = [each for each in good if each.streamed and each.stamps]  # else nobody saw the first token
    gaps = [gap * MS for each in streamed for gap in each.itl]
    return {
        **facts,
        "duration": duration,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _rate(len(good), duration),
        "input_throughput": _rate(tokens_in, duration),
        "output_throughput": _rate(tokens_out, duration),
        "total_throughput": _rate(tokens_in + tokens_out, duration),
        **spread([each.latency * MS for each in good], "e2e_latency"),
        **spread([each.ttft * MS for each in streamed], "ttft"),
        **spread([tpot(each.latency, each.ttft, each.output_tokens) * MS for each in streamed], "tpot"),
        **spread(gaps, "itl"),
        "max_itl_ms": max(gaps, default=math.nan),
        "concurrency": _rate(sum(each.latency for each in good), duration),
        "accept_length": None,
        "max_output_tokens_per_s": most_per_second(stamps, counts),
        "max_concurrent_requests": most_at_once(
            [each.start for each in good], [each.start + each.latency for each in good]
        ),
        "total_cached_tokens": sum(each.cached_tokens for each in good),
    }


def details_of(measured: Sequence[Measured]) -> Result:
    """The lists of `--output-details`, a value a request."""
    return {
        "rids": [each.rid for each in measured],
        "input_lens": [each.prompt_tokens for each in measured],
        "output_lens": [each.output_tokens for each in measured],
        "ttfts": [each.ttft for each in measured],
        "itls": [each.itl for each in measured],
        "generated_texts": [each.text for each in measured],
        "errors": [each.error for each in measured],
    }


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


# ---------------------------------------------------------------- table


def table(result: Mapping[str, Any]) -> str:
    """The printed table."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_head(result)]
    for key, short, title in LATENCIES:
        lines.append(f"{title:-^{WIDTH}}")
        lines += [_line(f"{word} {short} (ms):", result[f"{which}_{key}_ms"]) for which, word in WHICH]
    lines.append(_line("Max ITL (ms):", result["max_itl_ms"]))
    if result.get("server"):
        lines += _server_lines(result["server"])
    lines.append("=" * WIDTH)
    if result.get("simulated"):
        lines.append(f"The server's device is simulated ({result['server_info']['device']}).")
    return "\n".join(lines)


def _head(result: Mapping[str, Any]) -> Iterator[str]:
    yield _line("Backend:", result["backend"])
    yield _line("Traffic request rate:", result["request_rate"])
    yield _line("Max request concurrency:", result["max_concurrency"] or "not set")
    yield _line("Successful requests:", result["completed"])
    if result["failed"]:
        yield _line("Failed requests:", result["failed"])
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total input text tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    if result.get("total_output_tokens_retokenized") is not None:
        yield _line("Total generated tokens (retokenized):", result["total_output_tokens_retokenized"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    yield _line("Input token throughput (tok/s):", result["input_throughput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", result["max_concurrent_requests"])
    yield _line("Total token throughput (tok/s):", result["total_throughput"])
    yield _line("Concurrency:", result["concurrency"])


def _server_lines(server: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'Server Events (joined by rid)':-^{WIDTH}}"
    yield _line("Requests joined:", server["joined"])
    yield _line("Events dropped:", server["dropped_events"])
    for name, label in JOINED.items():
        for which in ("mean", "median", "p99"):
            yield _line(f"{which.capitalize()} {label} (ms):", server[f"{which}_{name}_ms"])


def _line(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return f"{label:<{LABEL}} {shown:<{VALUE}}"


# ---------------------------------------------------------------- join

JOINED = {
    "queue": "Queue",
    "server_ttft": "TTFT at Server",
    "server_e2e": "E2E at Server",
    "outside_ttft": "TTFT outside Server",
    "outside_e2e": "E2E outside Server",
}


def join(measured: Sequence[Measured], recording: Recording) -> Result:
    """The server's side of the same requests, from its events, and what the client saw beyond it.

    `queue`: all stays in the waiting queue. `outside_*`: client minus server, so sockets, HTTP and the client.
    """
    rows = recording.requests.set_index("rid")
    known = [each for each in measured if each.ok and each.rid in rows.index]
    server = rows.loc[[each.rid for each in known]]
    seen_ttft = [each.ttft * MS if each.streamed else math.nan for each in known]
    seen_e2e = [each.latency * MS for each in known]
    return {
        "recording": recording.source,
        "joined": len(known),
        "dropped_events": recording.dropped,
        "iterations": len(recording.iterations),
        **spread(list(server.queue_ms), "queue"),
        **spread(list(server.ttft_ms), "server_ttft"),
        **spread(list(server.e2e_ms), "server_e2e"),
        **spread([a - b for a, b in zip(seen_ttft, server.ttft_ms)], "outside_ttft"),
        **spread([a - b for a, b in zip(seen_e2e, server.e2e_ms)], "outside_e2e"),
    }
