"""Memory runs out while decoding: who goes, in which order, and that the client never notices."""

from __future__ import annotations

import pytest
from rig import Answer, Rig

from sgviz.batch.req import Req
from sgviz.events.schema import QueueEntered, RequestAborted, RequestRetracted
from sgviz.messages import SamplingParams
from sgviz.scheduler.decode import DecodePlanner
from sgviz.scheduler.requests import aborted
from sgviz.scheduler.stops import Stop

LOOSE = {"schedule_conservativeness": 0.001}  # reserves next to nothing for those that run


def running(rig: Rig, rid: str, outputs: int, prompt: int, max_new: int = 100) -> Req:
    """A request in the middle of decoding that holds `prompt + outputs - 1` private tokens."""
    req = Req(
        rid=rid,
        origin_input_ids=list(range(prompt)),
        sampling_params=SamplingParams(max_new_tokens=max_new),
        max_new_tokens=max_new,
        output_ids=[5] * outputs,
    )
    req.prefix_len, req.extend_end = 0, prompt + outputs - 1
    rig.state.cache.alloc_extend([req], [req.extend_end])
    rig.state.live[rid] = req
    rig.state.running_batch.reqs.append(req)
    return req


def fill(rig: Rig, tokens: int) -> Req:
    """Somebody who is not decoding holds `tokens`."""
    holder = Req(rid="holder", origin_input_ids=[], sampling_params=SamplingParams(), max_new_tokens=0)
    rig.state.cache.alloc_extend([holder], [tokens])
    return holder


def decoder(rig: Rig) -> DecodePlanner:
    return rig.scheduler.planner._decode


def test_the_order_of_victims() -> None:
    """(outputs, prompt): R1 (5, 100), R2 (5, 300), R3 (40, 50): R2 goes first, then R1; R3 stays."""
    rig = Rig(tokens=512, context_len=512)
    r1, r2, r3 = running(rig, "R1", 5, 100), running(rig, "R2", 5, 300), running(rig, "R3", 40, 50)
    order = [r3, r1, r2]
    assert [decoder(rig)._next_victim(order) for _ in range(3)] == [r2, r1, None]
    assert order == [r3]


def test_only_as_many_as_it_takes() -> None:
    rig = Rig(tokens=512, context_len=512)
    for rid, outputs, prompt in (("R1", 5, 100), ("R2", 5, 300), ("R3", 40, 50)):
        running(rig, rid, outputs, prompt)
    fill(rig, rig.state.cache.room() - 2)  # three need three
    rig.state.running_batch.batch_is_full = True
    batch = decoder(rig).next_batch()
    assert batch is not None and [req.rid for req in batch.reqs] == ["R1", "R3"]
    assert [req.rid for req in rig.state.waiting_queue] == ["R2"]
    assert not rig.state.running_batch.batch_is_full
    (event,) = rig.bodies(RequestRetracted)
    assert (event.rid, event.output_tokens, event.need, event.have) == ("R2", 5, 3, 2)
    assert event.ratio_before == pytest.approx(0.7)
    assert event.ratio_after == pytest.approx((45 + 40) / 201) == rig.state.ratio.current
    assert [body.rid for body in rig.bodies(QueueEntered) if body.again] == ["R2"]


def test_nothing_is_retracted_while_it_fits() -> None:
    rig = Rig(tokens=512, context_len=512)
    running(rig, "a", 5, 100)
    running(rig, "b", 5, 100)
    fill(rig, rig.state.cache.room() - 2)
    batch = decoder(rig).next_batch()
    assert batch is not None and len(batch) == 2
    assert rig.state.ratio.current == pytest.approx(0.7 - rig.state.ratio.step)
    assert rig.bodies(RequestRetracted) == []


def test_the_last_one_is_aborted_if_it_does_not_fit_alone() -> None:
    rig = Rig(tokens=512, context_len=512)
    running(rig, "only", 5, 100)
    fill(rig, rig.state.cache.room())
    rig.answers["only"] = answer = Answer()
    assert decoder(rig).next_batch() is None
    rig._collect()
    assert (answer.finals, answer.reason, answer.status) == (1, "abort", 500)
    assert "only" in answer.finish.message and "512" in answer.finish.message
    assert answer.output_ids == [5] * 5
    assert rig.state.live == {} and rig.state.running_batch.is_empty
    assert [body.where for body in rig.bodies(RequestAborted)] == ["retract"]


def test_an_aborted_victim_ends_instead_of_waiting_again() -> None:
    rig = Rig(tokens=512, context_len=512)
    running(rig, "stays", 9, 100)
    victim = running(rig, "aborted", 5, 100)
    victim.to_finish = aborted("client gone")
    rig.answers["aborted"] = Answer()
    fill(rig, rig.state.cache.room() - 1)
    batch = decoder(rig).next_batch()
    rig._collect()
    assert batch is not None and [req.rid for req in batch.reqs] == ["stays"]
    assert rig.state.waiting_queue == [] and rig.bodies(RequestRetracted) == []
    assert (rig.answers["aborted"].finals, rig.answers["aborted"].reason) == (1, "abort")


def crowded(rig: Rig, count: int = 6, max_new: int = 30) -> None:
    """Requests that come one by one and all want more than there is."""
    for i in range(count):
        rig.submit([40 + i, 3, 5, 7, 9], max_new, stream=i % 2 == 0, logprob=True)
        for _ in range(6):
            rig.stop()
            rig.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_client_never_notices(overlap: bool, page_size: int) -> None:
    rig = Rig(tokens=104, page_size=page_size, disable_overlap_schedule=not overlap, **LOOSE)
    calm = Rig(tokens=4000, disable_radix_cache=True)
    for each in (rig, calm):
        crowded(each)
        each.run()
        each.check_empty()
    retracted = {body.rid for body in rig.bodies(RequestRetracted)}
    assert retracted and calm.bodies(RequestRetracted) == []
    for rid, answer in rig.answers.items():
        right = calm.answers[rid]
        assert answer.output_ids == right.output_ids, rid
        assert answer.decode_ids == right.decode_ids, rid
        assert answer.logprobs == right.logprobs, rid
        assert answer.finish == right.finish, rid
        assert (answer.retractions > 0) == (rid in retracted), rid


