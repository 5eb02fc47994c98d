"""Settings of the engine: model, simulated device, KV memory, scheduler, structured output.

Imports: config.field.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sgviz.config.field import field_meta

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_RUNNING = 256  # requests that may decode together, where memory allows, if nobody says otherwise


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model runs, and on what."""

    model_path: Annotated[
        str,
        field_meta(
            "Default model's name, a tiny model's name, a local Hugging Face folder or a hub id.", "ours"
        ),
    ] = DEFAULT_MODEL
    tokenizer_path: Annotated[
        str | None, field_meta("Folder of the tokenizer, if not the model's.", "SGLang")
    ] = None
    weight_version: Annotated[
        str, field_meta("Name of the weights in answers, until others are loaded.", "SGLang")
    ] = "default"
    served_model_name: Annotated[
        str | None, field_meta("Name clients see and ask for; default: the model path.", "SGLang")
    ] = None
    chat_template: Annotated[
        str | None, field_meta("File with a Jinja chat template that replaces the model's own.", "SGLang")
    ] = None
    is_embedding: Annotated[
        bool,
        field_meta(
            "Vectors only: generating endpoints are refused. An encoder (BERT) implies it; without it a generating "
            "model gives vectors too.",
            "SGLang",
        ),
    ] = False
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        field_meta(
            "Which hidden states make a vector: of the last token, the mean of all, or of the first (cls, encoders "
            "only); auto: as the folder's 1_Pooling/config.json says, else last, and cls for an encoder.",
            "ours; SGLang takes it from the architecture",
        ),
    ] = "auto"
    context_length: Annotated[
        Annotated[int, Meta(ge=8)] | None,
        field_meta("Positions a request may use; default: the model's.", "SGLang"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        field_meta(
            "Number format of weights and KV; auto: float32 on CPU, bfloat16 on GPU.",
            "SGLang (auto); ours on CPU",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["w8a8_int8"] | None,
        field_meta(
            "w8a8_int8: weights and activations of the projections in int8, on a CPU; answers differ a little.",
            "SGLang (none)",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mock", "sim:a100-80g", "sim:h100-sxm", "sim:h200", "sim:l4"],
        field_meta(
            "auto takes a GPU where there is one; mock computes tokens by rule and loads no model; sim:GPU takes "
            "as long as that GPU would (see sim_model).",
            "ours",
        ),
    ] = "auto"
    torch_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        field_meta("Threads of torch in the scheduler; default: torch's own.", "ours"),
    ] = None
    random_seed: Annotated[
        int, field_meta("Seed for requests that bring none.", "SGLang draws one; ours is fixed")
    ] = 42
    custom_logit_processors: Annotated[
        str | None,
        field_meta(
            "Logit processors that requests may name, comma separated: name=module:Class or name=file.py:Class.",
            "ours; SGLang: code in requests",
        ),
    ] = None
    mock_step_ms: Annotated[
        float, field_meta("Duration of one forward of the mock device in milliseconds.", "ours", ge=0.0)
    ] = 0.0


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated device (device sim:...). Everything measured on it is simulated."""

    sim_model: Annotated[
        Literal[
            "llama-3-8b",
            "llama-3-70b",
            "llama-2-7b",
            "llama-2-70b",
            "qwen2.5-7b",
            "qwen2.5-0.5b",
            "smollm2-135m",
        ],
        field_meta(
            "Model whose shape decides time and memory; the model path gives the tokenizer only.", "ours"
        ),
    ] = "llama-3-8b"
    sim_tp: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        field_meta("GPUs the simulated model is spread over; default: 4 for a 70B, else 1.", "ours"),
    ] = None
    sim_cost: Annotated[
        str | None,
        field_meta(
            "JSON file of costs fitted from a recording (FittedCost.save), in place of the roofline.", "ours"
        ),
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory."""

    max_total_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=2**31 - 1)] | None,
        field_meta("KV slots of the pool; default: what 1 GiB (CPU) or the GPU's fraction holds.", "ours"),
    ] = None
    mem_fraction_static: Annotated[
        float,
        field_meta(
            "Share of GPU memory for weights and KV; no effect on CPU.",
            "SGLang: by device; ours 0.85",
            gt=0.0,
            le=1.0,
        ),
    ] = 0.85
    page_size: Annotated[int, field_meta("KV slots per page.", "SGLang", ge=1, le=256)] = 1
    disable_radix_cache: Annotated[bool, field_meta("Never share prefixes between requests.", "SGLang")] = (
        False
    )


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler may put into a batch, and in which order."""

    schedule_policy: Annotated[
        str,
        field_meta(
            "Order of the waiting queue: fcfs, lpm, dfs-weight, lof, random, or your own policy as "
            "module:Class or file.py:Class.",
            "SGLang; classes are ours",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        field_meta(
            "Above 1 reserves more memory for running requests, below 1 less.", "SGLang", gt=0.0, le=10.0
        ),
    ] = 1.0
    chunked_prefill_size: Annotated[
        int,
        field_meta(
            "Prompt tokens of one batch; a longer prompt is cut. -1: never cut. 0 is not allowed.",
            "SGLang on small devices",
            ge=-1,
        ),
    ] = 2048
    max_prefill_tokens: Annotated[
        int,
        field_meta(
            "Prompt tokens after which a batch takes no further request; one prompt alone may be longer.",
            "SGLang",
            ge=1,
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None, field_meta("New requests of one batch.", "SGLang")
    ] = None
    max_running_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        field_meta("Requests that may decode together; default: by memory, at most 256 on CPU.", "ours"),
    ] = None
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        field_meta("Requests that may wait; one more is answered with 503.", "SGLang"),
    ] = None
    enable_priority_scheduling: Annotated[
        bool,
        field_meta(
            "Order the queue by the requests' `priority`, then by the policy: fcfs, lof or one of your own.",
            "SGLang",
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, field_meta("Priority 1 goes before priority 2 (default: 2 before 1).", "SGLang")
    ] = False
    default_priority_value: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        field_meta("Priority of requests that bring none; default: behind all others.", "SGLang"),
    ] = None
    abort_on_priority_when_disabled: Annotated[
        bool,
        field_meta(
            "Answer a request that brings a priority with 503 where priority scheduling is off.", "SGLang"
        ),
    ] = False
    disable_priority_preemption: Annotated[
        bool, field_meta("Never send a running request back to the queue for one that waits.", "SGLang")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        field_meta(
            "A waiting request can preempt running ones whose priority is worse by more than this.",
            "SGLang",
            ge=0,
        ),
    ] = 10
    retraction_policy: Annotated[
        Literal["length", "priority"],
        field_meta(
            "Who goes first when memory runs out: fewest output tokens, or (where priorities count) lowest priority "
            "and then that.",
            "SGLang",
        ),
    ] = "length"
    enable_mixed_chunk: Annotated[
        bool, field_meta("Let decoding requests ride along with a prompt chunk.", "SGLang")
    ] = False
    disable_consecutive_prefill_overlap: Annotated[
        bool,
        field_meta(
            "Overlap loop: process a prefill's result before the next prefill is launched (first tokens leave sooner).",
            "SGLang: SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
        ),
    ] = False
    disable_overlap_schedule: Annotated[
        bool,
        field_meta(
            "Process each result before the next launch (the normal loop).", "SGLang: overlap; ours: normal"
        ),
    ] = True
    watchdog_timeout: Annotated[
        float,
        field_meta(
            "Seconds one turn of the scheduler (one forward) may take before it counts as stuck.",
            "SGLang",
            gt=0.0,
        ),
    ] = 300.0


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output."""

    grammar_backend: Annotated[
        Literal["llguidance", "none"],
        field_meta(
            "What compiles json_schema, regex, ebnf and structural_tag; none: refuse them.",
            "SGLang: xgrammar",
        ),
    ] = "llguidance"
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        field_meta(
            "Regular expression of what may stand once between two tokens of JSON; default: a space, or a line "
            "break and up to 32 blanks.",
            "SGLang: any whitespace",
        ),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, field_meta("Compact JSON: nothing may stand between its tokens.", "SGLang")
    ] = False
    grammar_timeout: Annotated[
        float, field_meta("Seconds a request waits for its grammar to compile.", "SGLang: 50", gt=0.0)
    ] = 30.0
