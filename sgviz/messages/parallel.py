"""Messages of data parallel ranks: which of them live, who got a request, how busy they are.

Mirrors ActiveRanksOutput and LoadSnapshot of SGLang; RoutedReq is ours. Imports: messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from sgviz.messages.debug import DebugReq
from sgviz.messages.flow import StartProfileReqInput, StopProfileReqInput, UpdateWeightFromDiskReqInput
from sgviz.messages.session import CloseSessionReqInput, OpenSessionReqInput


class ActiveRanksOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """To the controller: `status[rank]` says whether that rank lives. `why`: of the last change, which `requests` of
    the rank ended with. It passes it on to the detokenizer.

    `aside`: of the ranks that live and get no requests, as their weights are not those of the others, why.
    """

    status: list[bool]
    why: str = ""
    requests: int = 0
    aside: dict[int, str] = {}


class RoutedReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """Controller to TokenizerManager: the requests `rids` went to these ranks.

    Answers bypass the controller, so this is how the TokenizerManager knows whose requests end with a rank. `created`:
    their stamps, which tell them from earlier requests of the same rid.
    """

    rids: list[str]
    created: list[int]
    dp_ranks: list[int]


class LoadSnapshot(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """How busy a rank is, as it published it.

    Attributes:
        timestamp: ns of its own clock; the same twice: nothing new.
        num_waiting_uncached_tokens: prompt tokens in its queues, cached ones not told apart, and those that are left of
            a prompt that runs in pieces.
        num_used_tokens: KV tokens that requests hold.
        num_total_tokens: with what the waiting ones need at least.
        num_taken_reqs: requests that it took from its inbox since it began, health probes not counted; all else is told
            of these only. -1: not told.
    """

    timestamp: int
    dp_rank: int
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    num_taken_reqs: int = -1


def home_rank(session_id: str, live: Sequence[int]) -> int:
    """The rank of `live`, not empty, that has a session of that name. The loss of another rank does not change it."""
    return max(live, key=lambda rank: blake2b(f"{rank} {session_id}".encode(), digest_size=8).digest())


def addressees(message: msgspec.Struct, live: Sequence[int], one_process: bool) -> list[int]:
    """The ranks that a control message goes to, each of which answers it if it has an `id`.

    Args:
        live: the ranks that live, in order. one_process: they are threads of one, of which torch makes one profile.
    """
    if isinstance(message, DebugReq):  # a debugger attaches to one scheduler, the first
        return [0] if 0 in live else []
    if isinstance(message, OpenSessionReqInput | CloseSessionReqInput):
        return [home_rank(message.session_id, live)] if live else []
    if isinstance(message, UpdateWeightFromDiskReqInput) and message.ranks is not None:
        return [rank for rank in message.ranks if rank in live]
    if one_process and isinstance(message, StartProfileReqInput | StopProfileReqInput):
        return list(live[:1])
    return list(live)