def test_streamed_tokens_come_one_by_one_also_after_a_retraction() -> None:
    rig = Rig(tokens=104, **LOOSE)
    crowded(rig)
    rig.run()
    streamed = [answer for answer in rig.answers.values() if answer.retractions and len(answer.deltas) > 1]
    assert streamed
    for answer in streamed:
        assert answer.deltas == [1] * 30


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    rig = Rig(tokens=104, **LOOSE)
    crowded(rig)
    rig.run()
    assert all(answer.cached_tokens == 0 for answer in rig.answers.values() if answer.retractions)


def test_the_queue_is_tried_again_after_a_retraction_and_the_ratio_decays_back() -> None:
    rig = Rig(tokens=104, **LOOSE)
    crowded(rig)
    rig.until_true(lambda: bool(rig.bodies(RequestRetracted)))
    assert rig.state.ratio.current > 0.1
    rig.run()
    assert rig.state.ratio.current == rig.state.ratio.initial


def test_a_cut_prompt_gives_way_before_the_last_request_is_aborted() -> None:
    """Both fit alone, not together: the one that decodes must not pay for the prompt that has just begun."""
    rig = Rig(tokens=192, context_len=256, enable_mixed_chunk=True, chunked_prefill_size=8, **LOOSE)
    first = rig.submit(range(10), 100)
    rig.until_true(lambda: len(rig.answers[first].output_ids) >= 35)
    second = rig.submit([i % 90 for i in range(140)], 1)
    while rig.stop() is not Stop.IDLE:
        rig.check()
    rig.check_empty()
    assert [body.rid for body in rig.bodies(RequestRetracted)] == [second]
    assert rig.answers[first].reason == rig.answers[second].reason == "length"
    assert len(rig.answers[first].output_ids) == 100


class TestResultUnderWay:
    """Overlap: a request can be retracted while a forward that it is a member of has not been processed."""

    def caught(self) -> tuple[Rig, Req, Req]:
        """`new` has its prefill under way; for the next position of `old` and `new` there is no room."""
        rig = Rig(tokens=128, disable_overlap_schedule=False)
        old = rig.submit(range(10), 20, rid="old")
        rig.until_true(lambda: len(rig.answers[old].output_ids) == 4)
        new = rig.submit(range(50, 60), 20, rid="new")
        rig.until_true(lambda: new in rig.state.live and rig.state.live[new].inflight == 1)
        holder = fill(rig, rig.state.cache.room())
        assert rig.stop() is Stop.PROCESSED
        self.holder = holder
        return rig, rig.state.live[old], rig.state.live[new]

    def test_the_late_token_is_not_taken(self) -> None:
        rig, old, new = self.caught()
        rig.until(Stop.LAUNCHED)
        assert [body.rid for body in rig.bodies(RequestRetracted)] == ["new"]
        assert rig.stop() is Stop.PROCESSED  # of the forward in which `new` still was
        assert new.output_ids == [] and new.inflight == 0 and old.inflight == 1
        rig.state.cache.release(self.holder, [], insert=False, why="finish")
        rig.run()
        rig.check_empty()
        calm = Rig()
        calm.submit(range(50, 60), 20, rid="new")
        calm.run()
        assert rig.answers["new"].output_ids == calm.answers["new"].output_ids
        assert rig.answers["new"].deltas == [1] * 20

    def test_an_aborted_one_ends_with_its_result_and_nobody_is_retracted(self) -> None:
        rig, _, new = self.caught()
        rig.abort("new")
        assert rig.plan() is None
        assert rig.stop() is Stop.PROCESSED
        assert rig.answers["new"].finals == 1 and new.kv.req_pool_idx == 0
        rig.state.cache.release(self.holder, [], insert=False, why="finish")
        rig.run()
        rig.check_empty()
        assert rig.bodies(RequestRetracted) == []

    def test_the_last_one_gets_one_final_message(self) -> None:
        """It is aborted with its first token under way; the result comes after its end and sends nothing."""
        rig = Rig(tokens=128, disable_overlap_schedule=False)
        rid = rig.submit(range(10), 20)
        rig.until(Stop.LAUNCHED)
        holder = fill(rig, rig.state.cache.room())
        assert rig.plan() is None
        rig.until(Stop.PROCESSED)
        assert (rig.answers[rid].finals, rig.answers[rid].status) == (1, 500)
        rig.state.cache.release(holder, [], insert=False, why="finish")
        rig.run()
        rig.check_empty()

    def test_memory_that_comes_with_the_result_is_waited_for(self) -> None:
        """`old` ends with the forward under way: nobody is retracted for the one step."""
        rig = Rig(tokens=128, disable_overlap_schedule=False)
        old = rig.submit(range(10), 6, rid="old")
        rig.submit(range(50, 60), 20, rid="new")
        rig.until_true(lambda: len(rig.answers[old].output_ids) == 5)
        holder = fill(rig, rig.state.cache.room())
        assert rig.plan() is None
        assert rig.stop() is Stop.PROCESSED and rig.answers[old].finals == 1
        rig.state.cache.release(holder, [], insert=False, why="finish")
        rig.run()
        rig.check_empty()
        assert rig.bodies(RequestRetracted) == []
