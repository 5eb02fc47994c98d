"""make_worker: from settings to the worker they name. torch is imported only if the worker needs it.

Imports: config, model (facts only), worker.
"""

from __future__ import annotations

from sgviz.config import DEFAULT_MAX_RUNNING, Settings
from sgviz.worker.kv_budget import (
    CPU_KV_BYTES,
    bytes_per_token,
    kv_tokens,
    usable_context,
)
from sgviz.worker.logit_processors import load_logit_processors
from sgviz.worker.protocol import Worker, WorkerInfo
from sgviz.worker.sim.hardware import DEVICE_PREFIX

MOCK_EOS_EVERY = 256  # a mock answer without a limit ends after about so many tokens
MOCK_ITEMSIZE = 4  # memory is planned as if the model ran in float32


def make_worker(settings: Settings, rank: int = 0) -> Worker:
    """The worker for `settings`: `device="mock"` and `device="sim:..."` load no weights, everything else does.

    Args:
        rank: of the data parallel ranks the one that it is for; it says which GPU.

    Raises:
        StartupError: the model is unknown or cannot be loaded. ConfigError: a setting does not fit it.
    """
    # mock and simulated devices have no logits; that the names can be loaded is found out all the same
    processors = load_logit_processors(settings.model.custom_logit_processors)
    if settings.model.device == "mock":
        return _mock(settings)
    if settings.model.device.startswith(DEVICE_PREFIX):
        from sgviz.worker.sim.build import make_sim_worker

        return make_sim_worker(settings)
    from sgviz.model.embedding_config import embedding_spec
    from sgviz.model.fetch import resolve_model

    folder = resolve_model(settings.model.model_path)
    spec = embedding_spec(folder, settings.model.pooling)
    if spec.is_encoder:
        from sgviz.worker.encoder_worker import EncoderWorker

        return EncoderWorker(folder, settings, spec, settings.parallel.gpu_of(rank))
    from sgviz.worker.tp_worker import TpModelWorker

    return TpModelWorker(
        settings.model.model_path,
        dtype=settings.model.dtype,
        quantization=settings.model.quantization,
        device=settings.model.device,
        gpu=settings.parallel.gpu_of(rank),
        max_total_tokens=settings.cache.max_total_tokens,
        page_size=settings.cache.page_size,
        max_running_requests=settings.schedule.max_running_requests,
        context_length=settings.model.context_length,
        torch_threads=settings.model.torch_threads,
        random_seed=settings.model.random_seed,
        mem_fraction_static=settings.cache.mem_fraction_static,
        embedding=spec,
        is_generation=not settings.model.is_embedding,
        logit_processors=processors,
    )


def _mock(settings: Settings) -> Worker:
    from sgviz.worker.mock_worker import MockWorker

    info = mock_info_of(settings)
    return MockWorker(
        info,
        duration=settings.model.mock_step_ms / 1000 or None,
        eos_every=MOCK_EOS_EVERY if info.eos_token_ids else 0,
        page_size=settings.cache.page_size,
    )


def mock_info_of(settings: Settings) -> WorkerInfo:
    """What a float32 CPU worker would tell of the model, without its weights."""
    from sgviz.model.embedding_config import embedding_spec
    from sgviz.model.fetch import resolve_model
    from sgviz.model.model_config import model_facts

    folder = resolve_model(settings.model.model_path)
    facts, spec = model_facts(folder), embedding_spec(folder, settings.model.pooling)
    if spec.is_encoder:
        from sgviz.worker.encoder_info import encoder_info

        return encoder_info(folder, settings, spec, device="mock", dtype="float32")
    context = usable_context(settings.model.context_length, facts.context_len)
    token_bytes = bytes_per_token(facts, MOCK_ITEMSIZE)
    size = kv_tokens(
        max_total_tokens=settings.cache.max_total_tokens,
        page_size=settings.cache.page_size,
        token_bytes=token_bytes,
        budget_bytes=CPU_KV_BYTES,
        useful_tokens=(settings.schedule.max_running_requests or DEFAULT_MAX_RUNNING) * context,
    )
    return WorkerInfo(
        model=facts.name,
        vocab_size=facts.vocab_size,
        context_len=context,
        max_total_num_tokens=size,
        eos_token_ids=facts.eos_token_ids,
        device="mock",
        dtype="float32",
        num_layers=facts.num_layers,
        bytes_per_token=token_bytes,
        embedding=spec,
        is_generation=not settings.model.is_embedding,
    )
