"""The whole vocabulary: what can happen in the pipeline, one frozen struct a kind.

An `Event` is a stamped body. `seq` counts per component, `t` is monotonic nanoseconds, `iteration`
is the scheduler's loop number (0 elsewhere). Bodies are encoded as tagged msgpack arrays, so fields
are only ever appended, with a default; `SCHEMA_VERSION` grows when that is not enough.

Imports: standard library and msgspec, nothing else of sgviz. Everybody may import this module.
Slot lists travel as raw little-endian int32 (`bytes`): one copy instead of an object per token.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Union, get_args

import msgspec

SCHEMA_VERSION = 1


class Reason(StrEnum):
    """Why a waiting request was not taken into the batch being planned."""

    KV = "kv"
    ROWS = "rows"
    RUNNING_SLOTS = "running_slots"
    CHUNK_BUDGET = "chunk_budget"
    PREFILL_BUDGET = "prefill_budget"
    MAX_REQUESTS = "max_requests"
    HEAD_OF_LINE = "head_of_line"
    NEVER_FITS = "never_fits"
    PRIORITY = "priority"
    PAUSED = "paused"
    GRAMMAR = "grammar"
    PREFETCH = "prefetch"


class Body(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False, tag_field="kind"):
    """Base of all event bodies."""


# ---------------------------------------------------------------- processes and recording


class ProcessStarted(Body, frozen=True, tag="process.started"):
    """A component came up. The two clocks were read together, so `t` can be turned into calendar time."""

    component: str
    pid: int
    mode: str
    unix_ns: int
    monotonic_ns: int


class EngineConfigured(Body, frozen=True, tag="engine.configured"):
    """The settings as resolved, and the sizes that follow from model and memory."""

    settings: dict[str, str | int | float | bool | None]
    model: str
    max_total_num_tokens: int
    page_size: int
    max_running_requests: int
    context_len: int
    rows: int


class TraceDropped(Body, frozen=True, tag="trace.dropped"):
    """A sink had no room for `count` events; `total` since the start."""

    sink: str
    count: int
    total: int


class TraceCost(Body, frozen=True, tag="trace.cost"):
    """What observing cost the component so far: `cost_ns` in emit and flush, for `events` events."""

    events: int
    cost_ns: int


# ---------------------------------------------------------------- serving


class RequestReceived(Body, frozen=True, tag="request.received"):
    """An HTTP body became a typed request (`type`: ChatCompletionRequest, CompletionRequest, GenerateReqInput)."""

    rid: str
    type: str
    path: str
    stream: bool
    model: str
    messages: int
    chars: int


class RequestConverted(Body, frozen=True, tag="request.converted"):
    """Serving made a GenerateReqInput: chat template applied, sampling settled. `size`: ids or characters."""

    rid: str
    prompt_kind: str
    size: int
    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] = ()


class ChunkSent(Body, frozen=True, tag="chunk.sent"):
    """Serving handed something to the HTTP layer.

    `part`: role, delta, finish, usage, done, error (streamed) or body (not streamed). `chars` of text in it.
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
    """TokenizerManager made a TokenizedGenerateReqInput."""

    rid: str
    prompt_tokens: int


class RequestDispatched(Body, frozen=True, tag="request.dispatched"):
    """The tokenized request went into the scheduler's socket."""

    rid: str


class OutputReceived(Body, frozen=True, tag="output.received"):
    """TokenizerManager took a BatchStrOutput and woke the waiters; new `tokens` by request."""

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


class RequestAborted(Body, frozen=True, tag="request.aborted"):
    """A request is ended before its time. `where`: tokenizer, intake, waiting, running, chunk, retract.

    `reason`: the limit that it can never keep, if that is why.
    """

    rid: str
    where: str
    why: str
    reason: Reason | None = None


# ---------------------------------------------------------------- scheduler: queue and admission


class QueueEntered(Body, frozen=True, tag="queue.entered"):
    """The scheduler made a Req and put it in the waiting queue.

    `input_ids` (int32) and `sampling` (msgpack of SamplingParams) let a recording drive a scheduler
    again; both are empty when a retracted request comes back (`again`). `received_ns`: when it was taken
    from the inbox (0: not stamped).
    """

    rid: str
    position: int
    prompt_tokens: int
    max_new_tokens: int
    stream: bool
    again: bool = False
    input_ids: bytes = b""
    sampling: bytes = b""
    extra_key: str = ""
    received_ns: int = 0


