"""Events of the scheduler: queue, admission, batches. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body, Reason

# ---------------------------------------------------------------- scheduler: queue and admission


class QueueEntered(Body, frozen=True, tag="queue.entered"):
    """The scheduler made a Req and put it in the waiting queue.

    `input_ids` (int32) and `sampling` (msgpack of SamplingParams) let a recording drive a scheduler
    again; both are empty when a retracted request comes back (`again`). `received_ns`: when it was taken
    from the inbox (0: not stamped). `probe`: a health check of the server, no request of anybody. `embedding`: it
    wants the vector of its prompt and no token. `priority`: what it
    runs under (none: priorities mean nothing).
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
    probe: bool = False
    embedding: bool = False
    priority: int | None = None


class GrammarQueued(Body, frozen=True, tag="grammar.queued"):
    """The request's grammar is not compiled yet: it waits, and enters the queue afterwards.

    `grammar`: json_schema, regex, ebnf or structural_tag, of `chars` characters; `waiting`: requests that wait for
    grammars, this one with them; `received_ns`: when the request was taken from the inbox.
    """

    rid: str
    grammar: str
    chars: int
    waiting: int
    received_ns: int


class GrammarReady(Body, frozen=True, tag="grammar.ready"):
    """The request has its grammar, or it turned out that there is none (`error`; the request ends with 400).

    `hit`: it was in the cache; `compile_ns`: how long compiling took, off the loop (0: nobody knows, or it was there).
    """

    rid: str
    grammar: str
    chars: int
    hit: bool
    compile_ns: int
    error: str
    received_ns: int


class QueueSorted(Body, frozen=True, tag="queue.sorted"):
    """The policy changed the order: `(rid, old rank, new rank)` of those that moved.

    `policy` is `priority, NAME` where priorities go before the policy.
    """

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
    """Planning stopped at `rid` for `reason`; the `behind` requests after it were not tried.

    With the reason other_kind it went on behind `rid`, the first that is of the other kind than the batch, unless a
    prompt that is being cut had begun the batch; `behind` are more of that kind. `passed`: where it stopped for
    another reason, the first that it had passed over like that.
    """

    rid: str
    reason: Reason
    behind: int
    passed: str = ""


class ChunkCut(Body, frozen=True, tag="chunk.cut"):
    """Of a long prompt the tokens `start` to `end` (of `total`) run in this batch."""

    rid: str
    start: int
    end: int
    total: int


class RequestRetracted(Body, frozen=True, tag="request.retracted"):
    """Memory ran out while decoding: the request gave up its KV and waits again, keeping `output_tokens`.

    `paused`: it had to because the engine was paused (mode retract), and memory has nothing to do with it.
    `preempted_by`: it made way for that waiting request, which has a higher priority and needed `need` KV tokens of
    which `have` were to be had (it may have been a running slot that it lacked).
    """

    rid: str
    output_tokens: int
    need: int
    have: int
    ratio_before: float
    ratio_after: float
    preempted_by: str = ""
    paused: bool = False


# ---------------------------------------------------------------- scheduler: batches


class BatchPlanned(Body, frozen=True, tag="batch.planned"):
    """A batch is fixed: `mode` (extend, decode, mixed, or prebuilt, which is not launched) and its members.

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
    """The device ran the batch from `start_ns` to `end_ns` and its result is here.

    The forward lasted from `start_ns` to `forward_end_ns`, the sampling from `sample_start_ns` to `end_ns` (apart
    only if it was delayed), the copy of the results to the host from `copy_start_ns` to `copy_end_ns`. All by the
    device's own clock, put on the host's monotonic one; 0: the device does not tell. The scheduler's thread waited
    for the result from `wait_ns` until this event's own time.
    """

    bid: int
    start_ns: int
    end_ns: int
    can_run_cuda_graph: bool
    wait_ns: int = 0
    forward_end_ns: int = 0
    sample_start_ns: int = 0
    copy_start_ns: int = 0
    copy_end_ns: int = 0


class TokensSampled(Body, frozen=True, tag="tokens.sampled"):
    """The tokens appended to their requests while the result of `bid` was processed."""

    bid: int
    rids: tuple[str, ...]
    token_ids: tuple[int, ...]


class EmbeddingsPooled(Body, frozen=True, tag="embeddings.pooled"):
    """The vectors that requests ended with while the result of `bid` was processed: `dims` numbers each."""

    bid: int
    rids: tuple[str, ...]
    dims: tuple[int, ...]


class BatchProcessed(Body, frozen=True, tag="batch.processed"):
    """The result of `bid` is in the requests; `finished` of them ended with it."""

    bid: int
    finished: tuple[str, ...]


class OutputStreamed(Body, frozen=True, tag="output.streamed"):
    """A BatchTokenIDOutput (or BatchEmbeddingOutput: no tokens) left for the detokenizer: new tokens and whether
    final, by request."""

    rids: tuple[str, ...]
    tokens: tuple[int, ...]
    finished: tuple[bool, ...]


class LoopIdle(Body, frozen=True, tag="loop.idle"):
    """The loop found nothing to do and waits for a message; emitted once until there is work again."""

    kv_free: int
    kv_evictable: int
    kv_protected: int


class LoopResumed(Body, frozen=True, tag="loop.resumed"):
    """A debugger held the scheduler from `since_ns` until this event. `at`: the named stop or the kind of event.

    `why`: the breakpoint, or what was waited for (step, pause). The device went on with what it had.
    """

    since_ns: int
    at: str
    why: str


class LimitsChanged(Body, frozen=True, tag="limits.changed"):
    """A debugger changed limits at a stop; these are now in force (`chunked_prefill_size` -1: prompts are not cut).

    `max_total_num_tokens`: KV tokens of the pool, from which `slots` have just gone for good; `free` remain free.
    """

    max_running_requests: int
    chunked_prefill_size: int
    schedule_policy: str
    max_total_num_tokens: int
    slots: bytes
    free: int


class CacheFlushed(Body, frozen=True, tag="cache.flushed"):
    """A flush was asked for. `ok` is False when requests still hold memory; `why` says so."""

    ok: bool
    why: str
