"""The messages of a request on its way: in, tokenized, out as ids, out as text.

Shapes: a `Batch*Output` is columnar, one entry by rid in every column. Imports: errors, events, sampling.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sgviz.errors import SgvizError, from_status
from sgviz.events.time_stats import TimeStats
from sgviz.messages.sampling import SamplingParams
from sgviz.messages.session import SessionParams

TopLogprobs = list[tuple[float, int]]
InputToken = tuple[float | None, int]  # log-probability (None: follows nothing that was asked for) and id
LONG_TEXT = 50_000  # characters (or ids) from which the tokenizer leaves the event loop's thread
MAX_TOKEN_CHARS = 256  # no vocabulary has a longer token
WEIGHT_VERSION = "default"  # of weights that nobody named


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request ended: `stop` (with what matched), `length`, or `abort` (with a message, perhaps a status).

    `param`: the field of the request that is at fault, if one is.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None
    param: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """SGLang's meta_info shape: only the fields of this type."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        shape: dict[str, Any] = {
            "type": "abort", "message": self.message, "status_code": self.status_code, "err_type": self.err_type,
        }  # fmt: skip
        return shape if self.param is None else {**shape, "param": self.param}


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """What serving asks of the TokenizerManager; SGLang's native request. Lives in the main process only.

    Exactly one of `text` and `input_ids`; a list of either makes a batch, and then `rid` and
    `sampling_params` may be lists of the same length. `sampling_params.n` > 1 fans out into n children.
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    stream: bool = False
    return_logprob: bool | list[bool] = False
    top_logprobs_num: int | list[int] = 0
    # first prompt token whose log-probability is wanted too; -1: none
    logprob_start_len: int | list[int] = -1
    # ids whose log-probabilities are wanted at every position; a flat list is for all prompts
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    extra_key: str | None = None
    custom_logit_processor: str | None = None  # a name of the setting custom_logit_processors
    # lists in streamed outputs may be read-only views; for readers that show only what is new of them
    as_views: bool = False
    priority: int | None = None  # for priority scheduling
    session_params: SessionParams | list[SessionParams | None] | None = (
        None  # of the turn of a session that it is
    )
    # a grammar holds behind thoughts, inside of which the answer begins; None: it may begin with thoughts
    require_reasoning: bool | None = False
    # output limit where sampling_params has none and that much is left; None: all that is left
    default_new_tokens: int | None = None
    # the data parallel rank that is to run it; None: the controller chooses
    routed_dp_rank: int | None = None
    # of a prefill server that runs or ran the prompt: where its ranks are told, the request's number there, its rank
    bootstrap_host: str | list[str] | None = None  # lists: one entry an answer, of batches and n > 1
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    disagg_prefill_dp_rank: int | None = None
    # monotonic ns at which the HTTP layer (or the caller) took the request; 0: now
    received_ns: int = 0

    @property
    def is_single(self) -> bool:
        """One prompt (a string or a flat list of ids) rather than a list of prompts."""
        if self.text is not None:
            return isinstance(self.text, str)
        return not self.input_ids or isinstance(self.input_ids[0], int)

    @property
    def prompts(self) -> Sequence[object]:
        """The prompts one by one, unchecked: texts or lists of ids."""
        value: object = self.text if self.text is not None else self.input_ids
        return value if isinstance(value, list) and not self.is_single else [value]


class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """One prompt as ids with verified sampling parameters, on its way to the scheduler."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool
    time_stats: TimeStats
    return_logprob: bool = False
    top_logprobs_num: int = 0
    extra_key: str | None = None
    logprob_start_len: int = -1
    token_ids_logprob: list[int] | None = None
    custom_logit_processor: str | None = None
    require_reasoning: bool | None = False
    priority: int | None = None
    session_params: SessionParams | None = None
    bos_token_id: int | None = None  # what its tokenizer puts before every text; only said of turns
    routed_dp_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    disagg_prefill_dp_rank: int | None = None


class OutputColumns(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """What both output messages carry by rid. Logprob columns are empty when nobody asked.

    `output_ids` and the output logprobs are deltas since the last message; counters are totals. The input logprobs
    are in the first message of a rid and in no other. Of a request without new tokens the output token_ids column
    has one entry all the same: what could have come next.
    """

    rids: list[str]
    finished_reasons: list[FinishReason | None]
    output_ids: list[list[int]]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    retraction_counts: list[int]
    time_stats: list[TimeStats]
    output_token_logprobs: list[list[float]] = []
    output_top_logprobs: list[list[TopLogprobs]] = []
    output_token_ids_logprobs: list[list[TopLogprobs]] = []
    input_token_logprobs: list[list[InputToken]] = []
    input_top_logprobs: list[list[TopLogprobs | None]] = []
    input_token_ids_logprobs: list[list[TopLogprobs | None]] = []
    dp_rank: int = 0  # whose batch it was


class BatchTokenIDOutput(OutputColumns, kw_only=True, tag=True, array_like=True):
    """Scheduler to detokenizer. `decode_ids` is the delta of (up to 5 prompt ids of context +) output ids;
    `read_offsets` counts the context ids of the first message of a rid (later messages repeat it)."""

    decode_ids: list[list[int]] = []
    read_offsets: list[int] = []
    skip_special_tokens: list[bool] = []
    spaces_between_special_tokens: list[bool] = []
    no_stop_trim: list[bool] = []


class BatchStrOutput(OutputColumns, kw_only=True, tag=True, array_like=True):
    """Detokenizer to TokenizerManager: `output_strs` are the new pieces of text."""

    output_strs: list[str] = []


def prompt_rids(rid: str | list[str], prompts: int | None) -> list[str]:
    """One rid a prompt: those given, or the one given, for a list of `prompts` numbered after it."""
    if isinstance(rid, list):
        return list(dict.fromkeys(rid))
    return [rid] if prompts is None else [f"{rid}_{number}" for number in range(prompts)]


def most_new_tokens(prompt: int, *, max_req_len: int, max_total_num_tokens: int, page_size: int) -> int:
    """Output tokens that a request of `prompt` ids can have when it is alone in the KV pool; never below 0.

    A page stays free beside it, as the scheduler's admission asks for.
    """
    in_memory = max_total_num_tokens - -(-prompt // page_size) * page_size - page_size - 1
    return max(0, min(max_req_len - prompt, in_memory))


def failure_of(reason: Mapping[str, Any] | None) -> SgvizError | None:
    """The error that a `finish_reason` stands for.

    An abort with a status of 400 to 599 is one; an abort without (somebody asked for it) is a normal end.
    """
    if not reason or reason["type"] != "abort" or not 400 <= (reason.get("status_code") or 0) <= 599:
        return None
    return from_status(
        reason["status_code"],
        reason.get("message") or "aborted",
        param=reason.get("param"),
        type=reason.get("err_type"),
    )


def new_rid(prefix: str = "") -> str:
    """A fresh request id: `prefix` and 32 hex digits."""
    return prefix + uuid.uuid4().hex
