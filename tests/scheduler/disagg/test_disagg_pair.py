"""A prefill and a decode scheduler together answer what one scheduler answers, and neither keeps anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from pair_rig import Pair, single
from rig import Rig

from sgviz.events import schema

HEAD = [(7 * i + i * i) % 97 for i in range(40)]
PROMPTS = [HEAD[:n] + [(13 * i + k) % 97 for i in range(m)] for k, (n, m) in enumerate(
    [(0, 5), (20, 30), (40, 1), (40, 23), (16, 16), (0, 1), (33, 60), (40, 24)]
)]  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [-1, 16, 33])
@pytest.mark.parametrize(("prefill_page", "decode_page"), [(1, 1), (16, 16), (1, 16), (16, 1)])
def test_the_ids_are_those_of_one_scheduler(
    prefill_page: int, decode_page: int, chunk: int, overlap: bool
) -> None:
    wanted = single(PROMPTS, 12, eos_every=31)
    pair = Pair(
        prefill_page=prefill_page, decode_page=decode_page, overlap=overlap, eos_every=31,
        prefill_settings={"chunked_prefill_size": chunk}, delay=2,
    )  # fmt: skip
    rids = [pair.submit(ids, 12) for ids in PROMPTS[:5]]
    pair.turns(6)
    rids += [pair.submit(ids, 12) for ids in PROMPTS[5:]]
    pair.run()
    assert [pair.answers[rid].output_ids for rid in rids] == wanted
    pair.check_empty()
    for rid in rids:  # the prefill side answers with the first token alone
        answer = pair.prefill.answers[rid]
        assert answer.reason == "length" and answer.output_ids == pair.answers[rid].output_ids[:1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_chunks_leave_in_whole_pages_as_they_are_computed(page: int, overlap: bool) -> None:
    pair = Pair(prefill_page=page, overlap=overlap, prefill_settings={"chunked_prefill_size": 32})
    pair.submit([*range(90), 5, 6, 7])
    pair.run()
    pieces = [(piece.start, len(piece.slots), piece.aux is not None) for _, piece in pair.wire.sent]
    assert pieces == [(0, 32, False), (32, 32, False), (64, 29, True)]


def test_a_cached_prefix_leaves_before_the_forward() -> None:
    pair = Pair(prefill_page=16)
    pair.submit(range(70))
    pair.run()
    pair.wire.sent.clear()
    rid = pair.submit(range(80))
    pair.run()
    assert [(piece.start, len(piece.slots), piece.cached) for _, piece in pair.wire.sent] == [
        (0, 64, True),
        (64, 16, False),
    ]
    assert pair.answers[rid].cached_tokens == 64


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_a_decode_side_with_a_cache_has_only_the_rest_sent(page: int, overlap: bool) -> None:
    pair = Pair(
        decode_page=page, overlap=overlap, decode_settings={"disaggregation_decode_enable_radix_cache": True}
    )
    first = pair.submit(PROMPTS[6], 10)
    pair.run()
    pair.wire.sent.clear()
    second = pair.submit([*PROMPTS[6], 4, 5, 6], 10)
    pair.run()
    start = pair.wire.sent[0][1].start
    assert start >= len(PROMPTS[6]) // page * page
    assert sum(len(piece.slots) for _, piece in pair.wire.sent) == len(PROMPTS[6]) + 3 - start
    wanted = single([PROMPTS[6], [*PROMPTS[6], 4, 5, 6]], 10)
    assert [pair.answers[rid].output_ids for rid in (first, second)] == wanted
    pair.check_empty()


def test_without_one_nothing_stays_on_the_decode_side() -> None:
    pair = Pair()
    pair.submit(range(30))
    pair.run()
    assert pair.decode.state.cache.evictable_size() == 0
    assert pair.prefill.state.cache.evictable_size() == 30


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_an_answer_of_one_token_or_none_needs_no_forward(most: int, overlap: bool) -> None:
    pair = Pair(overlap=overlap)
    rid = pair.submit(range(10, 30), most)
    pair.run()
    assert len(pair.answers[rid].output_ids) == most and pair.answers[rid].reason == "length"
    assert pair.decode.state.forward_ct == 0
    pair.check_empty()


def test_a_stop_at_the_first_token_ends_it() -> None:
    first = single([list(range(10, 30))], 1)[0][0]
    pair = Pair()
    rid = pair.submit(range(10, 30), 8, stop_token_ids=[first])
    pair.run()
    answer = pair.answers[rid]
    assert answer.output_ids == [first] and answer.reason == "stop" and answer.finish.matched == first
    assert pair.decode.state.forward_ct == 0
    pair.check_empty()


@pytest.mark.parametrize("chunk", [-1, 16])
def test_log_probabilities_are_those_of_one_scheduler(chunk: int) -> None:
    def columns(rig: Rig) -> list[object]:
        found: list[object] = []
        original = rig._take

        def take(out: object) -> None:
            found.append(
                (out.output_token_logprobs, out.output_top_logprobs, out.output_token_ids_logprobs,
                 out.input_token_logprobs, out.input_top_logprobs, out.input_token_ids_logprobs)
            )  # fmt: skip
            original(out)

        rig._take = take
        return found

    pair = Pair(prefill_settings={"chunked_prefill_size": chunk})
    seen = columns(pair.decode)
    rid = pair.submit(PROMPTS[1], 4, logprobs=(3, 2))
    pair.run()
    one = Rig()
    wanted = columns(one)
    one.answers[rid] = type(pair.answers[rid])()
    one.inbox.send(pair.messages[rid])
    one.run()
    assert seen == wanted and seen[0][3]


def test_the_events_tell_the_way_of_a_request() -> None:
    pair = Pair(delay=1)
    rid = pair.submit(range(20), 4)
    pair.run()

    def way(side: Rig) -> list[str]:
        kinds = [event.body for event in side.ring.snapshot() if getattr(event.body, "rid", "") == rid]
        names = [body.__struct_config__.tag for body in kinds]
        return [str(name) for name in names if str(name).startswith(("disagg.", "queue."))]

    assert way(pair.prefill) == [
        "disagg.queued",
        "disagg.bootstrapped",
        "queue.entered",
        "disagg.transferred",
    ]
    assert way(pair.decode) == [
        "disagg.queued", "disagg.bootstrapped", "disagg.preallocated", "disagg.transferred", "queue.entered",
    ]  # fmt: skip
    planned = pair.decode.bodies(schema.BatchPlanned)[0]
    assert planned.mode == "prebuilt" and planned.extend_lens == (0,) and planned.prefix_lens == (20,)
    assert planned.bid not in [body.bid for body in pair.decode.bodies(schema.BatchLaunched)]
    assert pair.decode.bodies(schema.TokensSampled)[0].bid == planned.bid


def test_a_probe_needs_no_other_side() -> None:
    pair = Pair()
    for side, name in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        rid = pair.submit([1, 2], 1, rid=f"HEALTH_CHECK_{name}", to=name, room=None, host=None)
        side.run()
        assert side.answers[rid].reason == "length"
    pair.check_empty()


def test_the_decode_side_looks_as_often_as_it_is_told_while_it_decodes() -> None:
    pair = Pair(decode_settings={"disaggregation_decode_polling_interval": 4})
    rids = [pair.submit(ids, 20) for ids in PROMPTS]
    pair.run()
    assert [pair.answers[rid].output_ids for rid in rids] == single(PROMPTS, 20)
