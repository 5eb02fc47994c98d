"""The decode side short of memory, pauses, and many requests with random aborts: right answers, nothing left."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import Pair, single

from sgviz.events import schema
from sgviz.messages.flow import ContinueGenerationReqInput, PauseGenerationReqInput

PROMPTS = [[(11 * i + k * k + i * i) % 97 for i in range(6 + 5 * k)] for k in range(5)]


def pressed(way: str, overlap: bool, page: int = 1, **settings: object) -> Pair:
    return Pair(
        decode_tokens=128, decode_page=page, overlap=overlap, delay=1,
        decode_settings={
            "disaggregation_decode_retraction": way, "num_reserved_decode_tokens": 1, **settings,
        },
    )  # fmt: skip


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_a_retracted_request_comes_back_with_the_same_answer(
    way: str, page: int, overlap: bool, cache: bool
) -> None:
    pair = pressed(way, overlap, page, disaggregation_decode_enable_radix_cache=cache)
    rids = [pair.submit(ids, 40) for ids in PROMPTS]
    pair.run()
    assert [pair.answers[rid].output_ids for rid in rids] == single(PROMPTS, 40)
    retracted = pair.decode.bodies(schema.RequestRetracted)
    assert retracted
    modes = [body.mode for body in pair.decode.bodies(schema.BatchPlanned)]
    assert ("extend" in modes) is (way == "recompute")
    pair.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", [0, 40, None])
def test_host_memory_takes_so_much_and_the_rest_is_computed_again(most: int | None, overlap: bool) -> None:
    pair = pressed("keep", overlap, disaggregation_decode_kept_tokens=most)
    rids = [pair.submit(ids, 40) for ids in PROMPTS]
    kept = 0
    for _ in range(2000):
        pair.turn()
        live = pair.decode.state.live.values()
        kept = max(kept, sum(req.kept_kv.tokens for req in live if req.kept_kv is not None))
        if pair.decode.state.is_fully_idle:
            break
    pair.run()
    assert kept <= (128 if most is None else most) and bool(kept) is (most != 0)
    modes = [body.mode for body in pair.decode.bodies(schema.BatchPlanned)]
    assert ("extend" in modes) is (most is not None)
    assert [pair.answers[rid].output_ids for rid in rids] == single(PROMPTS, 40)
    pair.check_empty()


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_an_abort_of_a_retracted_request_leaves_nothing(way: str) -> None:
    pair = pressed(way, True)
    rids = [pair.submit(ids, 40) for ids in PROMPTS]
    state = pair.decode.state
    for _ in range(400):
        pair.turn()
        gone = [req for req in state.live.values() if req.retraction_count and not req.kv.req_pool_idx]
        if gone:
            break
    assert gone
    for req in gone:
        pair.decode.abort(req.rid)
    pair.run()
    pair.check_empty()
    for rid, wanted in zip(rids, single(PROMPTS, 40)):
        answer = pair.answers[rid]
        assert answer.output_ids == wanted[: len(answer.output_ids)]
        assert answer.reason == ("abort" if rid in [req.rid for req in gone] else "length")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("after", range(4, 12, 2))
def test_a_pause_of_the_decode_side_changes_no_answer(after: int, mode: str) -> None:
    pair = Pair(delay=2)
    rids = [pair.submit(ids, 12) for ids in PROMPTS]
    pair.turns(after)
    pair.decode.inbox.send(PauseGenerationReqInput(id="p", mode=mode))
    pair.turns(12)
    ledger = pair.decode.state.cache.ledger()
    assert mode == "in_place" or ledger.private == ledger.protected == 0
    assert pair.decode.state.at_rest and len(pair.decode.state.live) == len(PROMPTS)
    assert pair.decode.state.may_flush is (mode == "retract")
    pair.decode.inbox.send(ContinueGenerationReqInput(id="c"))
    pair.run()
    assert [pair.answers[rid].output_ids for rid in rids] == single(PROMPTS, 12)
    pair.check_empty()


arrivals = st.tuples(st.integers(1, 90), st.integers(0, 50), st.integers(0, 30), st.booleans())
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), arrivals),
        st.tuples(st.just("turns"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["prefill", "decode", "break"]), st.integers(0, 6)),
    ),
    max_size=40,
)


@profile(max_examples=40, deadline=None)
@given(
    steps,
    st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([1, 4, 16])),
    st.sampled_from([-1, 16, 40]),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["keep", "recompute"]),
)
def test_whatever_happens_answers_are_right_and_nothing_is_left(
    todo: list[tuple[str, object]], pages: tuple[int, int], chunk: int, delay: int, overlap: bool, cache: bool,
    way: str,
) -> None:  # fmt: skip
    pair = Pair(
        tokens=192, decode_tokens=192, prefill_page=pages[0], decode_page=pages[1], overlap=overlap, delay=delay,
        eos_every=37, prefill_settings={"chunked_prefill_size": chunk},
        decode_settings={
            "num_reserved_decode_tokens": 1, "disaggregation_decode_enable_radix_cache": cache,
            "disaggregation_decode_retraction": way,
        },
    )  # fmt: skip
    prompts: dict[str, tuple[list[int], int]] = {}
    for what, value in todo:
        if what == "submit":
            length, seed, most, alike = value
            ids = [((0 if alike else seed) * 31 + i * (i * 7 + 13)) % 97 for i in range(length)]
            prompts[pair.submit(ids, most)] = ids, most
        elif what == "turns":
            pair.turns(value)
        elif value < len(prompts):
            rid = list(prompts)[-1 - value]
            if what != "break":
                getattr(pair, what).abort(rid)
            elif pair.room(rid) in pair.wire.rooms and pair.wire.rooms[pair.room(rid)].aux is None:
                pair.wire.fail(pair.room(rid), "broken")
    pair.run(most=8000)
    pair.check_empty()
    for rid, (ids, most) in prompts.items():
        answer = pair.answers[rid]
        wanted = single([ids], most, eos_every=37)[0] if most else []
        assert answer.output_ids == wanted[: len(answer.output_ids)]
        assert answer.reason == "abort" or answer.output_ids == wanted


def test_a_thousand_requests_with_aborts_on_either_side_leave_nothing() -> None:
    rng = random.Random(8)
    pair = Pair(
        tokens=1024, decode_tokens=1024, prefill_page=16, decode_page=4, delay=1, eos_every=40,
        prefill_settings={"chunked_prefill_size": 64},
    )  # fmt: skip
    live: list[str] = []
    for _ in range(1000):
        head = rng.choice([0, 16, 48])
        ids = [*range(head), *(rng.randrange(97) for _ in range(rng.randrange(1, 40)))]
        live.append(pair.submit(ids, rng.randrange(0, 16)))
        if rng.random() < 0.1:
            rng.choice(pair.sides).abort(rng.choice(live[-12:]))
        if rng.random() < 0.6:
            for side in pair.sides:
                side.stop()
    pair.run(most=8000)
    pair.check_empty()
    assert len(pair.answers) == 1000
    assert sum(answer.reason == "abort" for answer in pair.answers.values()) >= 40
