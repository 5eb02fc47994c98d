"""PrefillAdder: the budget of one prefill batch, with typed verdicts. Mirrors SGLang's class (facts 5.9).

The adder decides and keeps the accounts of the batch; it never allocates. `Admitted` carries in `next`
what stops the *following* candidate, if anything; `Refused` says which budget failed, by how much, and
who holds it. Simplified: no host cache, no LoRA, no delayer. Imports: batch, cache, events.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sgviz.batch.req import Req
from sgviz.cache.kv_cache import KVCache, Match
from sgviz.events import Reason
from sgviz.scheduler.state import Limits

CLIP_MAX_NEW_TOKENS_ESTIMATION = 4096
MAX_HOLDERS = 8  # named in a refusal; the rest would only repeat the point

Holders = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in: `extend` new tokens behind `prefix` cached ones, `reserved` promised for output.

    `need < have` is the memory check in tokens (0, 0 when a continued chunk skips it). `next` is the
    budget that is now used up, None if the next candidate may be tried; `rem_*` is what the batch has left.
    """

    req: Req
    extend: int
    prefix: int
    need: int
    have: int
    reserved: int
    chunked: bool
    next: Reason | None
    rem_total: int
    rem_input: int
    rem_chunk: int | None

    @property
    def continued(self) -> bool:
        """A further piece of a prompt that was cut before."""
        return self.need == 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The request stays in the queue: `need` of something of which there is only `have`."""

    req: Req
    reason: Reason
    need: int
    have: int
    holders: Holders = ()


Verdict = Admitted | Refused


class Short(NamedTuple):
    """The first budget that does not do, in its own unit."""

    reason: Reason
    need: int
    have: int


def remaining_output(req: Req) -> int:
    """Output tokens the request may still ask for, clipped for estimates."""
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS_ESTIMATION)


@dataclass(slots=True)
class PrefillAdder:
    """Accounts of the batch being planned.

    Args:
        running: requests that are decoding; their future tokens are reserved at `ratio`.
        mixed_decode_tokens: decoding requests that will ride along in this batch.
        supposed_room: tokens that would be free if what `would_take` asks about came to be.
    """

    cache: KVCache
    limits: Limits
    running: Sequence[Req]
    ratio: float
    mixed_decode_tokens: int = 0
    can_run_list: list[Req] = field(default_factory=list)
    new_chunked_req: Req | None = None
    total_offset: float = 0.0
    current_offset: int = 0
    rem_input: int = 0
    rem_chunk: int | None = None
    supposed_room: int = 0

    def __post_init__(self) -> None:
        self.total_offset = self.mixed_decode_tokens + sum(self._promised(req) for req in self.running)
        self.current_offset = self.mixed_decode_tokens
        self.rem_input = self.limits.max_prefill_tokens - self.mixed_decode_tokens
        if self.limits.chunked_prefill_size is not None:
            self.rem_chunk = self.limits.chunked_prefill_size - self.mixed_decode_tokens

    @property
    def rem_total(self) -> float:
        """Tokens not yet spoken for; live, since locking a prefix makes less of the tree evictable."""
        return self._room() - self.total_offset

    @property
    def cur_rem(self) -> int:
        """Tokens free for this very step."""
        return self._room() - self.current_offset

    def add_chunked_req(self, req: Req) -> Verdict:
        """Continue the prompt that is under way: it goes first and skips the memory check.

        It is refused only when not one page is left for it; decoding then goes on and frees some.
        """
        remaining = req.seqlen - req.prefix_len
        length = min(self._chunk_limit(), remaining, self._floor_page(self.cache.room()))
        if length < remaining:
            length = self._floor_page(req.prefix_len + length) - req.prefix_len
        if length <= 0:
            page, room = self.limits.page_size, self.cache.room()
            if room >= page and self.rem_chunk is not None:
                return self._refuse(req, Short(Reason.CHUNK_BUDGET, page, self.rem_chunk))
            return self._refuse(req, Short(Reason.KV, page, room))
        req.extend_end = req.prefix_len + length
        done = length == remaining
        self._commit(req, length, reserve=done)
        self.new_chunked_req = None if done else req
        return self._admitted(req, 0, 0, chunked=not done)

    def add_one_req(self, req: Req, match: Match) -> Verdict:
        """Try a waiting request whose cached prefix is `match`; on success its prefix is locked."""
        extend, need = req.seqlen - match.length, self.need_of(req, match)
        with self.cache.held(match.node):
            have = math.ceil(self.rem_total)  # need < rem_total is need < have: need is whole
            length = self._judge(req, match)
            if isinstance(length, Short):
                return self._refuse(req, length)
            self.cache.adopt(req, match)
        req.prefix_len = match.length
        req.extend_end = match.length + length
        chunked = length < extend
        if chunked:
            self.new_chunked_req = req
        self._commit(req, length, reserve=not chunked)
        return self._admitted(req, need, have, chunked=chunked)

    def need_of(self, req: Req, match: Match) -> int:
        """KV tokens that must be free for a waiting request: its prompt, its output and a page."""
        return req.seqlen - match.length + remaining_output(req) + self.limits.page_size

    def would_take(self, req: Req, match: Match, without: Sequence[Req]) -> bool:
        """Whether `req` would be admitted if the requests `without` gave up all they have; changes nothing."""
        trial = copy.copy(self)
        trial.forget(without)
        trial.supposed_room = self.cache.releasable(without)
        return trial.takes(req, match)

    def takes(self, req: Req, match: Match) -> bool:
        """Whether `req` would be admitted; `match.node` is held."""
        return isinstance(self._judge(req, match), int)

    def walks(self, req: Req) -> bool:
        """Whether memory for `req` is judged by the ends of all that run, and not by their sum."""
        return req.sampling_params.ignore_eos and self.cache.disable_radix_cache

    def leave_out(self, req: Req, sign: int, *, rides: bool) -> None:
        """One of `running` counts no longer (sign -1: it counts again); `rides` along in this batch. Not for good:
        `running` stays, so whatever looks at that is not to be asked.
        """
        self.total_offset -= sign * self._promised(req)
        if rides:
            self._ride_along(-sign)

    def forget(self, gone: Sequence[Req]) -> None:
        """Take requests that run no longer out of the accounts."""
        names = set(map(id, gone))  # membership only
        left = [req for req in self.running if id(req) not in names]
        self.total_offset -= sum(self._promised(req) for req in self.running if id(req) in names)
        if self.mixed_decode_tokens:
            self._ride_along(len(left) - len(self.running))
        self.running = left

    def leaves_budget_after(self, chunked: Req) -> bool:
        """Whether the prompt under way, which goes first, leaves something of the chunk budget to others."""
        rest = self._ceil_page(chunked.seqlen - chunked.prefix_len)
        return self.rem_chunk is None or rest < self.rem_chunk

    def _judge(self, req: Req, match: Match) -> int | Short:
        """How many tokens of `req` would be taken now, or why none; `match.node` is held."""
        most = self.limits.prefill_max_requests
        if most is not None and len(self.can_run_list) >= most:
            return Short(Reason.MAX_REQUESTS, len(self.can_run_list) + 1, most)
        extend, need = req.seqlen - match.length, self.need_of(req, match)
        if not self._memory_fits(req, extend, need):
            return Short(Reason.KV, need, math.ceil(self.rem_total))
        return self._length_in_budget(match.length, extend)

    def _length_in_budget(self, prefix: int, extend: int) -> int | Short:
        """How much of the extend fits this batch, or why none does."""
        whole = self._ceil_page(extend)
        if self.rem_chunk is None:
            if self.can_run_list and whole >= self.rem_input:
                return Short(Reason.PREFILL_BUDGET, whole, self.rem_input)
            return extend
        if whole <= self.rem_chunk:
            return extend
        length = self._floor_page(prefix + self._floor_page(self.rem_chunk)) - prefix
        if length <= 0:
            return Short(Reason.CHUNK_BUDGET, whole, self.rem_chunk)
        return min(length, extend)

    def _memory_fits(self, req: Req, extend: int, need: int) -> bool:
        if self.walks(req):
            return self._fits_to_the_end(req, extend)
        return need < self.rem_total

    def _fits_to_the_end(self, req: Req, extend: int) -> bool:
        """With known lengths and no sharing, walk the finishes in order: memory must hold at each of them."""
        page = self.limits.page_size
        first = self._ceil_page(extend) + page
        if first > min(self.rem_total, self.cur_rem):
            return False
        held = [(remaining_output(other), other.seqlen) for other in (*self.running, *self.can_run_list)]
        free, freed = self.cur_rem - first, 0
        if not held:
            return remaining_output(req) <= free  # the walk's margin would bar the longest request for ever
        held.append((remaining_output(req), req.seqlen))
        held.sort()
        left = len(held)
        for tokens_left, occupied in held:
            if free + freed - tokens_left * left <= left:
                return False
            left -= 1
            freed += occupied
        return True

    def _chunk_limit(self) -> int:
        """Length of a continued chunk: the chunk budget, and the free memory while there is any."""
        chunk = self.rem_chunk if self.rem_chunk is not None else self.limits.max_req_len
        total = int(self.rem_total)
        return min(chunk, total) if total > 0 else chunk

    def _commit(self, req: Req, length: int, *, reserve: bool) -> None:
        pages = self._ceil_page(length)
        self.can_run_list.append(req)
        self.current_offset += pages + self.limits.page_size
        self.total_offset += pages + self.limits.page_size + self._reserved(req, reserve)
        self.rem_input -= pages
        if self.rem_chunk is not None:
            self.rem_chunk -= pages

    def _room(self) -> int:
        return self.cache.room() + self.supposed_room

    def _promised(self, req: Req) -> float:
        """Future tokens of a running request that nobody else may count on."""
        return remaining_output(req) * (1.0 if req.sampling_params.ignore_eos else self.ratio)

    def _ride_along(self, more: int) -> None:
        """So many more (or fewer) decoding requests are in this batch, a token each."""
        self.mixed_decode_tokens += more
        self.total_offset += more
        self.current_offset += more
        self.rem_input -= more
        if self.rem_chunk is not None:
            self.rem_chunk -= more

    @staticmethod
    def _reserved(req: Req, reserve: bool) -> int:
        return min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS_ESTIMATION) if reserve else 0

    def _admitted(self, req: Req, need: int, have: int, *, chunked: bool) -> Admitted:
        reserved = self._reserved(req, not chunked)
        return Admitted(
            req, req.extend_len, req.prefix_len, need, have, reserved, chunked, self._next(),
            int(self.rem_total), self.rem_input, self.rem_chunk,
        )  # fmt: skip

    def _next(self) -> Reason | None:
        if self.rem_total <= 0 or self.cur_rem <= 0:
            return Reason.KV
        if self.rem_chunk is not None and self.rem_chunk <= 0:
            return Reason.CHUNK_BUDGET
        return Reason.PREFILL_BUDGET if self.rem_input <= 0 else None

    def _refuse(self, req: Req, short: Short) -> Refused:
        return Refused(req, *short, self._holders(short.reason))

    def _holders(self, reason: Reason) -> Holders:
        """Who holds the scarce thing: KV tokens (held and promised) or this batch's budget."""
        if reason is Reason.KV:
            held = [
                (req.rid, req.kv.allocated + remaining_output(req))
                for req in (*self.running, *self.can_run_list)
            ]
        else:
            held = [(req.rid, req.extend_len) for req in self.can_run_list]
        held.sort(key=lambda item: -item[1])
        return tuple(held[:MAX_HOLDERS])

    def _ceil_page(self, tokens: int) -> int:
        page = self.limits.page_size
        return -(-tokens // page) * page

    def _floor_page(self, tokens: int) -> int:
        return tokens // self.limits.page_size * self.limits.page_size
