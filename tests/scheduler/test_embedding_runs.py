"""Requests for vectors through the scheduler: batches of their own kind, whatever is cut, shared, late or aborted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from embedding_rig import EmbeddingRig
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from watch import FoldWatch

from sgviz.events import Reason
from sgviz.events.schema import (
    BatchPlanned,
    ChunkCut,
    EmbeddingsPooled,
    QueueEntered,
    ScanStopped,
    TokensSampled,
)
from sgviz.messages import EmbeddingSpec
from sgviz.messages.embedding import unpack_vector
from sgviz.scheduler.stops import Stop
from sgviz.worker.mock_worker import MockWorker, mock_info
from sgviz.worker.protocol import WorkerInfo

VOCAB, CONTEXT, DIM = 97, 160, 16
LOOPS = pytest.mark.parametrize("disable_overlap_schedule", [True, False], ids=["normal", "overlap"])
HEAD = tuple((5 * i + 1) % VOCAB for i in range(40))


def alone(ids: list[int], dimensions: int | None = None) -> bytes:
    """The vector of a prompt that shares nothing."""
    rig = EmbeddingRig(tokens=1024, context_len=CONTEXT, vocab_size=VOCAB, disable_radix_cache=True)
    rid = rig.embed(ids, dimensions=dimensions)
    rig.run()
    return rig.vectors[rid]


def info_with(spec: EmbeddingSpec, tokens: int = 512) -> WorkerInfo:
    return mock_info(vocab_size=VOCAB, context_len=CONTEXT, max_total_num_tokens=tokens, embedding=spec)


def rig_with(spec: EmbeddingSpec, **settings: object) -> EmbeddingRig:
    worker = MockWorker(info_with(spec), threaded=False, check=True)
    return EmbeddingRig(worker=worker, **settings)


def test_a_vector_ends_the_request_and_leaves_its_prompt_in_the_cache() -> None:
    rig = EmbeddingRig()
    rid = rig.embed(range(10, 30))
    rig.run()
    rig.check_empty()
    assert rig.answers[rid].finish.as_dict() == {"type": "length", "length": 0}
    assert len(unpack_vector(rig.vectors[rid])) == DIM
    assert rig.state.cache.ledger().evictable == 20
    (pooled,) = rig.bodies(EmbeddingsPooled)
    assert (pooled.rids, pooled.dims) == ((rid,), (DIM,)) and not rig.bodies(TokensSampled)
    assert rig.bodies(QueueEntered)[0].embedding


def test_a_vector_of_the_last_token_takes_the_cached_prefix_and_is_the_same() -> None:
    rig = EmbeddingRig()
    first = rig.embed(range(20))
    rig.run()
    second = rig.embed(range(20))
    rig.run()
    assert (rig.answers[first].cached_tokens, rig.answers[second].cached_tokens) == (0, 19)
    assert rig.vectors[first] == rig.vectors[second] == alone(list(range(20)))


def test_a_vector_that_needs_every_token_takes_no_cached_prefix_but_leaves_one() -> None:
    rig = rig_with(EmbeddingSpec(dim=DIM, pooling="mean"))
    rig.submit(range(20), 1)
    rig.run()
    vector, token = rig.embed(range(20)), None
    rig.run()
    token = rig.submit(range(20), 1)
    rig.run()
    assert (rig.answers[vector].cached_tokens, rig.answers[token].cached_tokens) == (0, 19)
    rig.check_empty()


@LOOPS
def test_tokens_and_vectors_have_batches_of_their_own_and_the_other_kind_is_passed_over(
    disable_overlap_schedule: bool,
) -> None:
    rig = EmbeddingRig(disable_overlap_schedule=disable_overlap_schedule, enable_mixed_chunk=True)
    kinds = [rig.submit, rig.embed, rig.embed, rig.submit, rig.submit, rig.embed]
    rids = [kind([*HEAD[: 8 + i], i]) for i, kind in enumerate(kinds)]
    rig.run()
    rig.check_empty()
    prefills = [body.rids for body in rig.bodies(BatchPlanned) if body.mode != "decode"]
    new = [
        tuple(rid for rid in batch if rid not in sum(prefills[:i], ())) for i, batch in enumerate(prefills)
    ]
    assert [batch for batch in new if batch] == [(rids[0], rids[3], rids[4]), (rids[1], rids[2], rids[5])]
    assert all(len({rid.startswith("v") for rid in batch}) == 1 for batch in prefills)
    told = [(body.rid, body.behind) for body in rig.bodies(ScanStopped) if body.reason is Reason.OTHER_KIND]
    assert told == [(rids[1], 2)]


def prefills_of(rig: EmbeddingRig) -> list[tuple[str, ...]]:
    return [body.rids for body in rig.bodies(BatchPlanned) if body.mode != "decode"]


@LOOPS
def test_kinds_in_turn_share_two_batches(disable_overlap_schedule: bool) -> None:
    rig = EmbeddingRig(tokens=4096, disable_overlap_schedule=disable_overlap_schedule)
    for number in range(20):
        rig.submit([*HEAD[:8], number], 3)
        rig.embed([*HEAD[:8], number])
    rig.run()
    rig.check_empty()
    assert [len(rids) for rids in prefills_of(rig)] == [20, 20]


@LOOPS
def test_who_was_passed_over_comes_first_whoever_came_meanwhile(disable_overlap_schedule: bool) -> None:
    """Also where the one behind it did not fit, and planning would wait for memory."""
    rig = EmbeddingRig(tokens=128, disable_overlap_schedule=disable_overlap_schedule)
    rig.submit(range(20), 20)
    vector = rig.embed(range(30, 40))
    big = rig.submit(range(40, 90), 60)
    for _ in range(6):
        rig.stop()
        rig.submit(range(5), 2)
    rig.run()
    rig.check_empty()
    assert prefills_of(rig)[1] == (vector,)
    stops = [(body.rid, body.reason, body.passed) for body in rig.bodies(ScanStopped)]
    assert stops[0] == (big, Reason.KV, vector)


@LOOPS
def test_a_prompt_in_chunks_passes_over_nobody_for_ever(disable_overlap_schedule: bool) -> None:
    """Long prompts behind a vector fill the room that each chunk leaves: the vector comes before them."""
    rig = EmbeddingRig(
        tokens=1024, chunked_prefill_size=16, disable_overlap_schedule=disable_overlap_schedule
    )
    first = rig.submit(range(24), 2)
    vector = rig.embed(range(30, 40))
    later = [rig.submit(range(40 + i, 64 + i), 2) for i in range(8)]
    rig.run()
    rig.check_empty()
    assert next(rids for rids in prefills_of(rig) if rids[0] != first) == (vector,)
    assert {rig.answers[rid].reason for rid in later} == {"length"}


def test_a_vector_is_cut_to_the_dimensions_asked_for() -> None:
    rig = EmbeddingRig()
    short, whole = rig.embed(range(9), dimensions=4), rig.embed(range(9))
    rig.run()
    cut, all_of_it = unpack_vector(rig.vectors[short]), unpack_vector(rig.vectors[whole])
    scale = sum(each * each for each in all_of_it[:4]) ** 0.5
    assert cut == pytest.approx([each / scale for each in all_of_it[:4]], abs=1e-6)


@LOOPS
def test_a_prompt_in_chunks_has_the_vector_of_a_whole_one(disable_overlap_schedule: bool) -> None:
    rig = EmbeddingRig(chunked_prefill_size=16, disable_overlap_schedule=disable_overlap_schedule)
    ids = [(7 * i + 2) % VOCAB for i in range(70)]
    rid = rig.embed(ids)
    rig.run()
    rig.check_empty()
    assert len(rig.bodies(ChunkCut)) == 5 and rig.vectors[rid] == alone(ids)
    assert [body.rids for body in rig.bodies(EmbeddingsPooled)] == [(), (), (), (), (rid,)]


@LOOPS
@pytest.mark.parametrize("stops", range(1, 14))
def test_an_abort_at_any_stop_ends_it_once_and_returns_its_memory(
    disable_overlap_schedule: bool, stops: int
) -> None:
    rig = EmbeddingRig(chunked_prefill_size=16, disable_overlap_schedule=disable_overlap_schedule)
    ids = [(3 * i + 1) % VOCAB for i in range(60)]
    rid, other = rig.embed(ids), rig.embed(HEAD)
    for _ in range(stops):
        rig.stop()
    rig.abort(rid)
    rig.run()
    rig.check_empty()
    assert rig.answers[rid].reason in ("abort", "length")
    assert (rig.answers[rid].reason == "length") == (rid in rig.vectors)
    assert rig.vectors[other] == alone(list(HEAD))
    again = rig.embed(ids)
    rig.run()
    assert rig.vectors[again] == alone(ids)


def test_an_encoder_gets_whole_prompts_and_nothing_is_cached() -> None:
    spec = EmbeddingSpec(dim=DIM, pooling="mean", is_encoder=True)
    rig = rig_with(spec, chunked_prefill_size=16)
    rids = [rig.embed(HEAD), rig.embed(HEAD), rig.embed(range(90))]
    rig.run()
    rig.check_empty()
    assert rig.state.limits.chunked_prefill_size is None and rig.state.cache.ledger().evictable == 0
    assert not rig.bodies(ChunkCut) and all(rig.answers[rid].cached_tokens == 0 for rid in rids)
    assert rig.vectors[rids[0]] == rig.vectors[rids[1]]


@dataclass(frozen=True)
class Wish:
    """One request: a vector or tokens, of a shared head and a tail of its own; perhaps aborted after so many stops."""

    vector: bool
    shared: int
    tail: int
    seed: int
    after: int
    aborted: int | None

    @property
    def ids(self) -> list[int]:
        return [*HEAD[: self.shared], *((self.seed * 31 + i * (i + 13)) % VOCAB for i in range(self.tail))]


wishes = st.builds(
    Wish,
    vector=st.booleans(),
    shared=st.integers(0, 40),
    tail=st.integers(1, 40),
    seed=st.integers(0, 20),
    after=st.integers(0, 6),
    aborted=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, object]:
    return {
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "tokens": draw(st.sampled_from([192, 256])),
        "chunked_prefill_size": draw(st.sampled_from([-1, 16, 33, 2048])),
        "enable_mixed_chunk": draw(st.booleans()),
        "disable_overlap_schedule": draw(st.booleans()),
        "disable_radix_cache": draw(st.sampled_from([False, False, True])),
        "max_running_requests": draw(st.sampled_from([None, 1, 3])),
        "schedule_policy": draw(st.sampled_from(["fcfs", "lpm"])),
    }


@profile(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(wishes, min_size=1, max_size=10), settings())
def test_any_mixture_gives_every_vector_and_leaves_nothing(
    requests: list[Wish], given_settings: dict[str, object]
) -> None:
    rig = EmbeddingRig(context_len=CONTEXT, vocab_size=VOCAB, **given_settings)
    watch = FoldWatch(rig)
    aborts: dict[int, list[str]] = {}
    rids: list[str] = []
    stops = 0

    def stop() -> Stop:
        nonlocal stops
        for rid in aborts.pop(stops, []):
            rig.abort(rid)
        stops += 1
        reached = rig.stop()
        rig.check()
        watch.compare()
        return reached

    for number, wish in enumerate(requests):
        rid = f"{'v' if wish.vector else 'r'}{number}"
        rids.append(rig.embed(wish.ids, rid=rid) if wish.vector else rig.submit(wish.ids, 6, rid=rid))
        if wish.aborted is not None:
            aborts.setdefault(stops + wish.aborted, []).append(rid)
        for _ in range(wish.after):
            stop()
    for _ in range(5000):
        if stop() is Stop.IDLE and rig.state.is_fully_idle and not rig.inbox.messages:
            break
    rig.check_empty()
    for rid, wish in zip(rids, requests):
        if rid in rig.vectors:
            assert rig.vectors[rid] == alone(wish.ids)
        elif wish.vector:
            assert wish.aborted is not None and rig.answers[rid].reason == "abort"
    for body in rig.bodies(BatchPlanned):
        assert len({rid[0] for rid in body.rids}) == 1
