"""POST /v1/score: how probable each of some tokens is as the next one, for a query with each of several items.

A request an item, which generates nothing: the answer is the log-probabilities of the labels behind its last token.
Mirrors SGLang's OpenAIServingScore. Simplified: no multi-item sequences, no classifiers. Imports: errors, messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput, SamplingParams
from sgviz.serving.context import EngineOutput
from sgviz.serving.serving_base import Exchange, extra_key_of
from sgviz.serving.vector_base import VectorServing, usage_of
from sgviz.serving.vector_protocol import ScoringRequest


class OpenAIServingScore(VectorServing[ScoringRequest]):
    kind = ScoringRequest
    type_name = "ScoringRequest"
    rid_prefix = "score-"
    public_names = MappingProxyType(
        {"text": "items", "input_ids": "items", "token_ids_logprob": "label_token_ids"}
    )

    def _batch_size(self, request: ScoringRequest) -> int | None:
        return 1 if isinstance(request.items, str) else len(request.items) or None

    def _texts(self, request: ScoringRequest) -> Sequence[object]:
        return [request.items] if isinstance(request.items, str) else request.items

    def _validate_request(self, request: ScoringRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        request.prompts()
        check_labels(request.label_token_ids, self.context.facts.vocab_size)

    async def _convert_to_internal_request(self, request: ScoringRequest) -> GenerateReqInput:
        return scoring_input(
            request.prompts(), request.label_token_ids, extra_key_of(request), request.priority
        )

    def _whole_answer(
        self, exchange: Exchange[ScoringRequest], outputs: list[EngineOutput]
    ) -> dict[str, Any]:
        softmax = bool(exchange.request.apply_softmax)
        return {
            "object": "scoring",
            "scores": [probabilities(output, softmax=softmax) for output in outputs],
            "model": self.context.facts.served_model_name,
            "usage": usage_of(outputs),
        }


def check_labels(labels: Sequence[int], vocab_size: int) -> None:
    """Raise BadRequest unless there are labels, each once and in the vocabulary."""
    name = "label_token_ids"
    if not labels:
        raise BadRequest(f"{name} must not be empty", param=name)
    if len(set(labels)) < len(labels):
        raise BadRequest(f"{name} must not hold an id twice, got {list(labels)}", param=name)
    bad = next((token for token in labels if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadRequest(f"{name}: id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param=name)


def scoring_input(
    prompts: list[str] | list[list[int]], labels: Sequence[int], extra_key: str | None, priority: int | None
) -> GenerateReqInput:
    """A request that asks for the log-probabilities of `labels` behind each of `prompts`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return GenerateReqInput(
        text=texts or None,
        input_ids=None if texts else [list(prompt) for prompt in prompts if not isinstance(prompt, str)],
        sampling_params=SamplingParams(max_new_tokens=0),
        return_logprob=True,
        token_ids_logprob=list(labels),
        extra_key=extra_key,
        priority=priority,
    )


def probabilities(output: EngineOutput, *, softmax: bool) -> list[float]:
    """Of the labels, in their order; with `softmax` they share 1 among themselves."""
    entries = output["meta_info"]["output_token_ids_logprobs"][0]
    values = [math.exp(logprob) for logprob, *_ in entries]
    if not softmax:
        return values
    best = max(logprob for logprob, *_ in entries)
    weights = [math.exp(logprob - best) for logprob, *_ in entries]
    whole = sum(weights)
    return [weight / whole for weight in weights]
