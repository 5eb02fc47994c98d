"""Messages into the scheduler: aborts, refusals, flushes, probes, its own account."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from rig import Answer, Rig

from sgviz.errors import ConfigError
from sgviz.events.schema import CacheFlushed, QueueEntered
from sgviz.messages import (
    ConfigureTraceReq,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    SamplingParams,
)
from sgviz.scheduler.stops import Stop

LOOPS = pytest.mark.parametrize("overlap", [False, True])


def make(overlap: bool = False, **settings: object) -> Rig:
    return Rig(disable_overlap_schedule=not overlap, **settings)


class TestRefusals:
    def test_queue_full(self) -> None:
        rig = make(max_queued_requests=2, max_running_requests=1)
        rids = [rig.submit([i], 3) for i in range(4)]
        rig.until(Stop.RECEIVED)
        refused = [rig.answers[rid] for rid in rids[2:]]
        assert [answer.status for answer in refused] == [503, 503]
        assert "2" in refused[0].finish.message and refused[0].finish.err_type == "ServiceUnavailableError"
        rig.run()
        rig.check_empty()
        assert [rig.answers[rid].reason for rid in rids[:2]] == ["length", "length"]

    def test_too_long(self) -> None:
        rig = make(tokens=512, context_len=64)
        most = rig.state.limits.max_req_input_len
        fits, not_ = rig.submit([1] * most, 1), rig.submit([1] * (most + 1), 1)
        rig.run()
        rig.check_empty()
        assert rig.answers[fits].reason == "length"
        assert rig.answers[not_].status == 400
        assert f"{most + 1} tokens" in rig.answers[not_].finish.message
        assert str(most) in rig.answers[not_].finish.message

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    @pytest.mark.parametrize("tree", [False, True])
    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_whatever_is_taken_fits_when_it_is_alone(
        self, page_size: int, tree: bool, ignore_eos: bool
    ) -> None:
        """A pool smaller than the context: each prompt is refused with 400 or runs to its end."""
        rig = make(tokens=256, context_len=4096, page_size=page_size, disable_radix_cache=not tree)
        edges = [edge + i for edge in (16, 64, 128, 192, 240, 250, 256) for i in (-1, 0, 1)]
        for length in (1, *edges, 300):
            rid = rig.submit([i % 90 for i in range(length)], None, ignore_eos=ignore_eos)
            rig.run(most=3000)
            rig.check_empty()
            answer = rig.answers[rid]
            assert answer.reason == "length" or answer.status == 400, length
            assert (answer.status == 400) == (length > rig.state.limits.max_req_input_len), length

    def test_a_pool_in_which_nothing_can_run_is_refused_at_the_start(self) -> None:
        with pytest.raises(ConfigError, match="KV pool of 64 tokens cannot run a request with page_size 64"):
            make(tokens=64, page_size=64)

    def test_a_rid_that_is_alive(self) -> None:
        rig = make()
        rig.submit([1], 9, rid="same")
        rig.until(Stop.PROCESSED)
        alive, rig.answers["same"] = rig.answers["same"], Answer()
        rig.submit([2], 9, rid="same")
        rig.until(Stop.RECEIVED)
        refused, rig.answers["same"] = rig.answers["same"], alive
        assert refused.status == 400 and "'same' is already running" in refused.finish.message
        rig.run()
        rig.check_empty()
        assert len(alive.output_ids) == 9

    def test_a_rid_may_be_used_again_when_it_has_ended(self) -> None:
        rig = make(overlap=True)
        for _ in range(2):
            rig.answers.pop("same", None)
            rig.submit([1], 3, rid="same")
            rig.run()
            rig.check_empty()


class TestMaxNewTokens:
    @pytest.mark.parametrize(
        ("wanted", "tokens", "context", "page"),
        [(None, 512, 64, 1), (1000, 512, 64, 1), (1000, 96, 4096, 1), (None, 96, 4096, 16), (5, 512, 64, 1)],
    )
    def test_it_is_clamped(self, wanted: int | None, tokens: int, context: int, page: int) -> None:
        rig = make(tokens=tokens, context_len=context, page_size=page)
        rid = rig.submit(range(20), wanted)
        rig.until(Stop.RECEIVED)
        most = rig.state.live[rid].max_new_tokens
        pages = -(-20 // page) * page
        assert most <= tokens - pages - page - 1 and 20 + most < min(context, tokens)
        if wanted is not None:
            assert most <= wanted
        assert rig.bodies(QueueEntered)[0].max_new_tokens == most
        rig.run()
        assert len(rig.answers[rid].output_ids) == most
        # the limit that binds is used up but for the margins
        assert wanted == most or most >= min(context - 20 - 2, tokens - pages - page - 1)

    def test_zero_is_honoured(self) -> None:
        rig = make()
        rid = rig.submit([1, 2, 3], 0)
        rig.run()
        rig.check_empty()
        answer = rig.answers[rid]
        assert (answer.output_ids, answer.reason, answer.finish.length, answer.cut) == (
            [],
            "length",
            0,
            False,
        )
        assert rig.state.cache.evictable_size() == 3  # it warmed the cache


class TestFlush:
    @LOOPS
    def test_refused_while_busy(self, overlap: bool) -> None:
        rig = make(overlap, max_running_requests=1)
        rid, _ = rig.submit([1, 2], 6), rig.submit([3, 4], 6)
        rig.until(Stop.PROCESSED)
        reply = rig.flush()
        assert not reply.success and "1 requests wait and 1 run" in reply.message
        assert rig.bodies(CacheFlushed)[0].ok is False
        rig.run()
        rig.check_empty()
        assert len(rig.answers[rid].output_ids) == 6

    def test_refused_between_chunks(self) -> None:
        rig = make(chunked_prefill_size=16)
        rig.submit(range(60), 1)
        rig.until(Stop.PROCESSED)
        reply = rig.flush()
        assert not reply.success and "0 requests wait and 1 run" in reply.message
        rig.run()
        rig.check_empty()

    @LOOPS
    def test_empties_the_tree_when_idle(self, overlap: bool) -> None:
        rig = make(overlap)
        rig.submit([1, 2, 3], 5)
        rig.run()
        assert rig.state.cache.evictable_size() == 7
        reply = rig.flush()
        assert reply.success and rig.state.cache.available_size() == rig.state.cache.total
        rig.check_empty()
        again = rig.submit([1, 2, 3], 5)
        rig.run()
        assert rig.answers[again].cached_tokens == 0
        assert rig.answers[again].output_ids == rig.answers["r0"].output_ids

    @LOOPS
    def test_right_after_the_last_answer(self, overlap: bool) -> None:
        """With overlap a late forward of the finished request may still be under way."""
        rig = Rig(
            rule=lambda rid, index, _: 2 if index == 3 else 5, disable_overlap_schedule=not overlap, tokens=64
        )
        rid = rig.submit([1, 2, 3], 50)
        rig.until_true(lambda: rig.answers[rid].finals == 1)
        assert rig.state.pending_results == overlap
        assert rig.flush().success
        rig.submit([1, 2, 3, 4, 5, 6, 7, 8], 8)
        rig.run()
        rig.check_empty()


class TestHealth:
    def probe(self, rig: Rig) -> str:
        return rig.submit([0], 1, rid="HEALTH_CHECK_1")

    @LOOPS
    def test_while_busy_the_next_result_answers(self, overlap: bool) -> None:
        rig = make(overlap)
        rig.submit([1, 2], 9)
        rig.until(Stop.PROCESSED)
        del rig.answers[self.probe(rig)]
        rig.until(Stop.RECEIVED)
        assert len(rig.state.live) == 1 and rig.state.waiting_queue == [] and rig.replies == []
        rig.until(Stop.PROCESSED)
        assert [type(reply) for reply in rig.replies] == [HealthCheckOutput]
        rig.run()
        assert len(rig.replies) == 1

    def test_when_idle_it_runs_as_a_request(self) -> None:
        rig = make()
        rid = self.probe(rig)
        rig.run()
        assert len(rig.answers[rid].output_ids) == 1 and rig.replies == []

    @LOOPS
    def test_one_that_finds_no_result_is_answered_when_idle(self, overlap: bool) -> None:
        rig = make(overlap, max_running_requests=1)
        rid = rig.submit([1, 2], 9)
        rig.until(Stop.RECEIVED)
        rig.state.health_probes += 1
        rig.abort(rid)
        rig.run()
        assert [type(reply) for reply in rig.replies] == [HealthCheckOutput]


class TestInternalState:
    def ask(self, rig: Rig) -> dict[str, int | float]:
        rig.inbox.send(GetInternalStateReq(id="q"))
        rig.until(Stop.RECEIVED)
        reply = rig.replies.pop()
        assert isinstance(reply, GetInternalStateReqOutput) and reply.id == "q"
        assert rig.signs.pop() == HealthCheckOutput(rid="", forward=False) and not rig.signs
        return reply.state

    def test_idle(self) -> None:
        state = self.ask(make(tokens=512, max_running_requests=7))
        assert state["num_running_reqs"] == state["num_waiting_reqs"] == state["num_live_reqs"] == 0
        assert state["max_total_num_tokens"] == state["available_tokens"] == 512
        assert state["free_rows"] == state["max_running_requests"] == 7

    def test_busy(self) -> None:
        rig = make(tokens=512, max_running_requests=1)
        rig.submit(range(10), 9)
        rig.submit(range(20), 9)
        for _ in range(3):
            rig.until(Stop.PROCESSED)
        state = self.ask(rig)
        assert (state["num_running_reqs"], state["num_waiting_reqs"], state["num_live_reqs"]) == (1, 1, 2)
        assert state["forward_ct"] == 3 and state["free_rows"] == 0
        # the prompt is in the tree, two more positions have slots
        assert (state["protected_tokens"], state["private_tokens"], state["available_tokens"]) == (10, 2, 500)

    def test_a_cut_prompt(self) -> None:
        rig = make(chunked_prefill_size=16)
        rig.submit(range(60), 1)
        rig.until(Stop.PROCESSED)
        assert self.ask(rig)["num_chunked_reqs"] == 1


def test_events_can_be_switched_off_and_on() -> None:
    rig = make()
    rig.inbox.send(ConfigureTraceReq(on=False))
    rig.submit([1], 2)
    rig.run()
    assert rig.ring.snapshot() == []
    rig.inbox.send(ConfigureTraceReq(on=True))
    rig.submit([1, 2], 2)
    rig.run()
    assert [body.rid for body in rig.bodies(QueueEntered)] == ["r1"]


def test_a_queue_entry_holds_what_a_replay_needs() -> None:
    rig = make()
    rig.submit([5, 6, 7], 4, stop="END", extra_key="me")
    rig.until(Stop.RECEIVED)
    (body,) = rig.bodies(QueueEntered)
    assert np.frombuffer(body.input_ids, dtype="<i4").tolist() == [5, 6, 7]
    sampling = msgspec.msgpack.decode(body.sampling, type=SamplingParams)
    assert sampling.stop == ("END",) and sampling.is_greedy
    assert (body.extra_key, body.prompt_tokens, body.again) == ("me", 3, False)
    assert body.received_ns > 0
