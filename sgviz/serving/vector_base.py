"""What the endpoints that generate nothing share: rids, the model's name, one whole answer, its usage.

Mirrors the common half of SGLang's serving classes for embeddings, scores and rankings. Imports: errors, messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from sgviz.errors import BadRequest, Unavailable
from sgviz.messages.generate import new_rid
from sgviz.serving.arrivals import Arrival, text_chars
from sgviz.serving.context import EngineOutput
from sgviz.serving.later import On, refuse_later
from sgviz.serving.serving_base import AnswerStream, Exchange, ServingBase, check_model
from sgviz.serving.vector_protocol import VectorRequest

VR = TypeVar("VR", bound=VectorRequest)


class VectorServing(ServingBase[VR]):
    """One endpoint whose answer comes whole. A subclass names its prompts and makes the answer."""

    rid_prefix = ""
    fields = On.COMPLETION

    def _rid(self, request: VR) -> str | list[str]:
        return request.rid or new_rid(self.rid_prefix)

    def _arrival(self, request: VR, path: str) -> Arrival:
        return Arrival(
            type=self.type_name,
            path=path,
            stream=False,
            model=request.model or self.context.facts.served_model_name,
            chars=text_chars(self._texts(request)),
        )

    def _validate_request(self, request: VR, body: dict[str, Any]) -> None:
        check_model(request.model, self.context.facts)
        refuse_later(body, self.fields)
        size = self._batch_size(request)
        if isinstance(request.rid, list) and len(request.rid) != size:
            prompts = "one prompt" if size is None else f"{size} prompts"
            raise BadRequest(f"rid has {len(request.rid)} entries for {prompts}", param="rid")

    @abstractmethod
    def _texts(self, request: VR) -> Sequence[object]:
        """The prompts, for the event of their arrival; those that are no texts count no characters."""

    def _handle_non_streaming_request(self, exchange: Exchange[VR], outputs: list[EngineOutput]) -> Response:
        refuse_aborted(outputs)
        return super()._handle_non_streaming_request(exchange, outputs)

    def _open_stream(self, exchange: Exchange[VR]) -> AnswerStream:
        raise BadRequest(f"a {self.type_name} is answered whole", param="stream")


def refuse_aborted(outputs: Sequence[EngineOutput]) -> None:
    """Raise Unavailable if somebody ended a request: of a vector or a score, unlike of a text, there is no part."""
    for output in outputs:
        reason = output["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise Unavailable(reason.get("message") or "the request was aborted")


def usage_of(outputs: Sequence[EngineOutput]) -> dict[str, Any]:
    """Prompt tokens of all outputs together; nothing is generated."""
    tokens = sum(output["meta_info"]["prompt_tokens"] for output in outputs)
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
