"""ScheduleBatch: the requests of one forward with their lengths and slots. Mirrors SGLang's class.

Everything here is Python lists and numpy; tensors begin behind the worker's border. A batch never
allocates by itself: the cache hands it the slots. Imports: cache, messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sgviz.batch.forward_mode import ForwardMode
from sgviz.batch.req import Req
from sgviz.cache.kv_cache import KVCache
from sgviz.cache.req_kv import Slots, no_slots
from sgviz.cache.req_to_token_pool import ReqToTokenPool


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """One batch. Lists run parallel to `reqs`.

    Attributes:
        bid: number of this launch; every event of the batch carries it.
        seq_lens: tokens in KV after the forward (prefix + extend).
        prefix_lens, extend_lens: tokens before and new in this forward (decode: seq_len - 1 and 1).
        input_ids: the new ids of an extend, concatenated; empty for decode (they are on the device).
        decode_rows: how many requests at the end of a MIXED batch are decoding ones.
        out_cache_loc: [sum(extend_lens)] slots the forward writes, request after request.
        chunked_req: the member whose prompt goes on in a later batch, if one does.
        req_to_token_pool: the table position -> slot, row by request (`req.kv.req_pool_idx`).
        batch_is_full: nothing more was admitted for want of memory or rows; see the planner.
    """

    req_to_token_pool: ReqToTokenPool
    reqs: list[Req] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.IDLE
    bid: int = 0
    seq_lens: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    decode_rows: int = 0
    out_cache_loc: Slots = field(default_factory=no_slots)
    chunked_req: Req | None = None
    batch_is_full: bool = False

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def is_empty(self) -> bool:
        return not self.reqs

    @property
    def rows(self) -> list[int]:
        """The members' rows (`req_pool_indices`)."""
        return [req.kv.req_pool_idx for req in self.reqs]

    @property
    def is_embedding(self) -> bool:
        """A batch for vectors; its members are all of that kind."""
        return bool(self.reqs) and self.reqs[0].is_embedding

    @property
    def return_logprob(self) -> bool:
        return any(req.return_logprob for req in self.reqs)

    def prepare_for_extend(self, cache: KVCache, bid: int) -> None:
        """Take rows and slots for the extends that were admitted and set the inputs."""
        self.bid = bid
        self.forward_mode = ForwardMode.EXTEND
        self.prefix_lens = [req.prefix_len for req in self.reqs]
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.seq_lens = [req.extend_end for req in self.reqs]
        self.input_ids = []
        for req in self.reqs:
            self.input_ids += _slice_fill(req)
        self.out_cache_loc = cache.alloc_extend(self.reqs, self.seq_lens)

    def prepare_for_decode(self, cache: KVCache, bid: int) -> None:
        """One more position each; the ids come from the FutureMap on the device's side."""
        self.bid = bid
        self.forward_mode = ForwardMode.DECODE
        self.input_ids = []
        self.seq_lens = [req.kv.allocated + 1 for req in self.reqs]
        self.prefix_lens = [length - 1 for length in self.seq_lens]
        self.extend_lens = [1] * len(self.reqs)
        self.out_cache_loc = cache.alloc_extend(self.reqs, self.seq_lens)

    def prepare_for_prebuilt(self, bid: int) -> None:
        """The KV came from elsewhere, rows and slots are taken: nothing is to be computed."""
        self.bid = bid
        self.forward_mode = ForwardMode.PREBUILT
        self.seq_lens = [req.kv.allocated for req in self.reqs]
        self.prefix_lens = list(self.seq_lens)
        self.extend_lens = [0] * len(self.reqs)

    def mix_with_running(self, running: ScheduleBatch, cache: KVCache) -> None:
        """Append decoding requests as extends of one token (forward mode MIXED)."""
        running.prepare_for_decode(cache, self.bid)
        self.forward_mode = ForwardMode.MIXED
        self.decode_rows = len(running)
        self.reqs = self.reqs + running.reqs
        self.seq_lens += running.seq_lens
        self.prefix_lens += running.prefix_lens
        self.extend_lens += running.extend_lens
        self.out_cache_loc = np.concatenate((self.out_cache_loc, running.out_cache_loc))

    def filter_batch(self, keep: Callable[[Req], bool]) -> None:
        """Keep the members for which `keep` holds; lengths and slots belong to a past forward and go."""
        self.reqs = [req for req in self.reqs if keep(req)]

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Take over the members of `other`, behind the own ones."""
        self.reqs = self.reqs + other.reqs

    def snapshot(self) -> ScheduleBatch:
        """A copy whose lists no longer follow this batch: what the result of this launch is processed with."""
        return ScheduleBatch(
            req_to_token_pool=self.req_to_token_pool,
            reqs=list(self.reqs),
            forward_mode=self.forward_mode,
            bid=self.bid,
            seq_lens=self.seq_lens,
            prefix_lens=self.prefix_lens,
            extend_lens=self.extend_lens,
            decode_rows=self.decode_rows,
            chunked_req=self.chunked_req,
        )


def _slice_fill(req: Req) -> list[int]:
    """fill_ids[prefix_len:extend_end] without building all of fill_ids for a long prompt."""
    prompt = len(req.origin_input_ids)
    if req.extend_end <= prompt:
        return req.origin_input_ids[req.prefix_len : req.extend_end]
    return req.fill_ids()[req.prefix_len : req.extend_end]
