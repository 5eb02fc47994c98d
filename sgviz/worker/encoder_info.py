"""What the scheduler is told of an encoder, by the real worker and by the mock. No torch.

Imports: config, messages (the spec), model (facts), worker.
"""

from __future__ import annotations

from pathlib import Path

from sgviz.config import DEFAULT_MAX_RUNNING, Settings
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.model.model_config import model_facts
from sgviz.worker.kv_budget import kv_tokens, usable_context
from sgviz.worker.protocol import WorkerInfo


def encoder_info(
    path: Path, settings: Settings, spec: EmbeddingSpec, *, device: str, dtype: str, weight_bytes: int = 0
) -> WorkerInfo:
    """Its pool has a slot for every token that may be under way."""
    facts = model_facts(path)
    context = usable_context(settings.model.context_length, facts.context_len)
    rows = settings.schedule.max_running_requests or DEFAULT_MAX_RUNNING
    size = kv_tokens(
        max_total_tokens=settings.cache.max_total_tokens,
        page_size=settings.cache.page_size,
        token_bytes=1,
        budget_bytes=rows * context,
        useful_tokens=rows * context,
    )
    return WorkerInfo(
        model=facts.name,
        vocab_size=facts.vocab_size,
        context_len=context,
        max_total_num_tokens=size,
        eos_token_ids=facts.eos_token_ids,
        device=device,
        dtype=dtype,
        num_layers=facts.num_layers,
        weight_bytes=weight_bytes,
        embedding=spec,
        is_generation=False,
    )
