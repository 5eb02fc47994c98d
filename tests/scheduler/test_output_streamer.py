"""Which tokens leave when."""

from __future__ import annotations

import pytest
from rig import Rig

from sgviz.scheduler.stops import Stop

LETTERS = {10: "a", 13: "E", 14: "N", 15: "D", 16: "X"}


def text(ids: list[int], skip_special_tokens: bool = True) -> str:
    return "".join(LETTERS.get(token, ".") for token in ids)


def scripted(ids: list[int], **settings: object) -> Rig:
    """The model answers with these ids and then with 10s."""
    return Rig(rule=lambda rid, index, _: ids[index] if index < len(ids) else 10, decode=text, **settings)


def test_every_token_at_once_by_default() -> None:
    rig = scripted([])
    rid = rig.submit([1, 2, 3], 5)
    rig.run()
    assert rig.answers[rid].deltas == [1, 1, 1, 1, 1]


def test_the_first_token_at_once_then_the_interval() -> None:
    rig = scripted([], stream_interval=4)
    rid = rig.submit([1, 2, 3], 11)
    rig.run()
    assert rig.answers[rid].deltas == [1, 4, 4, 2]
    assert [at - rig.answers[rid].at[0] for at in rig.answers[rid].at] == [0, 4, 8, 10]


def test_a_request_may_bring_its_own_interval() -> None:
    rig = scripted([], stream_interval=4)
    own, server = rig.submit([1], 7, stream_interval=3), rig.submit([2], 7)
    rig.run()
    assert rig.answers[own].deltas == [1, 3, 3]
    assert rig.answers[server].deltas == [1, 4, 2]


@pytest.mark.parametrize(
    ("most", "deltas"), [(1, [1]), (49, [49]), (50, [50]), (51, [50, 1]), (120, [50, 50, 20])]
)
def test_not_streaming_sends_the_end_and_a_sign_of_life_every_50(most: int, deltas: list[int]) -> None:
    rig = scripted([])
    rid = rig.submit([1, 2, 3], most, stream=False)
    rig.run()
    assert rig.answers[rid].deltas == deltas and rig.answers[rid].finals == 1


class TestStopStrings:
    """The text of the ids is seen by a client at once, so what could be a stop string waits."""

    def sent(self, ids: list[int], most: int = 6, **settings: object) -> tuple[list[int], Rig]:
        rig = scripted(ids, **settings)
        rid = rig.submit([1], most, stop="END")
        rig.run()
        rig.check_empty()
        return rig.answers[rid].deltas, rig

    def test_completed(self) -> None:
        """...EN is held; D completes it and all leave with the end, for the detokenizer to cut."""
        deltas, rig = self.sent([10, 13, 14, 15])
        assert deltas == [1, 3]
        assert rig.answers["r0"].finish.matched == "END"

    def test_not_completed(self) -> None:
        """...EN is held; X shows that it was none, and all leave at once."""
        deltas, rig = self.sent([10, 13, 14, 16])
        assert deltas == [1, 3, 1, 1] and rig.answers["r0"].reason == "length"

    def test_held_at_the_end(self) -> None:
        """The answer ends by length in what might have become one: it is delivered."""
        deltas, rig = self.sent([10, 13, 14], most=3)
        assert deltas == [1, 2] and rig.answers["r0"].reason == "length"

    def test_the_first_token_may_be_held_too(self) -> None:
        assert self.sent([13, 16], most=3)[0] == [2, 1]

    def test_a_due_interval_waits(self) -> None:
        assert self.sent([10, 10, 13, 14, 16], most=8, stream_interval=2)[0] == [1, 4, 2, 1]

    def test_a_sign_of_life_waits(self) -> None:
        ids = [10] * 48 + [13, 14, 16]  # the 50th token is held, the 51st releases it
        rig = scripted(ids)
        rid = rig.submit([1], 55, stream=False, stop="END")
        rig.run()
        assert rig.answers[rid].deltas == [51, 4]


def test_ids_carry_their_context_once() -> None:
    """The detokenizer gets up to five prompt ids with the first message, then only what is new."""
    rig = scripted([])
    long, short = rig.submit(range(20, 30), 3), rig.submit([7, 8], 3)
    rig.run()
    assert rig.answers[long].decode_ids == [25, 26, 27, 28, 29, 10, 10, 10]
    assert rig.answers[short].decode_ids == [7, 8, 10, 10, 10]


def test_counts_and_stamps_of_a_message() -> None:
    rig = scripted([])
    rig.submit(range(10), 1)
    rig.run()
    rig.submit([*range(10), 11], 2)
    messages = []
    send = rig.to_detokenizer.send
    rig.to_detokenizer.send = lambda message: (messages.append(message), send(message))
    rig.run()
    first, last = messages
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == ([11], [1], [10])
    assert last.completion_tokens == [2] and last.read_offsets == [5]
    assert first.finished_reasons == [None] and last.finished_reasons[0].type == "length"
    stats = last.time_stats[0]
    line = [stats.scheduler_recv, stats.wait_queue_entry, stats.forward_entry, stats.prefill_finished]
    line += [stats.completion, stats.output_streamed]
    assert all(line) and line == sorted(line)
    assert first.time_stats[0].output_streamed < stats.output_streamed  # a message keeps its own stamps


def test_logprobs_travel_with_their_tokens() -> None:
    rig = scripted([], stream_interval=3)
    with_logprobs, without = rig.submit([1], 8, logprob=True), rig.submit([2], 8)
    rig.run()
    assert len(rig.answers[with_logprobs].logprobs) == 8
    assert rig.answers[without].logprobs == []


def test_one_message_a_step_for_all_requests() -> None:
    rig = scripted([])
    for i in range(5):
        rig.submit([i], 3)
    sent = 0
    while True:
        before = len(rig.to_detokenizer.messages)
        assert before == 0
        rig.clock.advance(1)
        stop = next(rig._loop)
        sent += len(rig.to_detokenizer.messages)
        rig._collect()
        if stop is Stop.IDLE:
            break
    assert sent == 3
