"""The bodies of the endpoints that generate nothing: vectors, scores, rankings. Mirrors SGLang's protocol.

Simplified: texts and ids only. Imports: errors, serving.protocol.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgviz.errors import BadRequest
from sgviz.serving.protocol import Int64, is_ids

FORMATS = ("float", "base64")


class VectorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them have in common."""

    model: str | None = None
    rid: str | list[str] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    routed_dp_rank: Int64 | None = None
    data_parallel_rank: Int64 | None = None


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True):
    """POST /v1/embeddings. `input`: str, [str], [int] or [[int]]."""

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: Int64 | None = None


class EncodeRequest(VectorRequest, frozen=True, kw_only=True):
    """POST /encode; SGLang's native body, of which EmbeddingReqInput is made."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    dimensions: Int64 | None = None


class ScoringRequest(VectorRequest, frozen=True, kw_only=True):
    """POST /v1/score. `query` and `items` are texts, or ids: [int] and [[int]]."""

    query: str | list[int]
    items: str | list[Any]
    label_token_ids: list[Int64]
    apply_softmax: bool | None = None
    item_first: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Query and item of each item, joined.

        Raises:
            BadRequest: there are no items, or they are not of the query's kind.
        """
        items = [self.items] if isinstance(self.items, str) else self.items
        if not items:
            raise BadRequest("items must not be empty", param="items")
        query: Any = self.query
        wanted = "a string" if isinstance(query, str) else "a list of integers"
        for number, item in enumerate(items):
            if not (isinstance(item, str) if isinstance(query, str) else is_ids(item)):
                shown = repr(item)[:60]
                raise BadRequest(
                    f"items[{number}]: expected {wanted}, as the query is one, got {shown}", param="items"
                )
        return [item + query if self.item_first else query + item for item in items]


class RerankRequest(VectorRequest, frozen=True, kw_only=True):
    """POST /v1/rerank. `instruct`: for models that judge, what a document has to meet."""

    query: str
    documents: list[str]
    top_n: Int64 | None = None
    return_documents: bool | None = None
    instruct: str | None = None

    def check(self) -> None:
        """Raise BadRequest for an empty query or list, or a top_n that is none."""
        if not self.query.strip():
            raise BadRequest("query must not be empty", param="query")
        if not self.documents:
            raise BadRequest("documents must not be empty", param="documents")
        if self.top_n is not None and self.top_n < 1:
            raise BadRequest(f"top_n must be at least 1, got {self.top_n}", param="top_n")


def check_format(encoding_format: str | None) -> None:
    """Raise BadRequest unless it is a format of vectors, or none."""
    if encoding_format is not None and encoding_format not in FORMATS:
        raise BadRequest(
            f"encoding_format must be one of {', '.join(FORMATS)}, got {encoding_format!r}",
            param="encoding_format",
        )