class QueueSorted(Body, frozen=True, tag="queue.sorted"):
    """The policy changed the order: `(rid, old rank, new rank)` of those that moved."""

    policy: str
    moves: tuple[tuple[str, int, int], ...]


class PolicyFailed(Body, frozen=True, tag="policy.failed"):
    """The policy raised, dropped or doubled a request (`fault`); this plan was made in order of arrival."""

    policy: str
    fault: str


class PrefixMatched(Body, frozen=True, tag="prefix.matched"):
    """The tree holds the first `tokens` of the request (at most `limit` may be used). `node`: last node."""

    rid: str
    tokens: int
    limit: int
    node: int


class AdmitOk(Body, frozen=True, tag="admit.ok"):
    """The adder took the request: `extend` new and `prefix` cached tokens.

    `need` and `have` are the two sides of the memory check in tokens (0 and 0 for a continued chunk,
    which is not checked); `reserved` output tokens are now promised; the three `rem_*` are what the
    batch has left afterwards (-1: no such budget).
    """

    rid: str
    extend: int
    prefix: int
    need: int
    have: int
    reserved: int
    chunked: bool
    rem_total: int
    rem_input: int
    rem_chunk: int


class AdmitRefused(Body, frozen=True, tag="admit.refused"):
    """The request stays in the queue; emitted when the reason changes.

    `need`/`have` in the unit of the reason (tokens, rows or requests); `holders`: who holds the
    scarce thing and how much of it, largest first.
    """

    rid: str
    reason: Reason
    need: int
    have: int
    holders: tuple[tuple[str, int], ...] = ()


class AdmitRepeated(Body, frozen=True, tag="admit.repeated"):
    """A refusal that was told before came `count` times more and is over now; `need`/`have` are its last numbers."""

    rid: str
    reason: Reason
    count: int
    need: int
    have: int
    last_ns: int


class ScanStopped(Body, frozen=True, tag="scan.stopped"):
    """Planning stopped at `rid` for `reason`; the `behind` requests after it were not tried."""

    rid: str
    reason: Reason
    behind: int


class ChunkCut(Body, frozen=True, tag="chunk.cut"):
    """Of a long prompt the tokens `start` to `end` (of `total`) run in this batch."""

    rid: str
    start: int
    end: int
    total: int


class RequestRetracted(Body, frozen=True, tag="request.retracted"):
    """Memory ran out while decoding: the request gave up its KV and waits again, keeping `output_tokens`."""

    rid: str
    output_tokens: int
    need: int
    have: int
    ratio_before: float
    ratio_after: float


# ---------------------------------------------------------------- scheduler: batches


class BatchPlanned(Body, frozen=True, tag="batch.planned"):
    """A batch is fixed: `mode` (extend, decode, mixed) and its members.

    By member: `extend_lens` new tokens, `prefix_lens` tokens already in KV. `kv_*` are the true token
    counts after allocation (free + evictable + protected + private == total); `running` and `waiting`
    are queue lengths.
    """

    bid: int
    mode: str
    rids: tuple[str, ...]
    extend_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    running: int
    waiting: int
    kv_free: int
    kv_evictable: int
    kv_protected: int
    new_token_ratio: float


class BatchLaunched(Body, frozen=True, tag="batch.launched"):
    """The batch was handed to the worker; the call did not wait. `turn_ns`: when this turn of the loop began."""

    bid: int
    forward_pass_id: int
    turn_ns: int = 0


class BatchFinished(Body, frozen=True, tag="batch.finished"):
    """The device ran the batch from `start_ns` to `end_ns` (host's monotonic clock) and its result is here.

    The scheduler's thread waited for it from `wait_ns` until this event's own time.
    """

    bid: int
    start_ns: int
    end_ns: int
    can_run_cuda_graph: bool
    wait_ns: int = 0


class TokensSampled(Body, frozen=True, tag="tokens.sampled"):
    """The tokens appended to their requests while the result of `bid` was processed."""

    bid: int
    rids: tuple[str, ...]
    token_ids: tuple[int, ...]


class BatchProcessed(Body, frozen=True, tag="batch.processed"):
    """The result of `bid` is in the requests; `finished` of them ended with it."""

    bid: int
    finished: tuple[str, ...]


