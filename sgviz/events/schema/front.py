"""Events of the front and the back of the way: serving, tokenizer manager, detokenizer. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body, Reason

# ---------------------------------------------------------------- serving


class RequestReceived(Body, frozen=True, tag="request.received"):
    """An HTTP body became a typed request (`type`: ChatCompletionRequest, CompletionRequest, GenerateReqInput).

    `labels`: names and values for metrics that it brought in a header, of those that are allowed.
    """

    rid: str
    type: str
    path: str
    stream: bool
    model: str
    messages: int
    chars: int
    labels: tuple[tuple[str, str], ...] = ()


class RequestConverted(Body, frozen=True, tag="request.converted"):
    """Serving made a GenerateReqInput: chat template applied, sampling settled. `size`: ids or characters.

    `embedding`: it made an EmbeddingReqInput, which wants a vector and no token.
    """

    rid: str
    prompt_kind: str
    size: int
    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] = ()
    embedding: bool = False


class ChunkSent(Body, frozen=True, tag="chunk.sent"):
    """Serving handed something to the HTTP layer.

    `part`: role, delta (content), reasoning, tool_call, finish, usage, done, error (streamed) or body (not
    streamed). `chars` of text in it: content, thoughts, a function's name or arguments.
    """

    rid: str
    index: int
    part: str
    chars: int


class ResponseFinished(Body, frozen=True, tag="response.finished"):
    """The last byte of the answer was handed over, or the client was found gone (`status` 499)."""

    rid: str
    status: int


# ---------------------------------------------------------------- tokenizer manager


class RequestTokenized(Body, frozen=True, tag="request.tokenized"):
    """TokenizerManager made a TokenizedGenerateReqInput, or (`embedding`) a TokenizedEmbeddingReqInput."""

    rid: str
    prompt_tokens: int
    embedding: bool = False


class RequestDispatched(Body, frozen=True, tag="request.dispatched"):
    """The tokenized request went into the scheduler's socket."""

    rid: str


class OutputReceived(Body, frozen=True, tag="output.received"):
    """TokenizerManager took a BatchStrOutput (or BatchEmbeddingOutput: no tokens) and woke the waiters; new `tokens`
    by request."""

    rids: tuple[str, ...]
    tokens: tuple[int, ...]


class RequestFinished(Body, frozen=True, tag="request.finished"):
    """The rid left the table. `reason`: stop, length, abort; `matched`: the stop string or token id, as text."""

    rid: str
    reason: str
    matched: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class RequestRefused(Body, frozen=True, tag="request.refused"):
    """The request was answered with an error before the scheduler heard of it. `where`: serving, tokenizer.

    `status`: of HTTP; `reason`: the limit that it can never keep, if that is why; `prompt_tokens`: if they were
    counted.
    """

    rid: str
    where: str
    status: int
    why: str
    reason: Reason | None = None
    prompt_tokens: int | None = None


class RequestAborted(Body, frozen=True, tag="request.aborted"):
    """A request is ended before its time. `where`: tokenizer, intake, grammar, waiting, running,
    chunk, retract; of a prefill or decode server its queues too: bootstrap, inflight, prealloc, transfer, ready,
    retracted.

    `reason`: the limit that it can never keep, if that is why.
    """

    rid: str
    where: str
    why: str
    reason: Reason | None = None


# ---------------------------------------------------------------- detokenizer


class TextEmitted(Body, frozen=True, tag="text.emitted"):
    """The detokenizer made a BatchStrOutput: `chars` new characters and `held` token ids kept back, by request.

    A BatchEmbeddingOutput, which has neither, it passed on.
    """

    rids: tuple[str, ...]
    chars: tuple[int, ...]
    held: tuple[int, ...]
    finished: tuple[bool, ...]
