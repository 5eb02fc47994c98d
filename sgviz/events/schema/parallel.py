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
