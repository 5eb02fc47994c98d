"""OpenTelemetry: a trace a request, its root under the GenAI semantic names, a child span an interval.

Written after the fact from events (nothing runs in the hot loop), as OTLP/JSON: a file of one request a
line, or posted to a collector's OTLP/HTTP address. Mirrors SGLang's `--enable-trace`, which sends while serving.

Imports: events, errors, recording.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgviz.errors import SgvizError
from sgviz.events.schema import RequestConverted, RequestReceived
from sgviz.recording.explanation import Explanation
from sgviz.recording.recording import Recording
from sgviz.recording.requests import RequestState

SPANS_A_MESSAGE = 2000
TIMEOUT_S = 10.0
INTERNAL, SERVER = 1, 2
OK, ERROR = 1, 2
OPERATIONS = {"ChatCompletionRequest": "chat", "CompletionRequest": "text_completion"}

Json = dict[str, Any]


def write(rec: Recording, path: Path | str, to: str) -> list[str]:
    """Write to a file (JSON lines), or post to `http(s)://host:port[/v1/traces]`."""
    target = str(path)
    messages = list(_messages(rec))
    if "://" in target:
        return [_post(target, messages)]
    try:
        Path(target).write_text("".join(json.dumps(message) + "\n" for message in messages), encoding="utf-8")
    except OSError as error:
        raise SgvizError(f"cannot write the spans to {target!r}: {error}") from error
    return [target]


def _post(address: str, messages: list[Json]) -> str:
    """To the traces address of a collector; every message must be taken."""
    if not address.startswith(("http://", "https://")):
        raise SgvizError(f"{address!r} is no address of a collector: it begins with http:// or https://")
    url = address if address.rstrip("/").endswith("/v1/traces") else address.rstrip("/") + "/v1/traces"
    for message in messages:
        request = urllib.request.Request(
            url, json.dumps(message).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise SgvizError(f"the collector at {url!r} did not take the spans: {error}") from error
    return url


def _messages(rec: Recording) -> Iterator[Json]:
    """ExportTraceServiceRequests of a bounded size, each with whole traces."""
    offset = _unix_offset(rec)
    spans: list[Json] = []
    for rid in rec.rids:
        spans += _spans(rec, rid, rec.request(rid), rec.explain(rid), offset)
        if len(spans) >= SPANS_A_MESSAGE:
            yield _message(rec, spans)
            spans = []
    if spans:
        yield _message(rec, spans)


def _message(rec: Recording, spans: list[Json]) -> Json:
    resource = _attributes({"service.name": "sgviz", "service.version": rec.header.version})
    scope = {"name": "sgviz.recording", "version": rec.header.version}
    return {
        "resourceSpans": [
            {"resource": {"attributes": resource}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _unix_offset(rec: Recording) -> int:
    """What turns monotonic into calendar nanoseconds; without an anchor the end lies at the time of writing."""
    if rec.header.anchors:
        anchor = rec.header.anchors[0]
        return anchor.unix_ns - anchor.monotonic_ns
    return rec.header.created_unix_ns - rec.t_end


def _spans(
    rec: Recording, rid: str, request: RequestState, explanation: Explanation, offset: int
) -> Iterator[Json]:
    """`rid`: the name of the request among all."""
    trace = hashlib.sha256(f"{explanation.rid}/{explanation.start_ns}".encode()).hexdigest()[:32]
    root = _span_id(trace, 0)
    failed = request.status is not None and request.status >= 400
    attributes = _genai(rec, rid, request)
    yield _span(
        trace, root, "", f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}", SERVER,
        explanation.start_ns + offset, explanation.start_ns + explanation.total_ns + offset, attributes,
    ) | {"status": {"code": ERROR if failed else OK}}  # fmt: skip
    for number, part in enumerate(explanation.stretches(), 1):
        more: dict[str, Any] = {"sgviz.cause": str(part.cause)}
        if part.detail:
            more["sgviz.detail"] = part.detail
        if part.blockers:
            more["sgviz.blockers"] = list(part.blockers)
        start = part.start_ns + offset
        yield _span(
            trace,
            _span_id(trace, number),
            root,
            str(part.cause),
            INTERNAL,
            start,
            start + part.duration_ns,
            more,
        )


def _genai(rec: Recording, rid: str, request: RequestState) -> dict[str, Any]:
    """The attributes of the GenAI conventions that the events know; unknown ones are left out."""
    received, converted = request.marks.get("request.received"), request.marks.get("request.converted")
    configured = rec._configured()
    kind, model = "", configured.model if configured else "unknown"
    if received is not None and isinstance(received.body, RequestReceived):
        kind, model = received.body.type, received.body.model or model
    known: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(kind, "generate_content"),
        "gen_ai.provider.name": "sgviz",
        "gen_ai.request.model": model,
        "gen_ai.response.id": request.rid,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "http.response.status_code": request.status,
        "sgviz.retractions": request.retractions or None,
        "sgviz.dp_rank": rec.rank_with(rid) if len(rec.ranks) > 1 else None,
    }
    if converted is not None and isinstance(converted.body, RequestConverted):
        body = converted.body
        known |= {
            "gen_ai.request.max_tokens": body.max_new_tokens,
            "gen_ai.request.temperature": body.temperature,
            "gen_ai.request.top_p": body.top_p,
            "gen_ai.request.top_k": body.top_k,
            "gen_ai.request.stop_sequences": list(body.stop) or None,
        }
    return {name: value for name, value in known.items() if value is not None}


def _span(
    trace: str, span: str, parent: str, name: str, kind: int, start: int, end: int, attributes: dict[str, Any]
) -> Json:
    return {
        "traceId": trace,
        "spanId": span,
        **({"parentSpanId": parent} if parent else {}),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": _attributes(attributes),
    }


def _span_id(trace: str, number: int) -> str:
    return hashlib.sha256(f"{trace}/{number}".encode()).hexdigest()[:16]


def _attributes(values: dict[str, Any]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
