"""Every exported file is read back by a reader that sgviz had no part in, and says what the tables say."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import duckdb
import pandas as pd
import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from random_runs import run
from synthetic import SyntheticRun
from workload import crowd

from sgviz.engine import Engine
from sgviz.errors import BadRequest, SgvizError
from sgviz.events.schema import AnyBody, BatchFinished, BatchPlanned, DpChose, Event, LoopResumed
from sgviz.recording import Recording
from sgviz.recording.export.tables import TABLES


@pytest.fixture(scope="module")
def rec() -> Recording:
    return Recording(SyntheticRun(20, seed=1, total=320, gap_us=2_000).events)


@pytest.fixture(scope="module")
def pressed() -> Recording:
    config: dict[str, object] = {
        "tokens": 192,
        "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.001,
    }
    return run(config, crowd(3))[0].recording()


@pytest.fixture(scope="module")
def ranked() -> Recording:
    """Two schedulers, samples of one prompt on both, and a request that no rank got."""
    with Engine("tiny-llama", device="mock", dp_size=2, mock_step_ms=1.0) as engine:
        engine.generate(["one", "two two", "three"], {"max_new_tokens": 5})
        engine.generate("x", {"n": 4, "max_new_tokens": 3}, rid="family")
        with pytest.raises(BadRequest):
            engine.generate("y", {"max_new_tokens": 3}, routed_dp_rank=2, rid="nobodys")
        return engine.recording().freeze()


# ---------------------------------------------------------------- perfetto


def read_trace(path: Path) -> Trace:
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def test_perfetto_has_a_slice_a_batch_and_a_track_a_component(rec: Recording, tmp_path: Path) -> None:
    rec.export("perfetto", tmp_path / "run.pftrace")
    trace = read_trace(tmp_path / "run.pftrace")
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    assert {"http", "tokenizer_manager", "scheduler", "device", "detokenizer"} <= set(names.values())
    assert set(rec.rids) <= set(names.values())
    begins = [p for p in trace.packet if p.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    ends = [p for p in trace.packet if p.track_event.type == TrackEvent.TYPE_SLICE_END]
    assert len(begins) == len(ends)
    device = [p for p in begins if names[p.track_event.track_uuid] == "device"]
    assert [p.track_event.name for p in device] == [f"{r.mode} #{r.bid}" for r in rec.iterations.itertuples()]
    starts = [(p.timestamp - rec.t0) / 1e6 for p in device]
    assert starts == pytest.approx(rec.iterations.start_ms.tolist())


def test_perfetto_shows_forward_sampling_copy_and_where_a_debugger_held_it(tmp_path: Path) -> None:
    plan = BatchPlanned(
        bid=1, mode="decode", rids=("a",), extend_lens=(1,), prefix_lens=(4,), running=1, waiting=0, kv_free=0,
        kv_evictable=0, kv_protected=0, new_token_ratio=0.5,
    )  # fmt: skip
    ran = BatchFinished(
        bid=1, start_ns=300, end_ns=700, can_run_cuda_graph=True, forward_end_ns=600, sample_start_ns=600,
        copy_start_ns=700, copy_end_ns=800,
    )  # fmt: skip
    bodies: list[tuple[int, AnyBody]] = [
        (200, plan), (250, LoopResumed(since_ns=210, at="planned", why="step")), (900, ran),
    ]  # fmt: skip
    events = [Event(seq, t, "scheduler", 1, body) for seq, (t, body) in enumerate(bodies, 1)]
    Recording(events).export("perfetto", tmp_path / "run.pftrace")
    trace = read_trace(tmp_path / "run.pftrace")
    slices: list[tuple[str, str, int, int]] = []
    open_: dict[int, list[tuple[str, int]]] = {}
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    for packet in sorted(trace.packet, key=lambda p: p.timestamp):  # stable, as the trace processor sorts
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_.setdefault(event.track_uuid, []).append((event.name, packet.timestamp))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, start = open_[event.track_uuid].pop()
            slices.append((names[event.track_uuid], name, start, packet.timestamp))
    assert {
        ("device", "decode #1", 300, 700), ("device", "forward", 300, 600), ("device", "sample", 600, 700),
        ("device copy", "copy #1", 700, 800), ("scheduler", "parked", 210, 250),
    } <= set(slices)  # fmt: skip


def test_perfetto_flows_lead_from_request_to_batch_to_text(rec: Recording, tmp_path: Path) -> None:
    rec.export("perfetto", tmp_path / "run.pftrace")
    trace = read_trace(tmp_path / "run.pftrace")
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    uuid_of = {name: uuid for uuid, name in names.items()}
    for rid in rec.rids:
        flow = uuid_of[rid]
        on = [p for p in trace.packet if flow in p.track_event.flow_ids]
        tracks = {names[p.track_event.track_uuid] for p in on}
        assert {"http", "tokenizer_manager", "device", "detokenizer"} <= tracks
        batches = [p.track_event.name for p in on if names[p.track_event.track_uuid] == "device"]
        assert len(batches) == len(rec.request(rid).bids)
        ends = [p for p in trace.packet if flow in p.track_event.terminating_flow_ids]
        assert [p.track_event.name for p in ends] == ["response.finished"]


def test_perfetto_counters_are_the_kv_and_the_queue(rec: Recording, tmp_path: Path) -> None:
    rec.export("perfetto", tmp_path / "run.pftrace")
    trace = read_trace(tmp_path / "run.pftrace")
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    last: dict[str, int] = {}
    for packet in trace.packet:
        if packet.track_event.type == TrackEvent.TYPE_COUNTER:
            last[names[packet.track_event.track_uuid]] = packet.track_event.counter_value
    final = rec.kv.iloc[-1]
    assert [last[f"KV {name}"] for name in ("free", "evictable", "protected", "private")] == [
        final.free, final.evictable, final.protected, final.private,
    ]  # fmt: skip
    assert (last["running"], last["waiting"]) == tuple(rec.iterations.iloc[-1][["running", "waiting"]])


def test_perfetto_has_the_tracks_of_each_scheduler(ranked: Recording, tmp_path: Path) -> None:
    ranked.export("perfetto", tmp_path / "run.pftrace")
    trace = read_trace(tmp_path / "run.pftrace")
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    assert len(set(names.values())) == len(names)
    events = [p for p in trace.packet if p.HasField("track_event")]
    assert {p.track_event.track_uuid for p in events} <= set(names)
    begins = [p for p in events if p.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    assert len(begins) == sum(p.track_event.type == TrackEvent.TYPE_SLICE_END for p in events)
    for rank in ranked.ranks:
        on = [p for p in begins if names[p.track_event.track_uuid] == f"device {rank}"]
        ran = [p.track_event.name for p in on if "#" in p.track_event.name]
        table = ranked.rank(rank).iterations
        assert ran == [f"{row.mode} #{row.bid}" for row in table.itertuples()] and ran
        counted = [p for p in events if names[p.track_event.track_uuid] == f"running {rank}"]
        assert [p.track_event.counter_value for p in counted] == table.running.tolist()
    chosen = [p for p in events if p.track_event.name == "dp.chose"]
    assert {names[p.track_event.track_uuid] for p in chosen} == {"controller"}
    assert len(chosen) == sum(isinstance(event.body, DpChose) for event in ranked.stamped())


# ---------------------------------------------------------------- opentelemetry


def as_protobuf(line: str) -> TracesData:
    """OTLP/JSON has ids in hex where protobuf's own JSON has base64; nothing else differs."""
    message = json.loads(line)
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    return json_format.ParseDict(message, TracesData())


