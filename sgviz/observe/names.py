"""Every metric of `/metrics`: name, type, labels and buckets, and which of SGLang's are not here and why (facts 19).

Mirrors the declarations in SGLang's metrics collectors. Simplified: one tensor and pipeline rank, no
priority label.

Imports: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
TOKENIZER = {"engine_type": "unified"}
DP_RANK = "dp_rank"  # a further label of a scheduler's metrics where there are several schedulers
OF_ALL = frozenset({"trace_dropped_events"})  # a scheduler's metrics without it
HIT_SOURCES = ("device_hit", "host_hit", "storage_hit")

TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_S = (*TTFT_S, 600, 1200, 1800, 2400)
ITL_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
    0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
STAGE_S = tuple(0.001 * 1.62**k for k in range(30))
QUEUE_S = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, *range(30, 101, 10),
    *range(200, 1001, 100), 1200, 1400, 1600, 1800, 2000, 2500, 3000,
)  # fmt: skip
TOKENS = (
    100, 300, 500, 700, 1000, 1500, 2000, *range(3000, 10_001, 1000), *range(12_500, 30_001, 2500), 35_000,
    40_000, 60_000, 80_000, 100_000, 200_000, 300_000, 400_000, 600_000, 800_000, 1_000_000, 1_100_000,
)  # fmt: skip
WAIT_MS = tuple(0.1 * 2.0**k for k in range(21))
SIZE_MB = tuple(0.01 * 2.0**k for k in range(21))
SPEED_GB_S = tuple(0.001 * 2.0**k for k in range(18))


@dataclass(frozen=True, slots=True)
class Named:
    """One metric: what it means, its labels beyond those of its side, its buckets if it is a histogram."""

    words: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


GAUGES = {
    "num_running_reqs": Named("Requests past the queue."),
    "num_queue_reqs": Named("Requests in the waiting queue."),
    "num_grammar_queue_reqs": Named("Requests that wait for their grammars to compile."),
    "num_paused_reqs": Named("Requests under way as the present pause of generation began; 0 without one."),
    "num_streaming_sessions": Named("Streaming sessions that are open."),
    "num_retracted_reqs": Named("Requests that were retracted and wait again."),
    "gen_throughput": Named("Output tokens a second over the last ten seconds; 0 after thirty without any."),
    "cache_hit_rate": Named(
        "Share of prompt tokens found in the radix tree, first admissions of the last 15 s."
    ),
    "decode_sum_seq_lens": Named("Tokens of the members of the newest decode batch; 0 when nobody runs."),
    "new_token_ratio": Named("Share of the output limits that admission reserves."),
    "fwd_occupancy": Named("Percent of the last ten seconds in which the device ran batches; 0 without any."),
    "is_cuda_graph": Named("1 if the newest batch was replayed from a CUDA graph."),
    "token_usage": Named("Share of the KV pool that cannot be had."),
    "full_token_usage": Named("The same for full attention, here all there is."),
    "num_used_tokens": Named("KV tokens that cannot be had."),
    "kv_available_tokens": Named("KV tokens that are free."),
    "kv_evictable_tokens": Named("KV tokens of unlocked tree nodes."),
    "kv_used_tokens": Named("KV tokens that are locked or private."),
    "max_total_num_tokens": Named("KV tokens of the pool."),
    "page_size": Named("Tokens of a page."),
    "num_pages": Named("Pages of the pool."),
    "context_len": Named("Positions that the model can address."),
}
COUNTERS = {
    "num_retracted_requests": Named("Retractions."),
    "num_retracted_input_tokens": Named("Prompt tokens whose KV was given up."),
    "num_retracted_output_tokens": Named("Output tokens whose KV was given up."),
    "num_grammar": Named("Requests under a grammar that the scheduler took."),
    "num_grammar_cache_hit": Named("Those of them whose grammar was there already."),
    "num_grammar_aborted": Named(
        "Those that ended before they had a grammar: it does not compile, or an abort."
    ),
    "num_grammar_timeout": Named("Those of them whose grammar took too long to compile."),
    "cuda_graph_passes": Named(
        "Batches by kind, and whether from a CUDA graph: decode_none, prefill_cuda_graph, ...", ("mode",)
    ),
    "realtime_tokens": Named(
        "Tokens computed (prefill_compute, decode) or found (prefill_cache).", ("mode",)
    ),
    "prefill_effective_tokens": Named(
        "Prompt tokens at a request's first admission: computed (input) or found (device_hit; the others "
        "stay 0 here). What is computed again after a retraction does not count.",
        ("mode",),
    ),
    "forward_execution_seconds": Named("Time the device ran batches.", ("category",)),
    "scheduler_idle_seconds": Named("Time without work; counted when it ends."),
    "evicted_tokens": Named("Tokens dropped from the radix tree."),
    "trace_dropped_events": Named("Events lost before they were counted here (sgviz's own)."),
}
TM_COUNTERS = {
    "prompt_tokens": Named("Prompt tokens of finished requests."),
    "generation_tokens": Named("Output tokens of finished requests."),
    "num_requests": Named("Finished requests.", ("is_streaming",)),
    "cached_tokens": Named("Prompt tokens found in the radix tree.", ("cache_source",)),
    "num_aborted_requests": Named("Requests that were aborted."),
    "num_so_requests": Named("Requests that got a grammar for their output."),
}
TM_HISTOGRAMS = {
    "time_to_first_token_seconds": Named("From arrival to the first token.", ("is_streaming",), TTFT_S),
    "inter_token_latency_seconds": Named("Between two tokens at the tokenizer manager.", (), ITL_S),
    "request_time_per_output_token_seconds": Named(
        "Of a finished request: time after its first token by further token.", (), ITL_S
    ),
    "e2e_request_latency_seconds": Named("From arrival to the end.", (), E2E_S),
    "prompt_tokens_histogram": Named("Prompt tokens of a finished request.", (), TOKENS),
    "uncached_prompt_tokens_histogram": Named("Those of them that had to be computed.", (), TOKENS),
    "generation_tokens_histogram": Named("Output tokens of a finished request.", (), TOKENS),
    "func_latency_seconds": Named(
        "Of the function behind an endpoint, from a prompt's arrival to its last byte; one a prompt of a list.",
        ("name",),
        E2E_S,
    ),
}
HISTOGRAMS = {
    "grammar_compilation_time_seconds": Named("Of each grammar that was compiled.", (), STAGE_S),
    "queue_time_seconds": Named("In the waiting queue, up to the first batch.", (), QUEUE_S),
    "per_stage_req_latency_seconds": Named("Of each stage of a request.", ("stage",), STAGE_S),
}
# of a server of one side only
SIDE_GAUGES = {
    "num_prefill_bootstrap_queue_reqs": Named("Requests that wait for their decode server."),
    "num_prefill_inflight_queue_reqs": Named("Requests whose prompt is computed and not all of it sent."),
    "num_decode_prealloc_queue_reqs": Named("Requests that look for their prefill server or wait for room."),
    "num_decode_transfer_queue_reqs": Named("Requests whose KV is awaited."),
}
SIDE_COUNTERS = {
    "num_bootstrap_failed_reqs": Named("Requests that failed before any of their KV could travel."),
    "num_transfer_failed_reqs": Named("Requests whose transfer failed."),
}
SIDE_HISTOGRAMS = {
    "kv_transfer_bootstrap_ms": Named(
        "From a request's arrival until both sides found each other.", (), WAIT_MS
    ),
    "kv_transfer_alloc_ms": Named("From there until the decode side had room.", (), WAIT_MS),
    "kv_transfer_latency_ms": Named(
        "From the first piece sent to the last in place or confirmed.", (), WAIT_MS
    ),
    "kv_transfer_total_mb": Named("Of a transfer, in 1,000,000 bytes.", (), SIZE_MB),
    "kv_transfer_speed_gb_s": Named("Of a transfer, in 1,000,000,000 bytes a second.", (), SPEED_GB_S),
}
HTTP_COUNTERS = {
    "http_requests": Named("Requests to this port, of every kind.", ("endpoint", "method")),
    "http_responses": Named(
        "Answers that ended (499: the client left first).", ("endpoint", "status_code", "method")
    ),
}
HTTP_GAUGES = {"http_requests_active": Named("Requests that are being answered.", ("endpoint", "method"))}

# why SGLang has it and this server does not; the names as SGLang's facts sheet groups them
ABSENT = (
    (
        "A session holds no KV of its own, and there are no routing keys",
        "streaming_session_held_tokens, num_unique_running_routing_keys, routing_key_running_req_count, "
        "routing_key_all_req_count, routing_keys_active",
    ),
    (
        "No speculation, LoRA, host or storage cache, second attention kind or expert exists here",
        "spec_*, lora_pool_*, hicache_*, load_back_*, prefetch*, backup*, storage_prefetch_*, swa_*, mamba_*, "
        "max_total_num_tokens_swa, eplb_*",
    ),
    (
        "KV goes from pool to pool at once, the router tries a failed prefill again, and ranks do not run in step",
        "num_prefill_retries_total, num_decode_host_receive_*, num_decode_deferred_kv_release_reqs, "
        "decode_deferred_kv_release_*, pending_prealloc_token_usage, prealloc_*_token_usage, dp_*, prefill_delayer_*",
    ),
    (
        "There is no encoder server",
        "encoder_*",
    ),
    (
        "No event measures it",
        "grammar_schema_count, grammar_ebnf_size, grammar_tree_traversal_time_*, "
        "eviction_duration_seconds, scheduler_process_cpu_seconds_total, scheduler_stage_seconds_total, "
        "get_loads_duration_seconds, kv_cache_memory_usage_gb, weight_memory_usage_gb, graph_memory_usage_gb, "
        "startup_available_gpu_memory_gb, startup_time_seconds, startup_cuda_graph_time_seconds, "
        "weight_load_duration_seconds",
    ),
    (
        "It would need a model of the hardware or a goal that nobody sets here",
        "utilization, max_running_requests_under_SLO, estimated_flops_per_gpu_total, "
        "estimated_read_bytes_per_gpu_total, estimated_write_bytes_per_gpu_total",
    ),
)
