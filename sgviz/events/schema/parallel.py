"""Events of many schedulers: which data parallel rank, which pair of servers. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body


class DpChose(Body, frozen=True, tag="dp.chose"):
    """The data parallel controller sent a request to `rank`.

    `policy`: by what; `explicit` instead of it when the request named its rank. `candidates`: of each rank its number,
    whether it was active, and the requests and tokens it was thought to have at that moment (-1: the policy did not
    look). `received_ns`: when the controller took it from its inbox.
    """

    rid: str
    rank: int
    policy: str
    candidates: tuple[tuple[int, bool, int, int], ...]
    prompt_tokens: int
    received_ns: int


class DpRankChanged(Body, frozen=True, tag="dp.rank_changed"):
    """A data parallel rank came (`active`) or was lost; `requests`: how many ended with it."""

    rank: int
    active: bool
    why: str
    requests: int = 0


class RouterPaired(Body, frozen=True, tag="router.paired"):
    """The router gave a request a prefill and a decode server (their addresses) and a room to meet in.

    `candidates`: of each server its address, its side, whether it was healthy, and the requests that the router had
    there at that moment. `attempt`: 1, or more if servers before failed without a token.
    """

    rid: str
    room: int
    prefill: str
    decode: str
    policy: str
    candidates: tuple[tuple[str, str, bool, int], ...]
    attempt: int = 1


class RouterFailed(Body, frozen=True, tag="router.failed"):
    """The pair that `router.paired` names (same rid, room, attempt) gave no answer, or broke off in the middle of one.

    `side`: who is to blame: prefill, decode, both, request (a server refused what was asked), or unknown (the router
    cannot know). `why`: in words. `status`: what the client gets for it, if no other pair follows. `began`: a part of
    the answer had gone to the client, so none can. Clients that leave and a router that stops are no failures.
    """

    rid: str
    room: int
    attempt: int
    prefill: str
    decode: str
    side: str
    why: str
    status: int
    began: bool = False