def spans_of(lines: list[str]) -> list:  # type: ignore[type-arg]
    found = [as_protobuf(line) for line in lines]
    return [s for data in found for r in data.resource_spans for scope in r.scope_spans for s in scope.spans]


def test_otel_spans_are_the_explanations_under_genai_names(rec: Recording, tmp_path: Path) -> None:
    rec.export("otel", tmp_path / "run.jsonl")
    spans = spans_of((tmp_path / "run.jsonl").read_text().splitlines())
    roots = {dict_of(span)["gen_ai.response.id"]: span for span in spans if not span.parent_span_id}
    assert set(roots) == set(rec.rids)
    table = rec.requests.set_index("rid")
    for rid, root in roots.items():
        known, explanation = dict_of(root), rec.explain(rid)
        assert root.name == "chat synthetic" and known["gen_ai.operation.name"] == "chat"
        assert known["gen_ai.usage.input_tokens"] == table.prompt_tokens[rid]
        assert known["gen_ai.usage.output_tokens"] == table.completion_tokens[rid]
        assert root.end_time_unix_nano - root.start_time_unix_nano == explanation.total_ns
        children = [span for span in spans if span.parent_span_id == root.span_id]
        assert all(span.trace_id == root.trace_id for span in children)
        assert [span.name for span in children] == [str(part.cause) for part in explanation.stretches()]
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        assert sum(s.end_time_unix_nano - s.start_time_unix_nano for s in children) == explanation.total_ns
    assert len({span.span_id for span in spans}) == len(spans)


