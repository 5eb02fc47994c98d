"""Req: one request inside the scheduler. Mirrors SGLang's `Req`.

Life: waiting -> (chunk)* -> running -> finished; running -> retracted -> waiting; waiting -> aborted.
What is simplified: no LoRA, multimodal inputs or speculative counters yet.
Imports: messages, cache (types), events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.batch.grammar import Grammar
from sgviz.batch.input_logprobs import InputLogprobs
from sgviz.batch.transfer import Bootstrap, KeptKv, Transfer
from sgviz.cache.req_kv import ReqKvInfo
from sgviz.events.time_stats import TimeStats
from sgviz.messages import FinishReason, SamplingParams

INIT_INCREMENTAL_DETOKENIZATION_OFFSET = 5  # prompt ids the detokenizer sees as context


@dataclass(slots=True, eq=False)
class Req:
    """The mutable state of a request; identity is the object, `rid` the key on the wire.

    Attributes:
        origin_input_ids: the prompt. output_ids: what was sampled so far (stop token included).
        max_new_tokens: the request's limit after clamping to context and memory.
        prefix_len: tokens of `fill_ids` already in KV when the current extend was planned.
        extend_end: the current extend covers fill_ids[prefix_len:extend_end].
        to_finish: reason to end with at the next result (abort while running).
        send_token_offset: output tokens already sent on.
        cached_tokens: prefix tokens found at first admission (not after a retraction).
        requeued_ns: when a retraction last put it back into the queue.
        arrival: number of its newest entry into the queue.
        inflight: launched forwards that will give it a token and are not processed.
        grammar: the state of its grammar after `output_ids`, if it is under one.
        logprob_start_len: first prompt token whose log-probability is wanted, -1: none. input_logprobs: those so far.
        token_ids_logprob: ids whose log-probabilities are wanted at every position.
        custom_logit_processor: name of the one that edits its logits.
        require_reasoning: its grammar holds behind thoughts, inside of which it begins; None: it may begin with them.
        is_embedding: it wants the vector of its prompt and no token; then dimensions: numbers of it (None: all),
            whole_prompt: no cached prefix may stand for a part of it, embedding: what came (float32 as bytes).
        priority: as the scheduler settled it; None where priorities mean nothing.
        bootstrap: where it meets its other side, on a prefill or decode server. transfer: its sender or receiver there,
            until the KV is where it belongs. start_send_idx: tokens of the prompt that the other side has or was sent.
            kept_kv: its KV in host memory, after a retraction on a decode server. is_primed: its tokens were sampled
            elsewhere than in its row, until the first forward there. is_hollow: its KV never came, as it has no other
            side; nobody may share it.
        tail: output length and the text of the newest tokens then, for requests with stop strings.
    """

    rid: str
    origin_input_ids: list[int]
    sampling_params: SamplingParams
    max_new_tokens: int
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    token_ids_logprob: tuple[int, ...] = ()
    custom_logit_processor: str | None = None
    require_reasoning: bool | None = False
    extra_key: str | None = None
    priority: int | None = None
    time_stats: TimeStats = field(default_factory=TimeStats)
    output_ids: list[int] = field(default_factory=list)
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    prefix_len: int = 0
    extend_end: int = 0
    is_retracted: bool = False
    retraction_count: int = 0
    finished_reason: FinishReason | None = None
    to_finish: FinishReason | None = None
    finished_output: bool = False
    send_token_offset: int = 0
    cached_tokens: int = 0
    counted_cached: bool = False
    requeued_ns: int = 0
    arrival: int = 0
    inflight: int = 0
    grammar: Grammar | None = None
    is_embedding: bool = False
    dimensions: int | None = None
    whole_prompt: bool = False
    embedding: bytes = b""
    bootstrap: Bootstrap | None = None
    transfer: Transfer | None = None
    start_send_idx: int = 0
    kept_kv: KeptKv | None = None
    is_primed: bool = False
    is_hollow: bool = False
    tail: tuple[int, str] = (0, "")
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    output_token_ids_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: InputLogprobs = field(default_factory=InputLogprobs)

    @property
    def namespace(self) -> str:
        return self.extra_key or ""

    @property
    def seqlen(self) -> int:
        """Prompt and outputs together."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    @property
    def misses_input_logprobs(self) -> bool:
        """Log-probabilities of its prompt are wanted and not all there."""
        start = self.logprob_start_len
        return 0 <= start < len(self.origin_input_ids) - 1 - len(self.input_logprobs.logprobs)

    @property
    def max_prefix_len(self) -> int:
        """Tokens that may come from the cache: logits are needed of what follows them."""
        if self.whole_prompt:
            return 0
        most = self.seqlen - 1
        return min(most, self.logprob_start_len) if self.misses_input_logprobs else most

    @property
    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def committed_len(self) -> int:
        """Positions whose KV is real once all processed results are in: the last sampled token has none."""
        return self.seqlen - 1 if self.output_ids else self.extend_end

    def fill_ids(self) -> list[int]:
        """What a prefill from nothing must cover: prompt and outputs."""
        return self.origin_input_ids + self.output_ids

    def reset_for_retract(self) -> None:
        """Back to the queue: KV is gone, outputs and streaming offsets stay."""
        self.kv = ReqKvInfo()
        self.prefix_len = 0
        self.extend_end = 0
        self.inflight = 0
        if self.misses_input_logprobs:
            self.input_logprobs = InputLogprobs()
        self.is_primed = False
        self.is_retracted = True
        self.retraction_count += 1
