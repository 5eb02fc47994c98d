"""ReqState: what the TokenizerManager knows of one rid from acceptance to the last output.

Mirrors SGLang's ReqState. What is simplified: text and ids are cumulative, so instead of a list of outputs
(`out_list`) one flag says that there is something unread. Imports: messages, events.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sgviz.events.time_stats import TimeStats
from sgviz.messages import EmbeddingSpec, FinishReason, GenerateReqInput
from sgviz.messages.generate import most_new_tokens
from sgviz.tokenizer_manager.logprobs import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must fit into, in tokens.

    Attributes:
        context_len: the model's positions.
        max_req_len: prompt and output together, as the scheduler takes them.
        max_req_input_len: longest prompt that the scheduler's memory can take.
        max_total_num_tokens: KV slots, in pages of `page_size`.
        vocab_size: ids of the model are 0 to vocab_size - 1.
        logit_processors: names that requests may give as their custom_logit_processor.
        embedding: how the model makes vectors; None: it does not. is_generation: it generates tokens.
        dp_size: schedulers, of which a request may name one. by_room: its bootstrap_room chooses it.
        disaggregation_mode: prefill or decode, of a server that is one side of a pair; else null.
    """

    context_len: int
    max_req_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    page_size: int
    vocab_size: int
    logit_processors: tuple[str, ...] = ()
    embedding: EmbeddingSpec | None = None
    is_generation: bool = True
    dp_size: int = 1
    by_room: bool = False
    disaggregation_mode: str = "null"

    def most_new_tokens(self, prompt: int) -> int:
        """The longest output after a prompt of so many tokens."""
        return most_new_tokens(
            prompt,
            max_req_len=self.max_req_len,
            max_total_num_tokens=self.max_total_num_tokens,
            page_size=self.page_size,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class ReqState:
    """The mutable state of one rid; identity is the object, as a rid may be used again.

    Attributes:
        obj: the request for this rid alone. index: its place in the answer, None for a lone prompt.
        event: set when there is something to read; one request's states share it.
        dispatched: the scheduler has it, so only the scheduler's last message ends it.
        unread: news since the last read.
        verdict: what it ends with if it ends by an abort, whatever the engine says.
        cached_before: of a sample (n > 1), the prompt tokens found cached before its own warm-up; the caller is
            told these, not what that warm-up left for it. None: no warm-up.
        weight_changes: output tokens after which other weights took over, and their version.
        dp_rank: the scheduler that has it; None: not told yet.
        output_ids, logprobs: everything so far. embedding: the vector of a request for one (float32 as bytes).
    """

    rid: str
    obj: GenerateReqInput
    event: asyncio.Event
    stats: TimeStats
    index: int | None = None
    dispatched: bool = False
    abort_sent: bool = False
    unread: bool = False
    finish_reason: FinishReason | None = None
    verdict: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_before: int | None = None
    num_retractions: int = 0
    dp_rank: int | None = None
    weight_changes: list[tuple[int, str]] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    embedding: bytes = b""
    _text: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text so far; joined only when somebody reads it."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def append_text(self, piece: str) -> None:
        if piece:
            self._text.append(piece)

    def take_stats(self, received: TimeStats) -> None:
        """Keep the stamps of this process beside those that come back with the scheduler's message."""
        own = self.stats  # a line each: it runs for every token of every request
        received.created = own.created
        received.tokenize_start = own.tokenize_start
        received.tokenize_finish = own.tokenize_finish
        received.api_server_dispatch = own.api_server_dispatch
        received.first_token = own.first_token
        received.finished = own.finished
        received.response_sent = own.response_sent
        self.stats = received

    def wake(self) -> None:
        """Tell the waiter, unless it waits for the end only and this is not it."""
        if self.finished or self.obj.stream:
            self.unread = True
            self.event.set()
