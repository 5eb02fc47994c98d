"""A served engine seen from outside: metrics under SGLang's names, events resumed, the state at a moment."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

import sgviz
from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.events import RingSink, Tracer
from sgviz.events.schema import RequestDispatched
from sgviz.observe import page
from sgviz.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS, SCHEDULER_HISTOGRAMS, TM_COUNTERS
from sgviz.recording import Recording

# names, types and labels beyond model_name, as SGLang documents them
NAMES = {
    "num_running_reqs": ("gauge", ()),
    "num_queue_reqs": ("gauge", ()),
    "num_retracted_reqs": ("gauge", ()),
    "gen_throughput": ("gauge", ()),
    "cache_hit_rate": ("gauge", ()),
    "new_token_ratio": ("gauge", ()),
    "token_usage": ("gauge", ()),
    "num_used_tokens": ("gauge", ()),
    "kv_available_tokens": ("gauge", ()),
    "kv_evictable_tokens": ("gauge", ()),
    "max_total_num_tokens": ("gauge", ()),
    "page_size": ("gauge", ()),
    "num_pages": ("gauge", ()),
    "context_len": ("gauge", ()),
    "prompt_tokens": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "num_requests": ("counter", ("is_streaming",)),
    "cached_tokens": ("counter", ("cache_source",)),
    "realtime_tokens": ("counter", ("mode",)),
    "forward_execution_seconds": ("counter", ("category",)),
    "http_requests": ("counter", ("endpoint", "method")),
    "http_responses": ("counter", ("endpoint", "status_code", "method")),
    "time_to_first_token_seconds": ("histogram", ("is_streaming",)),
    "inter_token_latency_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "queue_time_seconds": ("histogram", ()),
    "per_stage_req_latency_seconds": ("histogram", ("stage",)),
}
TOKENIZER = {"model_name", "engine_type"}
SCHEDULER = TOKENIZER | {"tp_rank", "pp_rank", "moe_ep_rank"}
OF_TOKENIZER = {*TM_COUNTERS, *HISTOGRAMS}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine(
        "tiny-llama", device="mock", mock_step_ms=1, max_total_tokens=1024, admin_api_key="secret"
    ) as engine:
        url = engine.serve(port=0).url
        for number in range(3):
            body = {"model": "tiny-llama", "messages": [{"role": "user", "content": f"hello {number}"}]}
            post(url + "/v1/chat/completions", body | {"max_tokens": 12, "stream": number == 0})
        yield engine, url


def post(url: str, body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def get(url: str, key: str | None = "secret") -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return bytes(answer.read())


def test_metrics_have_the_names_types_and_labels_of_sglang(served: tuple[Engine, str]) -> None:
    text = get(served[1] + "/metrics", key=None).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for name, (kind, labels) in NAMES.items():
        family = found[f"sglang:{name}"]
        assert family.type == kind, name
        own = TOKENIZER if name in OF_TOKENIZER else SCHEDULER
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == own | set(labels), (name, sample)
            assert sample.labels["model_name"] == served[0].settings.served_model_name
    assert {*GAUGES, *COUNTERS, *TM_COUNTERS, *HISTOGRAMS, *SCHEDULER_HISTOGRAMS} >= set(NAMES)


def test_metrics_say_what_the_recording_says(served: tuple[Engine, str]) -> None:
    engine, url = served
    samples = {
        (sample.name, sample.labels.get("mode", "")): 0.0
        for family in families(url)
        for sample in family.samples
    }
    for family in families(url):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("mode", "")] += sample.value
    rec = engine.recording().freeze()
    requests = rec.requests
    assert samples["sglang:generation_tokens_total", ""] == requests.completion_tokens.sum()
    assert samples["sglang:prompt_tokens_total", ""] == requests.prompt_tokens.sum()
    assert samples["sglang:cached_tokens_total", ""] == requests.cached_tokens.sum()
    assert samples["sglang:num_requests_total", ""] == len(requests)
    assert samples["sglang:realtime_tokens_total", "decode"] == len(rec.tokens)
    assert samples["sglang:time_to_first_token_seconds_count", ""] == len(requests)
    assert samples["sglang:inter_token_latency_seconds_count", ""] > 0
    total = requests.e2e_ms.sum() / 1e3
    assert samples["sglang:e2e_request_latency_seconds_sum", ""] == pytest.approx(total)
    moment = rec.at()
    assert samples["sglang:kv_available_tokens", ""] == moment.free
    assert samples["sglang:max_total_num_tokens", ""] == moment.total == 1024
    assert samples["sglang:num_running_reqs", ""] == samples["sglang:num_queue_reqs", ""] == 0


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page()


def families(url: str) -> list:  # type: ignore[type-arg]
    return list(text_string_to_metric_families(get(url + "/metrics", key=None).decode()))


def test_a_remote_recording_is_the_engine_s_own(served: tuple[Engine, str]) -> None:
    engine, url = served
    with sgviz.connect(url, "secret") as rec:
        own = engine.recording().freeze()
        assert rec.wait_for(len(own))
        assert rec.requests.equals(own.requests) and rec.kv.equals(own.kv)
        assert rec.explain(own.rids[0]) == own.explain(own.rids[0])
        assert rec.dropped == 0 and rec.source == url and rec.freeze().header.anchors == own.header.anchors
        before = len(rec)
        engine.generate("more", sampling_params={"max_new_tokens": 4})
        assert rec.wait_for(before + 10) and rec.freeze().audit().balanced


def test_events_resume_behind_the_last_one_seen(served: tuple[Engine, str]) -> None:
    engine, url = served
    ours = [event.kind for event in engine.pipeline.ring.since(0)[1]]
    request = urllib.request.Request(url + "/sgviz/events?seq=5", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=30) as stream:
        seq, events = message(stream)
    assert seq == 5 + len(events) and [event[4][0] for event in events] == ours[5:seq]
    request.add_header("Last-Event-ID", str(seq - 2))
    with urllib.request.urlopen(request, timeout=30) as stream:
        again, rest = message(stream)
    assert [event[4][0] for event in rest] == ours[seq - 2 : again]


def message(stream) -> tuple[int, list[list[object]]]:  # type: ignore[no-untyped-def]
    found = re.fullmatch(rb"id: (\d+)\n", stream.readline())
    assert found is not None
    data = stream.readline()
    assert data.startswith(b"data: ")
    return int(found[1]), json.loads(data[6:])


def test_state_is_the_moment_of_the_recording(served: tuple[Engine, str]) -> None:
    engine, url = served
    rec: Recording = engine.recording().freeze()
    for count in (0, 40, len(rec)):
        state, moment = json.loads(get(f"{url}/sgviz/state?seq={count}")), rec.at(count=count)
        assert (state["free"], state["protected"], state["iteration"]) == (
            moment.free,
            moment.protected,
            moment.iteration,
        )
        assert tuple(state["waiting"]) == moment.waiting and len(state["tree"]) == len(moment.tree)


@pytest.mark.parametrize("path", ["/sgviz/state?seq=x", "/sgviz/state?seq=99999999", "/sgviz/events?seq=-1"])
def test_numbers_that_are_none_are_refused(path: str, served: tuple[Engine, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(served[1] + path)
    assert error.value.code == 400 and "seq" in error.value.read().decode()


def test_what_looks_inside_needs_the_admin_key(served: tuple[Engine, str]) -> None:
    for path in ("/sgviz/state", "/sgviz/events", "/sgviz/header"):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(served[1] + path, key="wrong")
        assert error.value.code == 401
    with pytest.raises(SgvizError, match="answered 401"):
        sgviz.connect(served[1])


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(SgvizError, match="cannot follow"):
        sgviz.connect("http://127.0.0.1:9")


def test_a_ring_tells_what_came_since_and_what_fell_out() -> None:
    ring = RingSink(capacity=10)
    trace = Tracer("t", ring)
    for number in range(25):
        trace.emit(RequestDispatched(rid=str(number)))
    rids = lambda events: [event.body.rid for event in events]  # noqa: E731
    for seen in range(30):
        first, events = ring.since(seen)
        assert first == max(seen, 15) and rids(events) == [str(number) for number in range(first, 25)]
        first, some = ring.since(seen, 3)
        assert rids(some) == rids(events)[:3]
