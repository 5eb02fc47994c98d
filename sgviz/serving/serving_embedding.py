"""POST /v1/embeddings in OpenAI's shape, and POST /encode in SGLang's own.

Mirrors SGLang's OpenAIServingEmbedding and the `/encode` handler of its http_server. Imports: errors, messages.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sgviz.errors import BadRequest
from sgviz.messages import EmbeddingReqInput, GenerateReqInput
from sgviz.messages.embedding import pack_vector
from sgviz.serving.context import EngineOutput
from sgviz.serving.later import On
from sgviz.serving.protocol import batch_size, ids_of, prompt_of
from sgviz.serving.serving_base import Exchange, extra_key_of
from sgviz.serving.vector_base import VectorServing, usage_of
from sgviz.serving.vector_protocol import EmbeddingRequest, EncodeRequest, check_format


class OpenAIServingEmbedding(VectorServing[EmbeddingRequest]):
    kind = EmbeddingRequest
    type_name = "EmbeddingRequest"
    rid_prefix = "embd-"
    public_names = MappingProxyType({"text": "input", "input_ids": "input"})

    def _batch_size(self, request: EmbeddingRequest) -> int | None:
        return batch_size(request.input)

    def _texts(self, request: EmbeddingRequest) -> Sequence[object]:
        return [request.input] if isinstance(request.input, str) else request.input

    def _validate_request(self, request: EmbeddingRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        check_format(request.encoding_format)
        kind, given = prompt_of(request.input, "input")
        for text in (given if isinstance(given, list) else [given]) if kind == "text" else ():
            if not text.strip():
                raise BadRequest("input must not be an empty text, or one of white space only", param="input")

    async def _convert_to_internal_request(self, request: EmbeddingRequest) -> GenerateReqInput:
        kind, given = prompt_of(request.input, "input")
        return EmbeddingReqInput(
            text=given if kind == "text" else None,
            input_ids=given if kind == "input_ids" else None,
            dimensions=request.dimensions,
            extra_key=extra_key_of(request),
            priority=request.priority,
        )

    def _whole_answer(
        self, exchange: Exchange[EmbeddingRequest], outputs: list[EngineOutput]
    ) -> dict[str, Any]:
        as_text = exchange.request.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(output["embedding"]) if as_text else output["embedding"],
            }
            for index, output in enumerate(outputs)
        ]
        model = self.context.facts.served_model_name
        return {"object": "list", "data": data, "model": model, "usage": usage_of(outputs)}


class ServingEncode(VectorServing[EncodeRequest]):
    kind = EncodeRequest
    type_name = "EmbeddingReqInput"
    fields = On.GENERATE
    public_names: MappingProxyType[str, str] = MappingProxyType({})

    def _batch_size(self, request: EncodeRequest) -> int | None:
        return batch_size(request.input_ids if request.text is None else request.text)

    def _texts(self, request: EncodeRequest) -> Sequence[object]:
        return [request.text] if isinstance(request.text, str) else request.text or []

    def _validate_request(self, request: EncodeRequest, body: dict[str, Any]) -> None:
        super()._validate_request(request, body)
        if (request.text is None) == (request.input_ids is None):
            given = "neither" if request.text is None else "both"
            raise BadRequest(f"give exactly one of text and input_ids, got {given}", param="text")
        if request.input_ids is not None:
            ids_of(request.input_ids, "input_ids")

    async def _convert_to_internal_request(self, request: EncodeRequest) -> GenerateReqInput:
        return EmbeddingReqInput(
            text=request.text,
            input_ids=request.input_ids,
            dimensions=request.dimensions,
            extra_key=extra_key_of(request),
            priority=request.priority,
        )

    def _whole_answer(self, exchange: Exchange[EncodeRequest], outputs: list[EngineOutput]) -> Any:
        return outputs[0] if exchange.obj.is_single else outputs


def _base64(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(pack_vector(vector)).decode()
