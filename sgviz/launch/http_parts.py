"""What an app of the engine is made of, in the main process and in a tokenizer worker alike.

Imports: serving, config, launch.messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from sgviz import __version__
from sgviz.config import Settings
from sgviz.config.named_processors import named_processors
from sgviz.events import Tracer
from sgviz.launch.messages import InitInfo
from sgviz.model.model_config import read_json
from sgviz.serving.context import (
    ChatTemplates,
    Keys,
    ModelFacts,
    RequestLogSwitch,
    ServerStatus,
    ServingContext,
    Tokenizer,
)
from sgviz.serving.custom_labels import CustomLabels
from sgviz.tokenizer_manager import Limits, TokenizerManager

DEFAULT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def limits_of(settings: Settings, info: InitInfo) -> Limits:
    """What a request must fit into, `info` being the scheduler's."""
    return Limits(
        context_len=info.context_len,
        max_req_len=info.max_req_len,
        max_req_input_len=info.max_req_input_len,
        max_total_num_tokens=info.max_total_num_tokens,
        page_size=settings.cache.page_size,
        vocab_size=info.vocab_size,
        logit_processors=tuple(named_processors(settings.model.custom_logit_processors)),
        embedding=info.embedding,
        is_generation=info.is_generation,
        dp_size=settings.parallel.dp_size,
        by_room=settings.parallel.load_balance_method == "follow_bootstrap_room",
        disaggregation_mode=settings.disaggregation.disaggregation_mode,
    )


def keys_of(settings: Settings) -> Keys:
    return Keys(api_key=settings.serve.api_key, admin_api_key=settings.serve.admin_api_key)


def serving_context(
    settings: Settings,
    info: InitInfo,
    model_dir: Path,
    *,
    manager: TokenizerManager,
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    trace: Tracer,
    status: ServerStatus,
    request_log: RequestLogSwitch,
    mounts: Sequence[Callable[[FastAPI], None]],
) -> ServingContext:
    """The context of an app; `trace` is that of the HTTP layer."""
    serve, observe = settings.serve, settings.observe
    return ServingContext(
        tokenizer_manager=manager,
        tokenizer=tokenizer,
        templates=templates,
        facts=_facts(settings, info, model_dir),
        trace=trace,
        status=status,
        settings=settings.public(),
        keys=keys_of(settings),
        enable_cache_report=serve.enable_cache_report,
        default_include_usage=serve.stream_response_default_include_usage,
        tool_call_parser=serve.tool_call_parser,
        reasoning_parser=serve.reasoning_parser,
        health_timeout=settings.http.health_timeout,
        http=settings.http,
        request_log=request_log,
        custom_labels=CustomLabels(
            header=observe.tokenizer_metrics_custom_labels_header, allowed=observe.allowed_labels
        ),
        mounts=mounts,
    )


def _facts(settings: Settings, info: InitInfo, model_dir: Path) -> ModelFacts:
    model = settings.model
    return ModelFacts(
        served_model_name=settings.served_model_name,
        model_path=model.model_path,
        tokenizer_path=model.tokenizer_path or model.model_path,
        context_len=info.context_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        version=__version__,
        default_sampling=_default_sampling(model_dir),
        is_generation=info.is_generation,
        embedding=info.embedding,
    )


def _default_sampling(model_dir: Path) -> dict[str, float]:
    """Sampling defaults of the model's generation_config.json, where it has one."""
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    return {name: config[name] for name in DEFAULT_SAMPLING if isinstance(config.get(name), (int, float))}  # type: ignore[misc]
