"""Log-probabilities of prompts through the scheduler: all of them, once, however the prompt was computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from rig import Rig
from session_tools import S, opened, refused, told

from sgviz.events import TimeStats
from sgviz.messages import BatchTokenIDOutput, SamplingParams, TokenizedGenerateReqInput
from sgviz.messages.session import SessionParams
from sgviz.worker.mock_logprobs import MOCK_TOP_LOGPROB_STEP
from sgviz.worker.random_bits import mix64

VOCAB = 97
Pairs = list[tuple[float, int]]


class Told:
    """Every logprob column that left for one request, message after message."""

    def __init__(self) -> None:
        self.inputs: list[
            tuple[int, list[tuple[float | None, int]], list[Pairs | None], list[Pairs | None]]
        ] = []
        self.outputs: list[float] = []
        self.token_ids: list[Pairs] = []
        self.messages = 0


class LogprobRig(Rig):
    """A rig that keeps the logprob columns."""

    def __init__(self, **settings: object) -> None:
        self.told: dict[str, Told] = {}
        self.wire: list[BatchTokenIDOutput] = []
        super().__init__(vocab_size=VOCAB, **settings)

    def ask(
        self,
        ids: Sequence[int],
        start: int,
        *,
        tokens: int = 4,
        tops: int = 0,
        token_ids: Sequence[int] = (),
        rid: str | None = None,
    ) -> str:
        rid = self.submit([], rid=rid)
        self.inbox.messages.pop()
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0).normalize()
        self.inbox.send(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(ids),
                sampling_params=sampling,
                stream=True,
                time_stats=TimeStats(created=1),
                return_logprob=True,
                top_logprobs_num=tops,
                logprob_start_len=start,
                token_ids_logprob=list(token_ids) or None,
            )
        )
        self.told[rid] = Told()
        return rid

    def _take(self, message: BatchTokenIDOutput) -> None:
        super()._take(message)
        self.wire.append(message)
        for i, rid in enumerate(message.rids):
            if rid in self.told:
                self._note(self.told[rid], message, i)

    @staticmethod
    def _note(told: Told, message: BatchTokenIDOutput, i: int) -> None:
        if message.input_token_logprobs and message.input_token_logprobs[i]:
            told.inputs.append(
                (
                    told.messages,
                    message.input_token_logprobs[i],
                    message.input_top_logprobs[i],
                    message.input_token_ids_logprobs[i],
                )
            )
        told.outputs += message.output_token_logprobs[i] if message.output_token_logprobs else []
        told.token_ids += message.output_token_ids_logprobs[i] if message.output_token_ids_logprobs else []
        told.messages += 1


def rule(ids: Sequence[int]) -> list[float]:
    """What the mock device says of ids[1:]: a hash of all ids before each, computed anew from scratch."""
    weights = mix64(np.arange(len(ids), dtype=np.uint64)) | np.uint64(1)
    out = []
    for length in range(1, len(ids)):
        words = (np.array(ids[:length], dtype=np.uint64) + np.uint64(1)) * weights[:length]
        out.append(-float(mix64(words.sum(dtype=np.uint64).reshape(1))[0] % np.uint64(1000)) / 1000)
    return out


def by_rule(best: float, token: int, ids: Sequence[int]) -> Pairs:
    return [(best - (each - token) % VOCAB * MOCK_TOP_LOGPROB_STEP, each) for each in ids]


def check(told: Told, ids: list[int], start: int, *, tops: int = 0, token_ids: Sequence[int] = ()) -> None:
    """Once, with the first message, one entry a token from `start`, the first without a number."""
    assert len(told.inputs) == 1
    at, tokens, likeliest, chosen = told.inputs[0]
    expected = rule(ids)[start:]
    assert at == 0
    assert tokens == [(None, ids[start]), *zip(expected, ids[start + 1 :])]
    rows = list(zip(expected, ids[start + 1 :]))
    if tops:
        behind = [by_rule(best, token, [(token + k) % VOCAB for k in range(tops)]) for best, token in rows]
        assert likeliest == [None, *behind]
    else:
        assert likeliest == []
    assert chosen == ([None, *(by_rule(best, token, token_ids) for best, token in rows)] if token_ids else [])


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [-1, 16, 48])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 40, 98, 99])
def test_every_start_in_every_arrangement(start: int, chunk: int, page_size: int, overlap: bool) -> None:
    rig = LogprobRig(chunked_prefill_size=chunk, page_size=page_size, disable_overlap_schedule=not overlap)
    ids = prompt(100)
    rid = rig.ask(ids, start, tops=2, token_ids=[5, 9, 5])
    rig.run()
    check(rig.told[rid], ids, start, tops=2, token_ids=[5, 9, 5])
    rig.check_empty()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cache_hit_ends_where_the_numbers_begin(page_size: int) -> None:
    rig = LogprobRig(page_size=page_size)
    ids = prompt(64)
    rig.submit(ids)
    rig.run()
    for start in (0, 20, 63):
        rid = rig.ask(ids, start)
        rig.run()
        check(rig.told[rid], ids, start)
        assert rig.answers[rid].cached_tokens == start // page_size * page_size
    plain = rig.submit(ids)
    rig.run()
    assert rig.answers[plain].cached_tokens == 63 // page_size * page_size
    rig.check_empty()


def test_nobody_else_pays_and_columns_stay_empty() -> None:
    rig = LogprobRig()
    ids = prompt(30)
    rig.submit(ids)
    rig.run()
    columns = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "input_token_logprobs",
               "input_top_logprobs", "input_token_ids_logprobs")  # fmt: skip
    assert rig.wire and all(getattr(message, name) == [] for message in rig.wire for name in columns)
    rid = rig.ask(ids, -1)
    rig.run()
    assert rig.told[rid].inputs == [] and len(rig.told[rid].outputs) == 4
    assert rig.answers[rid].cached_tokens == 29


@pytest.mark.parametrize("overlap", [False, True])
def test_retraction_neither_loses_nor_doubles_them(overlap: bool) -> None:
    """A pool for fewer tokens than the requests come to, so that some go back before or after their first token."""
    rig = LogprobRig(
        tokens=128,
        chunked_prefill_size=16,
        disable_overlap_schedule=not overlap,
        schedule_conservativeness=0.001,
    )
    asked = {}
    for number in range(6):
        ids = prompt(10 + number, number)
        asked[rig.ask(ids, number, tokens=40, tops=1, token_ids=[7])] = (ids, number)
    rig.run()
    assert sum(rig.answers[rid].retractions for rid in asked) > 0
    for rid, (ids, start) in asked.items():
        check(rig.told[rid], ids, start, tops=1, token_ids=[7])
        assert len(rig.told[rid].outputs) == len(rig.told[rid].token_ids) == 40
        whole = ids + rig.answers[rid].output_ids
        assert rig.told[rid].outputs == rule(whole)[len(ids) - 1 :]
    rig.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_is_sent_back_between_its_chunks_begins_again(overlap: bool) -> None:
    """The chunked request loses its memory to the one that decodes beside it; its first pieces must not stay."""
    rig = LogprobRig(
        tokens=66,
        chunked_prefill_size=2,
        enable_mixed_chunk=True,
        schedule_conservativeness=0.001,
        disable_overlap_schedule=not overlap,
    )
    first = rig.submit(prompt(5, 1), 55)
    rig.until_true(lambda: len(rig.answers[first].output_ids) > 8)
    ids = prompt(40, 2)
    second = rig.ask(ids, 0)
    rig.until_true(lambda: rig.state.chunked_req is not None and rig.state.chunked_req.extend_end > 10)
    rig.run()
    assert rig.answers[second].retractions > 0
    check(rig.told[second], ids, 0)
    rig.check_empty()


class TestTurns:
    """Places count from the beginning of the whole prompt."""

    def turn_of(self, rig: LogprobRig, rid: str, own: list[int], start: int, **more: object) -> None:
        rig.ask(own, start, rid=rid, **more)
        rig.inbox.messages[-1].session_params = SessionParams(id=S, rid="a")

    @pytest.mark.parametrize("start", [0, 3, 20, 56, 58])
    def test_any_place_of_the_whole_prompt_can_be_asked_for(self, start: int) -> None:
        rig = LogprobRig()
        opened(rig)
        whole = prompt(53) + told(rig, "a", prompt(53)) + [5, 6]
        self.turn_of(rig, "b", [5, 6], start)
        rig.run()
        check(rig.told["b"], whole, start)
        rig.check_empty()

    def test_its_end_means_none_and_what_lies_beyond_is_refused(self) -> None:
        rig = LogprobRig()
        opened(rig)
        told(rig, "a", prompt(53))
        self.turn_of(rig, "b", [5, 6], 59)
        self.turn_of(rig, "c", [5, 6], 60)
        self.turn_of(rig, "d", [5, 6], 0, token_ids=[1] * 20_000)
        rig.run()
        assert rig.answers["b"].reason == "length" and rig.told["b"].inputs == []
        assert "the prompt's 59 tokens" in refused(rig, "c")
        assert "at most 1000000 are given" in refused(rig, "d")


def test_without_new_tokens_the_last_position_is_told() -> None:
    rig = LogprobRig(chunked_prefill_size=16)
    ids = prompt(40)
    rid = rig.ask(ids, -1, tokens=0, token_ids=[3, 4])
    other = rig.ask(ids, 0, tokens=1, token_ids=[3, 4])
    rig.run()
    assert rig.answers[rid].output_ids == [] and rig.told[rid].outputs == []
    assert len(rig.told[rid].token_ids) == 1
    assert rig.told[rid].token_ids == rig.told[other].token_ids


def test_mixed_batches_tell_the_same() -> None:
    rig = LogprobRig(chunked_prefill_size=16, enable_mixed_chunk=True)
    rig.submit(prompt(8, 9), 60)
    rig.until_true(lambda: len(rig.answers["r0"].output_ids) > 3)
    ids = prompt(50)
    rid = rig.ask(ids, 5, tops=1)
    rig.run()
    check(rig.told[rid], ids, 5, tops=1)


@pytest.mark.parametrize("seed", range(6))
def test_many_at_once(seed: int) -> None:
    draw = random.Random(seed)
    rig = LogprobRig(
        tokens=300,
        chunked_prefill_size=draw.choice([-1, 8, 32]),
        page_size=draw.choice([1, 4]),
        disable_overlap_schedule=draw.random() < 0.5,
        enable_mixed_chunk=draw.random() < 0.5,
        schedule_conservativeness=0.001,
    )
    head = prompt(20, 100)
    asked = {}
    for number in itertools.count():
        if number == 12:
            break
        ids = head[: draw.randrange(20)] + prompt(draw.randrange(1, 40), seed * 100 + number)
        start = draw.randrange(-1, len(ids))
        asked[rig.ask(ids, start, tokens=draw.randrange(20), tops=draw.randrange(3))] = (ids, start)
        for _ in range(draw.randrange(4)):
            rig.stop()
    rig.run()
    for rid, (ids, start) in asked.items():
        told = rig.told[rid]
        if start < 0:
            assert told.inputs == []
            continue
        assert told.inputs[0][1] == [(None, ids[start]), *zip(rule(ids)[start:], ids[start + 1 :])]
        assert len(told.inputs) == 1 and told.inputs[0][0] == 0
    rig.check_empty()
