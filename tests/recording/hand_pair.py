"""One request over two servers, every moment of it written by hand."""

from __future__ import annotations

from hand_loop import MS, Hand

from sgviz.events.schema import (
    BatchPlanned,
    DisaggBootstrapped,
    DisaggPreallocated,
    DisaggPreallocRefused,
    DisaggQueued,
    DisaggTransferred,
    Event,
    KvReceived,
    KvSent,
    OutputStreamed,
    ProcessStarted,
    TokensSampled,
)
from sgviz.recording import PairedRecording, Recording

YEAR = 10**18


def at(ms: float) -> int:
    return round(ms * MS) + MS


def piece(kind: type, number: int, start: int, tokens: int, begin: float, end: float, last: bool) -> object:
    return kind(
        rid="a", room=7, piece=number, start=start, tokens=tokens, bytes=1000 * tokens, start_ns=at(begin),
        end_ns=at(end), last=last,
    )  # fmt: skip


def started(hand: Hand, unix: int) -> None:
    body = ProcessStarted(component="scheduler", pid=1, mode="threads", unix_ns=unix + MS, monotonic_ns=MS)
    hand.at(0, body)


def queued(hand: Hand, ms: float, side: str, received: float, rid: str = "a", room: int = 7) -> None:
    body = DisaggQueued(
        rid=rid, side=side, room=room, peer="10.0.0.1:8998", prompt_tokens=10, received_ns=at(received)
    )
    hand.at(ms, body)


def prefill_side(unix: int = YEAR) -> list[Event]:
    """Taken at 1, queued 2, met at 20, runs 25 to 45 (two pieces: 30 to 31, 46 to 50), told to be done at 53."""
    hand = Hand()
    started(hand, unix)
    queued(hand, 2, "prefill", 1)
    hand.at(20, DisaggBootstrapped(rid="a", side="prefill", room=7, peer="10.0.0.1:8998"))
    hand.enter(20.5, "a", taken=1)
    hand.plan(22, 1, "extend")
    hand.launch(23, 1, turn=21)
    hand.at(31, piece(KvSent, 0, 0, 4, 30, 31, False))  # type: ignore[arg-type]
    hand.finish(45.5, 1, (25, 45), wait=24)
    hand.at(45.75, TokensSampled(bid=1, rids=("a",), token_ids=(5,)))
    hand.process(46, 1)
    hand.at(50, piece(KvSent, 1, 4, 6, 46, 50, True))  # type: ignore[arg-type]
    body = DisaggTransferred(
        rid="a", side="prefill", room=7, ok=True, why="", bytes=10_000, pieces=2, start_ns=at(30), end_ns=at(52),
        backend="shm",
    )  # fmt: skip
    hand.at(53, body)
    hand.at(54, OutputStreamed(rids=("a",), tokens=(1,), finished=(True,)))
    return hand.events


def decode_side(unix: int = YEAR) -> list[Event]:
    """Taken at 3, queued 4, met at 6, no room from 8 to 18, KV in place at 51, seen at 52, decodes from 55 to 65."""
    hand = Hand()
    started(hand, unix)
    queued(hand, 4, "decode", 3)
    hand.at(6, DisaggBootstrapped(rid="a", side="decode", room=7, peer="10.0.0.1:8998"))
    hand.at(8, DisaggPreallocRefused(rid="a", room=7, reason="kv", need=30, have=12, behind=0))
    hand.at(18, DisaggPreallocated(rid="a", room=7, tokens=10, prefix_len=0, need=30, have=40))
    hand.at(32, piece(KvReceived, 0, 0, 4, 31, 32, False))  # type: ignore[arg-type]
    hand.at(51, piece(KvReceived, 1, 4, 6, 50, 51, True))  # type: ignore[arg-type]
    body = DisaggTransferred(
        rid="a", side="decode", room=7, ok=True, why="", bytes=10_000, pieces=2, start_ns=at(30), end_ns=at(51),
        backend="shm",
    )  # fmt: skip
    hand.at(52, body)
    hand.enter(52, "a", taken=3)
    plan = BatchPlanned(
        bid=1, mode="prebuilt", rids=("a",), extend_lens=(0,), prefix_lens=(10,), running=0, waiting=0, kv_free=0,
        kv_evictable=0, kv_protected=0, new_token_ratio=0.5,
    )  # fmt: skip
    hand.at(53, plan)
    hand.at(53.25, TokensSampled(bid=1, rids=("a",), token_ids=(5,)))
    hand.process(53.5, 1)
    hand.plan(54, 2)
    hand.launch(54.5, 2, turn=52.5)
    hand.finish(66, 2, (55, 65), wait=54.75)
    hand.at(66.25, TokensSampled(bid=2, rids=("a",), token_ids=(6,)))
    hand.process(66.5, 2, "a")
    hand.at(67, OutputStreamed(rids=("a",), tokens=(2,), finished=(True,)))
    return hand.events


def hand_pair(unix: int = YEAR) -> PairedRecording:
    """Both on one host; `unix`: calendar time at which the decode side's clock began."""
    return PairedRecording(
        Recording(prefill_side(), source="p.sgv"), Recording(decode_side(unix), source="d.sgv")
    )