class OutputStreamed(Body, frozen=True, tag="output.streamed"):
    """A BatchTokenIDOutput left for the detokenizer: new tokens and whether final, by request."""

    rids: tuple[str, ...]
    tokens: tuple[int, ...]
    finished: tuple[bool, ...]


class LoopIdle(Body, frozen=True, tag="loop.idle"):
    """The loop found nothing to do and waits for a message; emitted once until there is work again."""

    kv_free: int
    kv_evictable: int
    kv_protected: int


class CacheFlushed(Body, frozen=True, tag="cache.flushed"):
    """A flush was asked for. `ok` is False when requests still hold memory; `why` says so."""

    ok: bool
    why: str


# ---------------------------------------------------------------- memory


class RowTaken(Body, frozen=True, tag="row.taken"):
    """The request owns row `row` of the ReqToTokenPool."""

    rid: str
    row: int


class RowReturned(Body, frozen=True, tag="row.returned"):
    """The request gave up row `row`; somebody else may take it."""

    rid: str
    row: int


class PoolTaken(Body, frozen=True, tag="pool.taken"):
    """KV slots went to requests: `counts[i]` of the `slots` to `rids[i]`, in order. `free` tokens remain."""

    rids: tuple[str, ...]
    counts: tuple[int, ...]
    slots: bytes
    free: int


class PoolReturned(Body, frozen=True, tag="pool.returned"):
    """KV slots came back. `why`: finish, tail, duplicate, evict, retract, abort, flush. `free` afterwards.

    A request (`rid`) gives back its private slots; `evict` and `flush` free slots of the tree (`rid` empty).
    """

    rid: str
    slots: bytes
    why: str
    free: int


class TreeInserted(Body, frozen=True, tag="tree.inserted"):
    """A new leaf `node` under `parent` took over `slots` from `rid`; `present` tokens before it were there already."""

    rid: str
    node: int
    parent: int
    slots: bytes
    present: int
    token_ids: bytes


class TreeSplit(Body, frozen=True, tag="tree.split"):
    """Node `node` was cut after `at` tokens: the new node `upper` holds the head, `node` keeps the rest."""

    node: int
    upper: int
    at: int


class TreeEvicted(Body, frozen=True, tag="tree.evicted"):
    """Leaf `node` with `tokens` tokens was dropped to make room; last used at logical step `last_access`."""

    node: int
    tokens: int
    last_access: int


class TreeLocked(Body, frozen=True, tag="tree.locked"):
    """`delta` +1 or -1 on `node` and its ancestors for `rid`; `tokens` moved into (or out of) protection."""

    rid: str
    node: int
    delta: int
    tokens: int


# ---------------------------------------------------------------- detokenizer


class TextEmitted(Body, frozen=True, tag="text.emitted"):
    """The detokenizer made a BatchStrOutput: `chars` new characters and `held` token ids kept back, by request."""

    rids: tuple[str, ...]
    chars: tuple[int, ...]
    held: tuple[int, ...]
    finished: tuple[bool, ...]


AnyBody = Union[  # noqa: UP007
    ProcessStarted, EngineConfigured, TraceDropped, TraceCost, RequestReceived, RequestConverted, ChunkSent,
    ResponseFinished, RequestTokenized, RequestDispatched, OutputReceived, RequestFinished,
    RequestAborted, QueueEntered, QueueSorted, PolicyFailed, PrefixMatched, AdmitOk, AdmitRefused, AdmitRepeated,
    ScanStopped,
    ChunkCut, RequestRetracted, BatchPlanned, BatchLaunched, BatchFinished, TokensSampled,
    BatchProcessed, OutputStreamed, LoopIdle, CacheFlushed, RowTaken, RowReturned, PoolTaken,
    PoolReturned, TreeInserted, TreeSplit, TreeEvicted, TreeLocked, TextEmitted,
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stamped event. Order two events of a machine by `(t, component, seq)`."""

    seq: int
    t: int
    component: str
    iteration: int
    body: AnyBody

    @property
    def kind(self) -> str:
        """The dotted name, e.g. `batch.planned`."""
        return KIND_OF[type(self.body)]

    @property
    def sort_key(self) -> tuple[int, str, int]:
        return (self.t, self.component, self.seq)


KIND_OF: dict[type, str] = {cls: str(cls.__struct_config__.tag) for cls in get_args(AnyBody)}
BODY_OF: dict[str, type[Body]] = {kind: cls for cls, kind in KIND_OF.items()}
