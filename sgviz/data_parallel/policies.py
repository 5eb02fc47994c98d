"""Dispatch policies: which rank gets a request. Each is a small object; your own needs a `name` and `choose`.

    class MostRoom:
        name = "most-room"

        def choose(self, request, ranks):
            return min((rank for rank in ranks if rank.active), key=lambda rank: rank.tokens).rank

named as `load_balance_method="file.py:MostRoom"`. An explicit rank goes before every policy.
Mirrors the `load_balance_method`s of SGLang. Imports: config, messages, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from sgviz.config.user_class import UserClass
from sgviz.errors import BadRequest, Unavailable
from sgviz.messages import TokenizedGenerateReqInput

PARAM = "load_balance_method"
UNSEEN = -1


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank as it is believed to be: `requests` it has, `tokens` they hold or bring; -1 where nobody looked."""

    rank: int
    active: bool
    requests: int = UNSEEN
    tokens: int = UNSEEN


class DispatchPolicy(Protocol):
    """Chooses; changes nothing but its own counters.

    Attributes:
        name: in events. A policy that has `uses_load` False is shown no loads, and none are read for it.
    """

    name: str

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        """The rank that gets `request`, an active one of `ranks`, of which at least one is.

        Raises:
            SgvizError: it cannot have one; the request ends with that.
        """
        ...


class RoundRobin:
    """In turn, over the active ranks."""

    name = "round_robin"
    uses_load = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        for step in range(len(ranks)):
            rank = (self._next + step) % len(ranks)
            if ranks[rank].active:
                self._next = (rank + 1) % len(ranks)
                return rank
        raise Unavailable("no data parallel rank is left")


class FollowBootstrapRoom:
    """By the request's room, so that the two sides of a request find each other without asking."""

    name = "follow_bootstrap_room"
    uses_load = False

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        if request.bootstrap_room is None:
            raise BadRequest(
                "bootstrap_room: this server spreads requests by their room (load_balance_method "
                "follow_bootstrap_room), so each needs one",
                param="bootstrap_room",
            )
        return request.bootstrap_room % len(ranks)


class TotalRequests:
    """Who has the fewest requests; the first of them."""

    name = "total_requests"
    uses_load = True

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        return min(_active(ranks), key=lambda rank: rank.requests).rank


class TotalTokens:
    """Who has the fewest tokens; of those the one with the fewest requests."""

    name = "total_tokens"
    uses_load = True

    def choose(self, request: TokenizedGenerateReqInput, ranks: Sequence[RankLoad]) -> int:
        return min(_active(ranks), key=lambda rank: (rank.tokens, rank.requests)).rank


def _active(ranks: Sequence[RankLoad]) -> list[RankLoad]:
    if active := [rank for rank in ranks if rank.active]:
        return active
    raise Unavailable("no data parallel rank is left")


def _policies() -> dict[str, Callable[[], DispatchPolicy]]:
    kinds: list[Callable[[], DispatchPolicy]] = [RoundRobin, FollowBootstrapRoom, TotalRequests, TotalTokens]
    return {kind().name: kind for kind in kinds}


def make_dispatch_policy(name: str, *, is_prefill: bool = False) -> DispatchPolicy:
    """The policy of that name, or the user's own as module:Class or file.py:Class.

    Args:
        is_prefill: of a server that runs prompts only; `auto` follows the room there.

    Raises:
        ConfigError: the user's own cannot be loaded, or is no policy.
    """
    if ":" in name:
        return _user_policy(name)
    if name == "auto":
        name = FollowBootstrapRoom.name if is_prefill else RoundRobin.name
    return _policies()[name]()


def _user_policy(name: str) -> DispatchPolicy:
    user = UserClass(PARAM, name)
    made = user.make()
    if not isinstance(getattr(made, "name", None), str):
        raise user.fault("has no attribute `name` that is a text")
    if not callable(getattr(made, "choose", None)):
        raise user.fault("has no method choose(request, ranks)")
    return cast(DispatchPolicy, made)