def test_otel_names_the_rank_of_a_request(ranked: Recording, tmp_path: Path) -> None:
    ranked.export("otel", tmp_path / "run.jsonl")
    spans = spans_of((tmp_path / "run.jsonl").read_text().splitlines())
    roots = {
        attributes["gen_ai.response.id"]: attributes
        for attributes in (dict_of(span) for span in spans if not span.parent_span_id)
    }
    assert set(roots) == set(ranked.rids)
    for rid, attributes in roots.items():
        assert attributes.get("sgviz.dp_rank") == ranked.rank_with(rid)
    assert "sgviz.dp_rank" not in roots["nobodys"]


def dict_of(span) -> dict[str, object]:  # type: ignore[no-untyped-def]
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to /v1/traces; anything else is not found."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        taken = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json"
        if taken:
            self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200 if taken else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_otel_goes_to_a_collector_over_http(rec: Recording, collector: HTTPServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{collector.server_port}"
    assert rec.export("otel", url) == [f"{url}/v1/traces"]
    rec.export("otel", tmp_path / "run.jsonl")
    assert collector.bodies == (tmp_path / "run.jsonl").read_text().splitlines()  # type: ignore[attr-defined]


def test_a_collector_that_is_not_there_is_one_sentence(rec: Recording, collector: HTTPServer) -> None:
    with pytest.raises(SgvizError, match="did not take the spans"):
        rec.export("otel", f"http://127.0.0.1:{collector.server_port}/elsewhere")
    with pytest.raises(SgvizError, match="no address of a collector"):
        rec.export("otel", "ftp://127.0.0.1")


# ---------------------------------------------------------------- tables


def test_parquet_is_read_by_duckdb(pressed: Recording, tmp_path: Path) -> None:
    written = pressed.export("parquet", tmp_path / "run")
    assert {Path(name).stem for name in written} == set(TABLES)
    for name in TABLES:
        table: pd.DataFrame = getattr(pressed, name)
        read = duckdb.sql(f"select * from '{tmp_path / 'run' / name}.parquet'").df()
        assert list(read.columns) == list(table.columns) and len(read) == len(table)
    (total,) = duckdb.sql(f"select sum(change.amount) from (select unnest(holders) as change from "
                          f"'{tmp_path / 'run' / 'decisions.parquet'}')").fetchall()[0]  # type: ignore[misc]  # fmt: skip
    assert total == sum(amount for holders in pressed.decisions.holders for _, amount in holders)
    (ms,) = duckdb.sql(f"select sum(queue_ms) from '{tmp_path / 'run' / 'requests.parquet'}'").fetchall()[0]  # type: ignore[misc]
    assert ms == pytest.approx(pressed.requests.queue_ms.sum())


def test_csv_is_read_by_duckdb(pressed: Recording, tmp_path: Path) -> None:
    pressed.export("csv", tmp_path / "run")
    for name in TABLES:
        table: pd.DataFrame = getattr(pressed, name)
        read = duckdb.read_csv(str(tmp_path / "run" / f"{name}.csv"), header=True, sample_size=-1).df()
        assert list(read.columns) == list(table.columns) and len(read) == len(table)
    read = pd.read_csv(tmp_path / "run" / "requests.csv")
    assert [json.loads(text) for text in read.batches] == [list(bids) for bids in pressed.requests.batches]


def test_unknown_formats_and_bad_paths_are_refused(rec: Recording, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="did you mean 'parquet'"):
        rec.export("parket", tmp_path)
    (tmp_path / "file").write_text("x")
    for to in ("csv", "perfetto", "otel"):
        with pytest.raises(SgvizError, match="cannot write"):
            rec.export(to, tmp_path / "file" / "below")


def test_parquet_without_pyarrow_says_what_to_install(rec: Recording, tmp_path: Path) -> None:
    rec.save(tmp_path / "run.sgv")
    code = (
        "import sys\n"
        "sys.modules['pyarrow'] = None\n"
        "import sgviz\n"
        f"rec = sgviz.load({str(tmp_path / 'run.sgv')!r})\n"
        f"rec.export('csv', {str(tmp_path / 'csv')!r})\n"
        "try:\n"
        f"    rec.export('parquet', {str(tmp_path / 'parquet')!r})\n"
        "except sgviz.errors.SgvizError as error:\n"
        "    print(error)\n"
    )
    code = code.replace("import sgviz\n", "import sgviz, sgviz.errors\n")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'pip install -e ".[export]"' in done.stdout
