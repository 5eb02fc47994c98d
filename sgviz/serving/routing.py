"""Which data parallel rank a request asks for: a header that a router in front may set, or a field of the body.

Mirrors `X-Data-Parallel-Rank`, which goes over the body, `routed_dp_rank` and its other name. Whether there is such a
rank is checked where the ranks are known. What a router hears of ranks that get no requests. And where a request of a
prefill/decode pair meets its other side. Imports: errors, messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sgviz.errors import BadRequest
from sgviz.messages import GenerateReqInput

HEADER = "X-Data-Parallel-Rank"
FIELDS = ("routed_dp_rank", "data_parallel_rank")
MOST_DIGITS = 20  # more than any number of ranks has; what is longer is no rank either
RANKS_OUT = "X-Data-Parallel-Ranks-Out"  # of an answer to /ping
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")


def asked_rank(headers: Mapping[str, str], request: msgspec.Struct) -> int | None:
    """The rank by its number; None if none is asked for.

    Raises:
        BadRequest: the header is no number, or the two names of the field disagree.
    """
    text = headers.get(HEADER)
    if text is not None:
        if not (text.isascii() and text.isdigit()):
            raise BadRequest(f"{HEADER} must be the number of a rank, got {text!r:.60}", param=HEADER)
        return int(text.lstrip("0")[:MOST_DIGITS] or "0")
    given = {name: value for name in FIELDS if (value := getattr(request, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise BadRequest(
            f"{FIELDS[0]} and {FIELDS[1]} are one field by two names, and differ: {given}", param=FIELDS[0]
        )
    return next(iter(given.values()), None)


def tell_ranks_out(out: Sequence[int], size: int) -> dict[str, str]:
    """Headers that tell a router which of the ranks get no requests, as in `1,3 of 4`; none if all do."""
    return {RANKS_OUT: f"{','.join(map(str, out))} of {size}"} if out else {}


def ranks_out(headers: Mapping[str, str]) -> tuple[int, frozenset[int]]:
    """How many ranks there are and which get no requests, as far as `tell_ranks_out` said it; else 1 and none."""
    try:
        out, size = headers.get(RANKS_OUT, "").split(" of ")
        return int(size), frozenset(map(int, out.split(",")))
    except ValueError:
        return 1, frozenset()


def take_meeting(request: msgspec.Struct, obj: GenerateReqInput) -> None:
    """Hand the fields of MEETING on to the TokenizerManager, which knows whether this server has a use for them."""
    for name in MEETING:
        setattr(obj, name, getattr(request, name, None))
