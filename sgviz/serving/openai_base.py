"""What chat and text completions share on top of `ServingBase`: rids, model check, usage, answer frame.

Mirrors the common half of SGLang's OpenAIServingBase.
Imports: messages.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from sgviz.errors import BadRequest
from sgviz.messages import SamplingParams
from sgviz.messages.embedding import EMBEDDINGS_ONLY
from sgviz.messages.generate import new_rid
from sgviz.serving.context import EngineOutput
from sgviz.serving.later import On, refuse_later
from sgviz.serving.openai_stream import UsageSum, finish_of
from sgviz.serving.protocol import OpenAIRequest
from sgviz.serving.serving_base import Exchange, ServingBase, check_model

OR = TypeVar("OR", bound=OpenAIRequest)


class OpenAIServingBase(ServingBase[OR]):
    """One OpenAI endpoint. Class attributes say how its ids and objects are called."""

    rid_prefix: str
    object_name: str
    chunk_name: str
    fields: On

    def _rid(self, request: OR) -> str:
        return request.rid or new_rid(self.rid_prefix)

    def _validate_request(self, request: OR, body: dict[str, Any]) -> None:
        check_model(request.model, self.context.facts)
        if not self.context.facts.is_generation:
            raise BadRequest(EMBEDDINGS_ONLY)
        refuse_later(body, self.fields)

    def _head(self, exchange: Exchange[OR], object_name: str) -> dict[str, Any]:
        return {
            "id": exchange.rid,
            "object": object_name,
            "created": exchange.created,
            "model": self.context.facts.served_model_name,
        }

    def _usage(self, exchange: Exchange[OR]) -> UsageSum:
        return UsageSum(self._n(exchange), self.context.enable_cache_report)

    @staticmethod
    def _n(exchange: Exchange[OR]) -> int:
        params = exchange.obj.sampling_params
        assert isinstance(params, SamplingParams)  # OpenAI bodies have one set for all prompts
        return params.n

    def _usage_options(self, request: OR) -> tuple[bool, bool]:
        """`(include_usage, continuous_usage_stats)`."""
        options = request.stream_options
        include = options.include_usage if options else None
        if include is None:
            include = self.context.default_include_usage
        return include, bool(options and options.continuous_usage_stats)

    def _whole_answer(self, exchange: Exchange[OR], outputs: list[EngineOutput]) -> dict[str, Any]:
        usage = self._usage(exchange)
        choices = []
        for index, output in enumerate(outputs):
            content = self._choice(exchange, index, output)
            usage.note(index, output["meta_info"])
            reason, matched = finish_of(output["meta_info"]["finish_reason"])
            reason = self._finish_reason(content, reason)
            choices.append({"index": index, **content, "finish_reason": reason, "matched_stop": matched})
        return {**self._head(exchange, self.object_name), "choices": choices, "usage": usage.total()}

    def _finish_reason(self, content: dict[str, Any], reason: str) -> str:
        """The finish_reason of a choice with `content`, `reason` being the engine's."""
        return reason

    @abstractmethod
    def _choice(self, exchange: Exchange[OR], index: int, output: EngineOutput) -> dict[str, Any]:
        """Text and logprobs of one choice of a whole answer."""
