"""The messages of a request that wants the vector of its prompt and no token: in, tokenized, out.

Each is its generating counterpart with `max_new_tokens` 0, so both kinds go the same way. Vectors travel as raw
little-endian float32. Mirrors EmbeddingReqInput, TokenizedEmbeddingReqInput and BatchEmbeddingOutput of SGLang's
io_struct; simplified: text and ids only, no pairs for cross-encoders. Imports: errors, messages.generate, numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from sgviz.errors import BadRequest
from sgviz.messages.generate import GenerateReqInput, OutputColumns, TokenizedGenerateReqInput
from sgviz.messages.sampling import SamplingParams

Pooling = Literal["last", "mean", "cls"]
NO_TOKENS = SamplingParams(max_new_tokens=0)
EMBEDDINGS_ONLY = (
    "this server gives embeddings only (its model is an encoder, or is_embedding is set), "
    "so it generates no tokens"
)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model turns a prompt into a vector.

    Attributes:
        dim: numbers of the whole vector; every vector has length 1.
        pooling: the hidden state of the last token, the mean of all, or that of the first (`cls`).
        is_encoder: every token sees all others; there is no KV, and no token can be generated.
        matryoshka: a beginning of the vector is a vector too. matryoshka_dimensions: how long it may be; empty: any.
    """

    dim: int
    pooling: Pooling = "last"
    is_encoder: bool = False
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()

    @property
    def whole_prompt(self) -> bool:
        """The vector needs every token's hidden state, so no cached prefix can stand for one."""
        return self.pooling != "last"

    def check(self, dimensions: int | None) -> None:
        """Raise BadRequest unless the model has a vector of so many numbers; None: the whole one."""
        if dimensions is None or dimensions == self.dim:
            return
        if not self.matryoshka:
            raise BadRequest(
                f"dimensions must be {self.dim} or left out, got {dimensions}: vectors of this model cannot be cut "
                "(it is not trained for it)",
                param="dimensions",
            )
        allowed = self.matryoshka_dimensions
        if (allowed and dimensions not in allowed) or not 0 < dimensions <= self.dim:
            range_ = ", ".join(map(str, allowed)) if allowed else f"1 to {self.dim}"
            raise BadRequest(f"dimensions must be one of {range_}, got {dimensions}", param="dimensions")


class EmbeddingReqInput(GenerateReqInput, kw_only=True):
    """What serving asks of the TokenizerManager for vectors; SGLang's native request.

    Attributes:
        dimensions: length of the vector, for models whose vectors may be cut.
    """

    dimensions: int | None = None
    sampling_params: SamplingParams | list[SamplingParams] = NO_TOKENS


class TokenizedEmbeddingReqInput(TokenizedGenerateReqInput, kw_only=True, tag=True, array_like=True):
    """One prompt as ids, on its way to the scheduler for its vector."""

    dimensions: int | None = None


class BatchEmbeddingOutput(OutputColumns, kw_only=True, tag=True, array_like=True):
    """Scheduler to detokenizer, which passes it on unchanged to the TokenizerManager.

    `embeddings`: by rid, float32 as bytes; empty for a request that was aborted.
    """

    embeddings: list[bytes] = msgspec.field(default_factory=list)


def pack_vector(numbers: Sequence[float] | np.typing.NDArray[np.floating]) -> bytes:
    """Little-endian float32."""
    return np.asarray(numbers, dtype="<f4").tobytes()


def unpack_vector(packed: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(packed, dtype="<f4").tolist()
    return numbers
