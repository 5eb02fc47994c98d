"""Events of a stream pass whole and unchanged, wherever the pieces are cut and whatever ends a line."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upstreams import Upstream, rig

from sgviz.router.pair_stream import WholeEvents

EVENTS = [b"data: one", b": a comment", b"data: {\xc3\xa9}", b"event: x", b"id: 7", b"data: [DONE]"]
LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Events with their ends (one kind of line end), and the same bytes in pieces."""
    end = draw(st.sampled_from(LINE_ENDS))
    events = [
        end.join(draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3))) + end + end
        for _ in range(draw(st.integers(0, 4)))
    ]
    raw = b"".join(events)
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    return events, [raw[start:stop] for start, stop in pairwise(cuts)]


@given(streams())
def test_what_goes_out_is_whole_events_at_once_and_all_bytes(case: tuple[list[bytes], list[bytes]]) -> None:
    events, pieces = case
    cutter, out, came = WholeEvents(), b"", b""
    ends = [b"".join(events[:count]) for count in range(len(events) + 1)]
    for piece in pieces:
        came += piece
        out += cutter.add(piece)
        whole = max(end for end in ends if came.startswith(end))
        assert out == whole
    assert out + cutter.rest() == came == b"".join(events)


@given(streams(), st.sampled_from(EVENTS))
def test_the_half_of_an_event_is_kept_back(case: tuple[list[bytes], list[bytes]], half: bytes) -> None:
    events, pieces = case
    cutter = WholeEvents()
    assert b"".join(map(cutter.add, [*pieces, half])) == b"".join(events)
    assert cutter.rest() == half


def test_a_long_event_in_small_pieces_is_searched_once() -> None:
    cutter = WholeEvents()
    for _ in range(20_000):
        assert cutter.add(b"x" * 100) == b""
    assert len(cutter.add(b"\r\n\r\n")) == 2_000_004 and cutter.rest() == b""


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_stream_with_any_line_ends_comes_event_by_event_and_breaks_off_behind_one(end: bytes) -> None:
    async def run() -> None:
        whole = b"data: {}" + end + end
        pieces = [bytes([byte]) for byte in whole * 2 + b"data: hal"]
        decode = Upstream("decode", chunks=[*pieces, b"never"], die_after=len(pieces))
        async with rig(decode=[decode]) as it:
            content = (await it.post(stream=True)).content
            assert content.startswith(whole * 2)
            last = content.removeprefix(whole * 2)
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == 503 and last.endswith(b"}\n\n")

    asyncio.run(run())


@pytest.mark.parametrize("end", LINE_ENDS)
def test_an_event_reaches_the_client_before_the_next_is_there(end: bytes) -> None:
    async def run() -> None:
        first = b"data: {}" + end + end
        async with rig(decode=[Upstream("decode", chunks=[first, b"data: later\n\n"], stuck=True)]) as it:
            body = {"text": "hi", "stream": True}
            async with it.client.stream("POST", it.router.url + "/generate", json=body) as response:
                assert await anext(response.aiter_raw()) == first

    asyncio.run(run())
