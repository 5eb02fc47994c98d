"""Tokens or a vector: what the engine can give of the two, and the messages of a request for a vector.

SGLang serves one of the two, by `--is-embedding`; here a generating model gives both unless that is set. Imports:
errors, events (stamps), messages.
"""

from __future__ import annotations

from sgviz.errors import BadRequest
from sgviz.events.time_stats import TimeStats
from sgviz.messages import (
    EmbeddingReqInput,
    GenerateReqInput,
    SamplingParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sgviz.messages.embedding import EMBEDDINGS_ONLY
from sgviz.messages.generate import new_rid
from sgviz.messages.rids import HEALTH_CHECK_PREFIX
from sgviz.tokenizer_manager.state import Limits


def check_task(obj: GenerateReqInput, limits: Limits) -> None:
    """Raise BadRequest for what this engine's model does not do."""
    if not isinstance(obj, EmbeddingReqInput):
        if not limits.is_generation:
            raise BadRequest(EMBEDDINGS_ONLY)
        return
    if limits.embedding is None:
        raise BadRequest("this model gives no embeddings")
    limits.embedding.check(obj.dimensions)


def of_kind(message: TokenizedGenerateReqInput, obj: GenerateReqInput) -> TokenizedGenerateReqInput:
    """The message as `obj` is: for a request for a vector a TokenizedEmbeddingReqInput."""
    if not isinstance(obj, EmbeddingReqInput):
        return message
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return TokenizedEmbeddingReqInput(**fields, dimensions=obj.dimensions)


def probe(limits: Limits, now: int) -> TokenizedGenerateReqInput:
    """One greedy token after id 0 (where there are no tokens: its vector), under a rid that is in no table."""
    tokens = 1 if limits.is_generation else 0
    message = TokenizedGenerateReqInput(
        rid=new_rid(HEALTH_CHECK_PREFIX),
        input_ids=[0],
        sampling_params=SamplingParams(max_new_tokens=tokens, temperature=0.0).normalize(),
        stream=False,
        time_stats=TimeStats(created=now, api_server_dispatch=now),
    )
    return message if limits.is_generation else of_kind(message, EmbeddingReqInput())
