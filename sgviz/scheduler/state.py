"""What the scheduler's components share: queues, batches, limits. Mirrors the fields of SGLang's Scheduler (5.1).

Imports: batch, cache, events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.kv_cache import KVCache
from sgviz.cache.req_kv import ReqKvInfo
from sgviz.config import DEFAULT_MAX_RUNNING, ScheduleConfig, ServeConfig
from sgviz.errors import ConfigError
from sgviz.events import Clock, Tracer
from sgviz.scheduler.disagg.queues import DisaggQueues, Draining
from sgviz.scheduler.new_token_ratio import NewTokenRatio
from sgviz.scheduler.priorities import NO_PRIORITIES, Priorities
from sgviz.worker.protocol import WorkerInfo

INPUT_LEN_MARGIN = 5  # max_req_input_len lies this much below max_req_len, as in SGLang


def max_input_len(max_req_len: int, capacity: int, page_size: int) -> int:
    """Longest prompt, in tokens: alone it must pass the adder's check, extend + page < capacity."""
    return min(max_req_len - INPUT_LEN_MARGIN, capacity - page_size - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that do not change while the scheduler runs (a debugger may replace the whole object).

    Attributes:
        chunked_prefill_size: None when prompts are not cut.
        max_req_len: prompt and output of one request. max_req_input_len: its prompt; below the pool by more
            than a page, so that the adder admits every such request when it is alone.
        is_encoder: prompts are never cut and nothing is cached. whole_prompt_embeddings: no cached prefix for vectors.
    """

    max_running_requests: int
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    prefill_max_requests: int | None
    max_queued_requests: int | None
    max_req_len: int
    max_req_input_len: int
    max_total_num_tokens: int
    page_size: int
    stream_interval: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    enable_mixed_chunk: bool = False
    is_encoder: bool = False
    whole_prompt_embeddings: bool = False
    priorities: Priorities = NO_PRIORITIES

    @classmethod
    def derive(cls, schedule: ScheduleConfig, serve: ServeConfig, info: WorkerInfo, page_size: int) -> Limits:
        """The limits that follow from settings, model and memory.

        Raises:
            ConfigError: the pool is too small to run any request.
        """
        capacity = info.max_total_num_tokens
        if capacity < 2 * page_size:
            raise ConfigError(
                f"a KV pool of {capacity} tokens cannot run a request with page_size {page_size}; "
                f"it takes {2 * page_size} tokens at least",
                param="max_total_tokens",
            )
        max_req_len = min(info.context_len, capacity) - 1
        max_input = max_input_len(max_req_len, capacity, page_size)
        if max_input < 1:
            raise ConfigError(
                f"a KV pool of {capacity} tokens in pages of {page_size} has no room for any request; "
                f"at least {page_size + INPUT_LEN_MARGIN + 2} tokens are needed",
                param="max_total_tokens",
            )
        wanted = schedule.max_running_requests or min(DEFAULT_MAX_RUNNING, max(1, capacity // 2))
        chunk = schedule.chunked_prefill_size
        return cls(
            max_running_requests=max(1, min(wanted, capacity // page_size)),
            chunked_prefill_size=None if chunk < 0 or info.is_encoder else max(chunk, page_size),
            max_prefill_tokens=schedule.max_prefill_tokens,
            prefill_max_requests=schedule.prefill_max_requests,
            max_queued_requests=schedule.max_queued_requests,
            max_req_len=max_req_len,
            max_req_input_len=max_input,
            max_total_num_tokens=capacity,
            page_size=page_size,
            stream_interval=serve.stream_interval,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            enable_mixed_chunk=schedule.enable_mixed_chunk,
            is_encoder=info.is_encoder,
            whole_prompt_embeddings=info.embedding is not None and info.embedding.whole_prompt,
            priorities=Priorities.of(schedule),
        )


@dataclass(slots=True)
class SchedulerState:
    """The mutable heart. Only the scheduler's own thread touches it.

    Attributes:
        grammar_queue: those whose grammars are being compiled; see GrammarQueue.
        live: every request that has not ended, by rid.
        chunked_req: at most one prompt that is being prefilled in pieces.
        chunk_aborted: the chunked request was aborted; the next plan drops it.
        last_batch: the batch planned in the turn before (None after an idle turn).
        health_probes: probes that came while busy; the next result answers them.
        arrivals: entries into the queue so far; each request has the number of its newest.
        pause: retract or in_place while no batch may be planned.
        disagg: the further queues of a prefill or decode server.
        generated_ct, prompt_ct, cached_ct: tokens sampled, of first prefills, and of those found in the cache.
        taken_ct: requests taken from the inbox, refused ones too, health probes not.
    """

    cache: KVCache
    limits: Limits
    clock: Clock
    trace: Tracer
    ratio: NewTokenRatio
    running_batch: ScheduleBatch
    waiting_queue: list[Req] = field(default_factory=list)
    grammar_queue: list[Req] = field(default_factory=list)
    live: dict[str, Req] = field(default_factory=dict)
    chunked_req: Req | None = None
    chunk_aborted: str | None = None
    last_batch: ScheduleBatch | None = None
    pending_results: int = 0
    next_bid: int = 1
    forward_ct: int = 0
    health_probes: int = 0
    arrivals: int = 0
    pause: str | None = None
    disagg: DisaggQueues = field(default_factory=DisaggQueues)
    generated_ct: int = 0
    prompt_ct: int = 0
    cached_ct: int = 0
    taken_ct: int = 0

    @property
    def at_rest(self) -> bool:
        """It is paused, and nothing is under way any more."""
        return self.pause is not None and not self.pending_results

    @property
    def num_ending(self) -> int:
        """Requests past the queues that were aborted and have not ended yet."""
        chunked = self.chunked_req
        cut = chunked is not None and chunked.to_finish is None and self.chunk_aborted is not None
        return sum(req.to_finish is not None and not req.finished for req in self.live.values()) + cut

    @property
    def num_held(self) -> int:
        """Requests past the queues that will go on after a pause."""
        return len(self.live) - self.num_queued - self.num_ending

    @property
    def may_flush(self) -> bool:
        """Nobody holds KV: nobody is alive, or all wait in a pause."""
        return self.is_fully_idle or (self.at_rest and len(self.live) == self.num_queued)

    @property
    def is_fully_idle(self) -> bool:
        """No request is alive. (A late forward of a finished one may still be under way; it holds nothing.)"""
        return not self.live and not self.disagg.draining

    @property
    def num_running(self) -> int:
        """Requests past the queues whose prompt is not being cut: prefilled, decoding, or about to end."""
        waiting = self.num_queued + self.disagg.num_arriving
        return len(self.live) - waiting - (self.chunked_req is not None)

    @property
    def num_queued(self) -> int:
        """Requests that wait, for a batch, a grammar or the other side, and hold no KV."""
        return len(self.waiting_queue) + len(self.grammar_queue) + self.disagg.num_queued

    def holding_nothing(self) -> list[Req]:
        """The requests that `num_queued` counts."""
        queues = self.disagg
        return [
            *self.waiting_queue, *self.grammar_queue, *queues.bootstrap, *queues.prealloc, *queues.retracted
        ]  # fmt: skip

    def enqueue(self, req: Req) -> None:
        """Put a request, new or retracted, behind all that wait."""
        self.arrivals += 1
        req.arrival = self.arrivals
        self.waiting_queue.append(req)

    def give_back(self, req: Req, why: str) -> None:
        """Free what `req` holds, or put it aside while its transfer still copies from or into its pages."""
        transfer = req.transfer
        if transfer is not None and transfer.busy:
            self.disagg.draining.append(Draining(req.rid, req.namespace, req.kv, transfer, why))
            req.kv = ReqKvInfo()
        else:
            self.cache.release(req, [], insert=False, why=why)

    def drain(self) -> None:
        """Free what no transfer uses any more."""
        if not self.disagg.draining:
            return
        done = [each for each in self.disagg.draining if not each.transfer.busy]
        self.disagg.draining = [each for each in self.disagg.draining if each.transfer.busy]
        for each in done:
            self.cache.release(each, [], insert=False, why=each.why)
            self.running_batch.batch_is_full = False

    def take_bid(self) -> int:
        bid = self.next_bid
        self.next_bid += 1
        return bid
