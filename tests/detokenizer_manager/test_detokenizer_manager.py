"""The detokenizer on real sockets: order, trimming, bounded memory, faults of single requests, shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from byte_bpe import ByteBpe

from sgviz.channel import PortArgs, Receiver, Sender
from sgviz.detokenizer_manager import DetokenizerManager
from sgviz.events import RingSink, TimeStats, Tracer, VirtualClock
from sgviz.events.schema import TextEmitted, TraceCost
from sgviz.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    ConfigureTraceReq,
    FinishReason,
    ShutdownReq,
    ToDetokenizer,
    ToTokenizer,
)

CODEC = ByteBpe()
PROMPT = CODEC.encode("prompt", merge=False)


@dataclass
class Rig:
    """A detokenizer between the two sockets a test holds."""

    manager: DetokenizerManager
    sender: Sender
    receiver: Receiver[ToTokenizer]
    ring: RingSink
    clock: VirtualClock

    def exchange(self, *messages: BatchTokenIDOutput) -> list[BatchStrOutput]:
        for message in messages:
            self.sender.send(message)
        self.sender.send(ShutdownReq())
        self.manager.run()
        out = self.receiver.drain()
        assert all(isinstance(message, BatchStrOutput) for message in out)
        return out


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    context, ports = zmq.Context(), PortArgs.for_threads()
    ring, clock = RingSink(), VirtualClock(7)
    inbox: Receiver[ToDetokenizer] = Receiver(context, ports.detokenizer_ipc_name, ToDetokenizer, bind=True)
    results: Receiver[ToTokenizer] = Receiver(context, ports.tokenizer_ipc_name, ToTokenizer, bind=True)
    sender, outbox = Sender(context, ports.detokenizer_ipc_name), Sender(context, ports.tokenizer_ipc_name)
    codec, max_states = getattr(request, "param", (CODEC, 65536))
    manager = DetokenizerManager(
        codec, inbox, outbox, Tracer("detokenizer", ring, clock), clock, max_states, idle_wait_ms=5
    )
    yield Rig(manager, sender, results, ring, clock)
    for socket in (inbox, results, sender, outbox):
        socket.close()
    context.term()


@dataclass
class Row:
    rid: str
    ids: list[int]
    first: bool = True
    reason: FinishReason | None = None
    total: int | None = None
    skip_special: bool = True
    no_stop_trim: bool = False


def batch(*rows: Row) -> BatchTokenIDOutput:
    context = PROMPT[-5:]
    return BatchTokenIDOutput(
        rids=[row.rid for row in rows],
        finished_reasons=[row.reason for row in rows],
        output_ids=[row.ids for row in rows],
        prompt_tokens=[len(PROMPT)] * len(rows),
        completion_tokens=[len(row.ids) if row.total is None else row.total for row in rows],
        cached_tokens=[3] * len(rows),
        retraction_counts=[0] * len(rows),
        time_stats=[TimeStats(created=1, output_streamed=5) for _ in rows],
        decode_ids=[context + row.ids if row.first else row.ids for row in rows],
        read_offsets=[len(context)] * len(rows),
        skip_special_tokens=[row.skip_special for row in rows],
        spaces_between_special_tokens=[True] * len(rows),
        no_stop_trim=[row.no_stop_trim for row in rows],
    )


LENGTH = FinishReason(type="length", length=4)


def stop(matched: int | str) -> FinishReason:
    return FinishReason(type="stop", matched=matched)


def ids(text: str) -> list[int]:
    return CODEC.encode(text, merge=False)


def test_columns_pass_through_and_text_is_added(rig: Rig) -> None:
    first = batch(Row("a", ids("hi ")), Row("b", ids("yo")))
    last = batch(Row("b", ids("!"), first=False, reason=LENGTH, total=3))
    one, two = rig.exchange(first, last)
    assert one.rids == ["a", "b"]
    assert one.output_strs == ["hi ", "yo"]
    assert two.output_strs == ["!"]
    assert two.finished_reasons == [LENGTH]
    assert (one.output_ids, one.cached_tokens) == ([ids("hi "), ids("yo")], [3, 3])
    assert [stats.detokenized for stats in one.time_stats] == [7, 7]
    assert one.time_stats[0].output_streamed == 5
    assert list(rig.manager.decode_status) == ["a"]


def test_messages_of_a_drain_keep_their_order(rig: Rig) -> None:
    letters = "the quick brown fox"
    rows = [Row("a", ids(letters[0]))] + [Row("a", ids(c), first=False) for c in letters[1:]]
    assert "".join(m.output_strs[0] for m in rig.exchange(*map(batch, rows))) == letters


def test_stop_token_and_stop_string_are_trimmed_unless_told_otherwise(rig: Rig) -> None:
    rows = [
        Row("token", [*ids("hi"), CODEC.eos], reason=stop(CODEC.eos), skip_special=False),
        Row(
            "token kept",
            [*ids("hi"), CODEC.eos],
            reason=stop(CODEC.eos),
            skip_special=False,
            no_stop_trim=True,
        ),
        Row("string", ids("hi END x"), reason=stop("END")),
        Row("string kept", ids("hi END x"), reason=stop("END"), no_stop_trim=True),
        Row("special skipped", [*ids("a"), CODEC.eos, *ids("b")], reason=LENGTH),
        Row("special shown", [*ids("a"), CODEC.eos, *ids("b")], reason=LENGTH, skip_special=False),
    ]
    (out,) = rig.exchange(batch(*rows))
    assert out.output_strs == ["hi", "hi<eos>", "hi ", "hi END", "ab", "a<eos>b"]
    assert [len(row) for row in out.output_ids] == [3, 3, 8, 8, 3, 3]
    assert not rig.manager.decode_status


def test_ids_outside_the_vocabulary_become_zero(rig: Rig) -> None:
    strange = [*ids("a"), CODEC.vocab_size, -1, 10**9]
    (out,) = rig.exchange(batch(Row("a", strange, reason=LENGTH)))
    assert out.output_strs == [CODEC.decode([*ids("a"), 0, 0, 0])]


@pytest.mark.parametrize("rig", [(CODEC, 2)], indirect=True)
def test_the_oldest_request_is_forgotten_and_its_next_token_is_an_error(rig: Rig) -> None:
    rows = [Row("a", ids("x")), Row("b", ids("y")), Row("c", ids("z"))]
    later = [Row(rid, ids("!"), first=False, total=2) for rid in "abc"]
    abort = FinishReason(type="abort", message="by its caller")
    _, out, gone = rig.exchange(batch(*rows), batch(*later), batch(Row("a", [], first=False, reason=abort)))
    assert out.output_strs == ["", "!", "!"]
    reason = out.finished_reasons[0]
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 500)
    assert "'a'" in (reason.message or "") or " a " in (reason.message or "")
    assert out.finished_reasons[1:] == [None, None]
    assert gone.finished_reasons == [abort]


def test_a_rid_that_begins_again_does_not_see_what_was_left_of_it(rig: Rig) -> None:
    """A request taken from the queue after a retraction never gets a last message here."""
    _, again = rig.exchange(batch(Row("a", ids("old "))), batch(Row("a", ids("new"), reason=LENGTH)))
    assert again.output_strs == ["new"]


class Picky(ByteBpe):
    """Cannot decode the byte '#'."""

    def decode_batch(
        self,
        list_of_ids: list[list[int]],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        if any(ids("#")[0] in row for row in list_of_ids):
            raise ValueError("cannot decode #")
        return super().decode_batch(list_of_ids, skip_special_tokens, spaces_between_special_tokens)


@pytest.mark.parametrize("rig", [(Picky(), 65536)], indirect=True)
def test_a_fault_ends_one_request_and_the_loop_goes_on(rig: Rig) -> None:
    first = batch(Row("good", ids("a")), Row("bad", ids("#")), Row("too", ids("b")))
    later = batch(
        Row("good", ids("c"), first=False, reason=LENGTH), Row("bad", ids("d"), first=False, total=2)
    )
    one, two = rig.exchange(first, later)
    assert one.output_strs == ["a", "", "b"]
    reason = one.finished_reasons[1]
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 500)
    assert "cannot decode #" in (reason.message or "")
    assert two.output_strs[0] == "c"
    assert list(rig.manager.decode_status) == ["too"]


def test_events_say_what_left_and_what_is_held(rig: Rig) -> None:
    half = ids("é")[:1]
    rig.exchange(batch(Row("a", ids("ab ") + half), Row("b", ids("cd"), reason=LENGTH)))
    bodies = [event.body for event in rig.ring.snapshot() if not isinstance(event.body, TraceCost)]
    assert bodies == [TextEmitted(rids=("a", "b"), chars=(3, 2), held=(4, 0), finished=(False, True))]


def test_tracing_is_switched_by_message(rig: Rig) -> None:
    rig.sender.send(ConfigureTraceReq(on=False))
    rig.exchange(batch(Row("a", ids("x"), reason=LENGTH)))
    assert rig.ring.snapshot() == []


def test_stops_are_named_and_idle_comes_before_waiting(rig: Rig) -> None:
    loop = rig.manager.event_loop()
    assert next(loop) == "idle"
    rig.sender.send(batch(Row("a", ids("x"), reason=LENGTH)))
    assert [next(loop), next(loop), next(loop)] == ["received", "processed", "idle"]
    rig.sender.send(ShutdownReq())
    assert [*loop] == ["received"]
