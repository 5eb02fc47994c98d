"""/metrics: SGLang's names, types, labels and buckets, and values that are those of the recording."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scrapes import families, sums
from timed_rig import TimedRig

from sgviz.config import Settings
from sgviz.engine import Engine
from sgviz.errors import ConfigError
from sgviz.events import RingSink
from sgviz.events.schema import AdmitOk, OutputReceived, PoolReturned, RequestReceived, RequestRetracted
from sgviz.observe import names, page
from sgviz.observe.metrics import Metrics
from sgviz.recording import Recording

MODEL = frozenset({"model_name"})
TOKENIZER = MODEL | {"engine_type"}
SCHEDULER = TOKENIZER | {"tp_rank", "pp_rank", "moe_ep_rank"}
CUSTOM = frozenset({"team", "app"})
TTFT = [0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400]
ITL = [0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
       0.8, 1, 2, 4, 6, 8]  # fmt: skip
# what SGLang exports and this server can count: type, whose labels, labels of its own
FACTS = {
    "num_running_reqs": ("gauge", SCHEDULER, ()),
    "num_queue_reqs": ("gauge", SCHEDULER, ()),
    "num_paused_reqs": ("gauge", SCHEDULER, ()),
    "num_streaming_sessions": ("gauge", SCHEDULER, ()),
    "num_retracted_reqs": ("gauge", SCHEDULER, ()),
    "gen_throughput": ("gauge", SCHEDULER, ()),
    "cache_hit_rate": ("gauge", SCHEDULER, ()),
    "decode_sum_seq_lens": ("gauge", SCHEDULER, ()),
    "new_token_ratio": ("gauge", SCHEDULER, ()),
    "fwd_occupancy": ("gauge", SCHEDULER, ()),
    "is_cuda_graph": ("gauge", SCHEDULER, ()),
    "num_retracted_requests_total": ("counter", SCHEDULER, ()),
    "num_retracted_input_tokens_total": ("counter", SCHEDULER, ()),
    "num_retracted_output_tokens_total": ("counter", SCHEDULER, ()),
    "cuda_graph_passes_total": ("counter", SCHEDULER, ("mode",)),
    "realtime_tokens_total": ("counter", SCHEDULER, ("mode",)),
    "prefill_effective_tokens_total": ("counter", SCHEDULER, ("mode",)),
    "forward_execution_seconds_total": ("counter", SCHEDULER, ("category",)),
    "scheduler_idle_seconds_total": ("counter", SCHEDULER, ()),
    "token_usage": ("gauge", SCHEDULER, ()),
    "full_token_usage": ("gauge", SCHEDULER, ()),
    "num_used_tokens": ("gauge", SCHEDULER, ()),
    "kv_available_tokens": ("gauge", SCHEDULER, ()),
    "kv_evictable_tokens": ("gauge", SCHEDULER, ()),
    "kv_used_tokens": ("gauge", SCHEDULER, ()),
    "max_total_num_tokens": ("gauge", SCHEDULER, ()),
    "page_size": ("gauge", SCHEDULER, ()),
    "num_pages": ("gauge", SCHEDULER, ()),
    "context_len": ("gauge", SCHEDULER, ()),
    "num_grammar_queue_reqs": ("gauge", SCHEDULER, ()),
    "num_grammar_total": ("counter", SCHEDULER, ()),
    "num_grammar_cache_hit_total": ("counter", SCHEDULER, ()),
    "num_grammar_aborted_total": ("counter", SCHEDULER, ()),
    "num_grammar_timeout_total": ("counter", SCHEDULER, ()),
    "num_so_requests_total": ("counter", TOKENIZER, ()),
    "grammar_compilation_time_seconds": ("histogram", SCHEDULER, ()),
    "queue_time_seconds": ("histogram", SCHEDULER, ()),
    "per_stage_req_latency_seconds": ("histogram", SCHEDULER, ("stage",)),
    "evicted_tokens_total": ("counter", SCHEDULER, ()),
    "prompt_tokens_total": ("counter", TOKENIZER, ()),
    "generation_tokens_total": ("counter", TOKENIZER, ()),
    "num_requests_total": ("counter", TOKENIZER, ("is_streaming",)),
    "cached_tokens_total": ("counter", TOKENIZER, ("cache_source",)),
    "num_aborted_requests_total": ("counter", TOKENIZER, ()),
    "time_to_first_token_seconds": ("histogram", TOKENIZER, ("is_streaming",)),
    "inter_token_latency_seconds": ("histogram", TOKENIZER, ()),
    "request_time_per_output_token_seconds": ("histogram", TOKENIZER, ()),
    "e2e_request_latency_seconds": ("histogram", TOKENIZER, ()),
    "prompt_tokens_histogram": ("histogram", TOKENIZER, ()),
    "uncached_prompt_tokens_histogram": ("histogram", TOKENIZER, ()),
    "generation_tokens_histogram": ("histogram", TOKENIZER, ()),
    "http_requests_total": ("counter", frozenset(), ("endpoint", "method")),
    "http_responses_total": ("counter", frozenset(), ("endpoint", "status_code", "method")),
    "http_requests_active": ("gauge", frozenset(), ("endpoint", "method")),
}
OURS = {"trace_dropped_events_total", "func_latency_seconds"}  # the second is SGLang's, but not on the sheet
BUCKETS = {
    "time_to_first_token_seconds": TTFT,
    "e2e_request_latency_seconds": [*TTFT, 600, 1200, 1800, 2400],
    "inter_token_latency_seconds": ITL,
    "per_stage_req_latency_seconds": [0.001 * 1.62**k for k in range(30)],
}
# the rest of the facts sheet's section, whole or by its pattern
NOT_HERE = """
utilization max_running_requests_under_SLO
num_unique_running_routing_keys streaming_session_held_tokens
scheduler_process_cpu_seconds_total scheduler_stage_seconds_total estimated_flops_per_gpu_total
estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total swa_token_usage mamba_usage
swa_available_tokens max_total_num_tokens_swa kv_cache_memory_usage_gb weight_memory_usage_gb
graph_memory_usage_gb startup_available_gpu_memory_gb spec_accept_length spec_accept_rate
grammar_schema_count grammar_ebnf_size
pending_prealloc_token_usage prealloc_full_token_usage num_prefill_retries_total
decode_deferred_kv_release_total dp_cooperation_realtime_tokens_total
dp_attention_tokens_total prefill_delayer_wait_seconds lora_pool_utilization hicache_host_used_tokens
routing_key_running_req_count routing_key_all_req_count weight_load_duration_seconds eplb_balancedness
eviction_duration_seconds load_back_duration_seconds load_back_tokens_total hicache_dropped_tokens_total
prefetched_tokens_total backuped_tokens_total storage_prefetch_hit_tokens_total prefetch_pgs backup_bandwidth
spec_verify_calls_total get_loads_duration_seconds startup_time_seconds
startup_cuda_graph_time_seconds routing_keys_active encoder_requests
"""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    with Engine(
        "tiny-llama",
        device="mock",
        mock_step_ms=1,
        max_total_tokens=1024,
        tokenizer_metrics_allowed_custom_labels="team, app",
    ) as engine:
        yield engine, engine.serve(port=0).url


def post(url: str, body: object, **headers: str) -> int:
    made = {"Content-Type": "application/json"} | headers
    request = urllib.request.Request(url, json.dumps(body).encode(), made)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def load(engine: Engine, url: str) -> None:
    """Streamed and not, cached, retracted, refused, unknown paths."""
    for number in range(3):
        body = {"model": "tiny-llama", "messages": [{"role": "user", "content": f"hello {number}"}]}
        label = json.dumps({"team": "search", "app": number, "secret": "x"})
        header = {"x-custom-labels": label} if number else {}
        assert (
            post(f"{url}/v1/chat/completions", body | {"max_tokens": 12, "stream": number == 0}, **header)
            == 200
        )
    prompts = [[number * 20 + i for i in range(20)] for number in range(4)]
    engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    )
    assert post(f"{url}/generate", {"text": "x", "sampling_params": {"n": 2, "max_new_tokens": 3}}) == 200
    assert post(f"{url}/generate", {"text": "x", "sampling_params": {"top_p": 7}}) == 400
    assert post(f"{url}/nowhere/{'x' * 9}", {}) == 404


def test_metrics_have_the_names_types_and_labels_of_sglang(served: tuple[Engine, str]) -> None:
    load(*served)
    under_a_grammar = {"regex": "[0-9]{3}", "max_new_tokens": 8}
    assert post(f"{served[1]}/generate", {"text": "x", "sampling_params": under_a_grammar}) == 200
    found = families(served[1])
    for name, (kind, base, own) in FACTS.items():
        family = found[name.removesuffix("_total")]
        assert family.type == kind, name
        assert family.samples, name
        custom = CUSTOM if base is TOKENIZER else frozenset()
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == base | custom | set(own), (name, sample)
            if base:
                assert sample.labels["model_name"] == served[0].settings.served_model_name
    found = {name: family for name, family in found.items() if not name.endswith("_created")}
    served_names = {f"{name}_total" if family.type == "counter" else name for name, family in found.items()}
    assert served_names - OURS == set(FACTS)


def test_buckets_are_those_of_sglang(served: tuple[Engine, str]) -> None:
    found = families(served[1])
    for name, wanted in BUCKETS.items():
        edges = [
            float(sample.labels["le"]) for sample in found[name].samples if sample.name.endswith("_bucket")
        ]
        one = edges[: edges.index(math.inf)]
        assert one == pytest.approx(wanted), name


def test_every_absent_metric_has_its_reason() -> None:
    told = [word.strip() for _, words in names.ABSENT for word in words.split(",")]
    patterns = [re.compile(re.escape(word).replace(r"\*", ".*")) for word in told]
    assert [
        name for name in NOT_HERE.split() if not any(pattern.fullmatch(name) for pattern in patterns)
    ] == []
    here = [*FACTS, *names.SIDE_GAUGES, *names.SIDE_HISTOGRAMS]
    assert [name for name in here if any(pattern.fullmatch(name) for pattern in patterns)] == []
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.page()
    assert [name for name in here if f"`sglang:{name}`" not in text] == []


def later_tokens(rec: Recording) -> int:
    """Tokens that reached the tokenizer manager after the first of their request."""
    seen: set[str] = set()
    count = 0
    for event in rec.stamped():
        if isinstance(event.body, OutputReceived):
            for rid, tokens in zip(event.body.rids, event.body.tokens):
                count += tokens if rid in seen else 0
                seen |= {rid} if tokens else set()
    return count


def test_metrics_say_what_the_recording_says(served: tuple[Engine, str]) -> None:
    engine, url = served
    load(engine, url)
    told, rec = sums(url), engine.recording().freeze()
    requests = rec.requests[rec.requests.finish_reason != ""]
    rows = requests[requests.completion_tokens.notna()]
    assert told["generation_tokens_total", ""] == rows.completion_tokens.sum()
    assert (
        told["prompt_tokens_total", ""] == told["prompt_tokens_histogram_sum", ""] == rows.prompt_tokens.sum()
    )
    assert told["cached_tokens_total", ""] == rows.cached_tokens.sum() > 0
    uncached = told["uncached_prompt_tokens_histogram_sum", ""]
    assert uncached == rows.prompt_tokens.sum() - rows.cached_tokens.sum()
    assert told["num_requests_total", ""] == len(rows)
    assert told["realtime_tokens_total", "decode"] == len(rec.tokens)
    spoke = rows[rows.completion_tokens > 0]  # the one that only warms the cache for its samples says nothing
    assert told["time_to_first_token_seconds_count", ""] == len(spoke)
    assert told["inter_token_latency_seconds_count", ""] == later_tokens(rec)
    assert told["scheduler_idle_seconds_total", ""] > 0
    moment = rec.at()
    assert told["kv_available_tokens", ""] == moment.free
    assert told["max_total_num_tokens", ""] == moment.total == 1024
    assert told["num_running_reqs", ""] == told["num_queue_reqs", ""] == told["decode_sum_seq_lens", ""] == 0
    batches = rec.iterations
    assert told["cuda_graph_passes_total", "decode_none"] == (batches["mode"] == "decode").sum()
    assert told["cuda_graph_passes_total", "prefill_none"] == (batches["mode"] != "decode").sum()


def test_effective_tokens_leave_out_what_is_computed_again() -> None:
    rig = TimedRig(tokens=104, schedule_conservativeness=0.001)
    prompts = [[40 + number, 3, 5, 7, 9] for number in range(6)]
    for prompt in prompts:  # they come one by one and all want more than there is
        rig.submit(prompt, 30)
        for _ in range(6):
            rig.stop()
    rig.run()
    metrics = Metrics("m")
    metrics.fold(rig.recording().stamped())
    told = {
        (sample.name.removeprefix("sglang:"), sample.labels.get("mode", "")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    retracted = rig.bodies(RequestRetracted)
    assert told["num_retracted_requests_total", ""] == len(retracted) > 0
    assert told["num_retracted_input_tokens_total", ""] == 5 * len(retracted)
    assert told["num_retracted_output_tokens_total", ""] == sum(body.output_tokens for body in retracted)
    assert told["prefill_effective_tokens_total", "input"] == 30
    assert [
        told["prefill_effective_tokens_total", f"{mode}_hit"] for mode in ("device", "host", "storage")
    ] == [0] * 3
    admitted = rig.bodies(AdmitOk)
    assert told["realtime_tokens_total", "prefill_compute"] == sum(body.extend for body in admitted) > 30
    evicted = sum(len(body.slots) // 4 for body in rig.bodies(PoolReturned) if body.why == "evict")
    assert told["evicted_tokens_total", ""] == evicted
    batches = rig.recording().iterations
    device = [
        sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name == "sglang:forward_execution_seconds_total"
    ]
    assert sum(device) == pytest.approx(batches.device_ms.sum() / 1e3, rel=1e-6)


def test_custom_labels_of_the_allow_list_are_on_the_tokenizer_s_metrics(served: tuple[Engine, str]) -> None:
    engine, url = served
    load(engine, url)

    def by_team(name: str) -> dict[tuple[str, str], float]:
        out: dict[tuple[str, str], float] = {}
        for sample in families(url)[name].samples:
            if not sample.name.endswith(("_total", "_count")):
                continue
            key = (sample.labels["team"], sample.labels["app"])
            out[key] = out.get(key, 0.0) + sample.value
        return out

    requests = by_team("num_requests")
    assert set(requests) == {("", ""), ("search", "1"), ("search", "2")}
    assert requests["search", "1"] == requests["search", "2"] < requests["", ""]
    assert by_team("time_to_first_token_seconds").keys() == requests.keys()
    assert "secret" not in str(families(url))
    before = requests["", ""]
    for header in ("not json", "[1]", '{"team": ["x"]}', '{"team": null, "other": "y"}'):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        assert post(f"{url}/generate", body, **{"x-custom-labels": header}) == 200
    assert by_team("num_requests")["", ""] == before + 4
    body = {"text": "a", "sampling_params": {"n": 2, "max_new_tokens": 1}}
    assert post(f"{url}/generate", body, **{"x-custom-labels": '{"team": "n"}'}) == 200
    assert by_team("num_requests")["n", ""] == 3  # two samples, and what warmed the cache for them
    came = [event.body for event in engine.recording().stamped() if isinstance(event.body, RequestReceived)]
    assert came[-1].labels == (("team", "n"),)


@pytest.mark.parametrize("names_", ["model_name", "a,le", "2x", "a b", "__x", "ä"])
def test_labels_that_cannot_be_are_refused(names_: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a label"):
        Settings.build(tokenizer_metrics_allowed_custom_labels=names_)


def test_http_requests_are_counted_where_they_come_in(served: tuple[Engine, str]) -> None:
    _, url = served

    def counted(name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for sample in families(url)[name].samples
            if sample.name.endswith(("_total", "_active"))
        }

    before = counted("http_requests")
    assert post(f"{url}/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}) == 200
    assert post(f"{url}/v1/models/other", {}) == 405
    assert post(f"{url}/elsewhere", {}) == 404
    requests, responses = counted("http_requests"), counted("http_responses")
    gained = {
        key: value - before.get(key, 0) for key, value in requests.items() if value != before.get(key, 0)
    }
    assert gained == {
        ("/generate", "POST"): 1,  # two prompts are one request
        ("/v1/models/{model_id:path}", "POST"): 1,
        ("unmatched", "POST"): 1,
        ("/metrics", "GET"): 1,
    }
    assert {labels[2] for labels in responses if labels[0] == "unmatched"} == {"404"}
    assert counted("http_requests_active") == {
        key: float(key == ("/metrics", "GET")) for key in counted("http_requests_active")
    }


def test_what_is_over_is_forgotten(served: tuple[Engine, str]) -> None:
    engine, url = served
    load(engine, url)
    ring: RingSink = engine.pipeline.ring
    metrics = Metrics("m", ("team",))
    metrics.fold(ring.snapshot())
    kept = [
        state for state in metrics._requests.by_rid.values()
        if not state.rid.startswith(("warm", "HEALTH")) and state.end
    ]  # fmt: skip
    assert kept == [] and not metrics._last_token and not metrics._ranks[0].retracted and not metrics._homes
