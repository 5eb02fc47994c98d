"""POST /v1/rerank: documents in the order of how well they fit a query.

A model that only gives embeddings ranks by the cosine between the vectors of query and document. A generating model
judges each document in its chat template, and its score is p(yes) / (p(yes) + p(no)) for the next token. Mirrors
SGLang's OpenAIServingRerank, which judges with Qwen3's reranker and has cross-encoders in place of the cosine; the
answer has its shape, a list of score, index and document. Imports: errors, messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest
from sgviz.messages import EmbeddingReqInput, GenerateReqInput
from sgviz.serving.context import EngineOutput, ServingContext
from sgviz.serving.serving_base import Exchange, extra_key_of
from sgviz.serving.serving_score import probabilities, scoring_input
from sgviz.serving.vector_base import VectorServing
from sgviz.serving.vector_protocol import RerankRequest

INSTRUCTION = "The document helps to answer the query."
JUDGE = "Say whether the document meets the instruction for the query. Answer with one word: yes or no."
VERDICTS = ("yes", "no")


class Ranking(ABC):
    """One way to score documents. The engine is asked `before` prompts besides those of the documents, first."""

    before: int

    @abstractmethod
    def ask(self, request: RerankRequest) -> GenerateReqInput:
        """All prompts. Raises BadRequest if this model cannot be asked so."""

    @abstractmethod
    def scores(self, outputs: Sequence[EngineOutput]) -> list[float]:
        """A score a document, higher is better."""


class CosineRanking(Ranking):
    """By the vectors, which have length 1."""

    before = 1

    def ask(self, request: RerankRequest) -> GenerateReqInput:
        return EmbeddingReqInput(
            text=[request.query, *request.documents],
            extra_key=extra_key_of(request),
            priority=request.priority,
        )

    def scores(self, outputs: Sequence[EngineOutput]) -> list[float]:
        query = outputs[0]["embedding"]
        return [sum(a * b for a, b in zip(query, output["embedding"])) for output in outputs[1:]]


class JudgeRanking(Ranking):
    """By the next token of a conversation about each document."""

    before = 0

    def __init__(self, context: ServingContext) -> None:
        self._context = context

    def ask(self, request: RerankRequest) -> GenerateReqInput:
        instruct = request.instruct or INSTRUCTION
        prompts = [
            self._context.templates.apply(
                [
                    {"role": "system", "content": JUDGE},
                    {
                        "role": "user",
                        "content": f"Instruction: {instruct}\nQuery: {request.query}\nDocument: {text}",
                    },
                ]
            )
            for text in request.documents
        ]
        return scoring_input(prompts, self._labels(), extra_key_of(request), request.priority)

    def scores(self, outputs: Sequence[EngineOutput]) -> list[float]:
        return [probabilities(output, softmax=True)[0] for output in outputs]

    def _labels(self) -> list[int]:
        """The tokens of the two verdicts. Raises BadRequest if one is no single token."""
        ids = [self._context.tokenizer.encode(word, add_special_tokens=False) for word in VERDICTS]
        if any(len(each) != 1 for each in ids):
            raise BadRequest(
                "this model cannot rerank: its tokenizer has no single tokens for yes and no; use a model for "
                "embeddings (an encoder, or is_embedding)"
            )
        return [each[0] for each in ids]


class OpenAIServingRerank(VectorServing[RerankRequest]):
    kind = RerankRequest
    type_name = "RerankRequest"
    rid_prefix = "rerank-"
    public_names = MappingProxyType({"text": "documents", "input_ids": "documents"})

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context)
        self._ranking: Ranking = JudgeRanking(context) if context.facts.is_generation else CosineRanking()

    def _batch_size(self, request: RerankRequest) -> int | None:
        return (len(request.documents) + self._ranking.before) or None

    def _texts(self, request: RerankRequest) -> Sequence[object]:
        return [request.query, *request.documents][1 - self._ranking.before :]

    def _validate_request(self, request: RerankRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        request.check()

    async def _convert_to_internal_request(self, request: RerankRequest) -> GenerateReqInput:
        return self._ranking.ask(request)

    def _whole_answer(
        self, exchange: Exchange[RerankRequest], outputs: list[EngineOutput]
    ) -> list[dict[str, Any]]:
        request = exchange.request
        own = outputs[self._ranking.before :]
        scores = self._ranking.scores(outputs)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        keep = request.return_documents is not False
        return [
            {
                "score": scores[index],
                "index": index,
                **({"document": request.documents[index]} if keep else {}),
                "meta_info": {
                    name: own[index]["meta_info"][name] for name in ("id", "prompt_tokens", "cached_tokens")
                },
            }
            for index in order
        ]
