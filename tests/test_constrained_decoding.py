"""Grammars in a whole scheduler: what comes out matches, in both loops alike, whatever else happens in the batch."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scheduler"))
sys.path.insert(0, str(Path(__file__).parent / "grammar"))

from jsonschema import validate
from rig import Answer, Rig
from small_vocabulary import EOS, SIZE, backend, compiler, decode, encode

from sgviz.batch.grammar import Failure, Grammar
from sgviz.events import VirtualClock, schema
from sgviz.grammar import GrammarCompiler, Key
from sgviz.worker.mock_worker import MockWorker, mock_info

PROMPT = range(5, 12)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9, "maximum": 99},
        "b": {"type": "array", "items": {"enum": ["x", "yz"]}, "maxItems": 2},
        "c": {"type": "string", "maxLength": 4},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
REGEX = "[0-9]{3}-[a-c]{1,6}"


class Watching(MockWorker):
    """Notes whose sampling was delayed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.delayed: list[list[str]] = []

    def launch(self, batch, *, delay_sample: bool = False):  # type: ignore[no-untyped-def]
        if delay_sample:
            self.delayed.append([req.rid for req in batch.reqs])
        return super().launch(batch, delay_sample=delay_sample)


def make_rig(*, threaded: bool = False, tokens: int = 512, page_size: int = 1, **settings: object) -> Rig:
    info = mock_info(vocab_size=SIZE, context_len=160, max_total_num_tokens=tokens, eos_token_ids=(EOS,))
    worker = Watching(info, eos_every=40, threaded=threaded, check=True, page_size=page_size)
    return Rig(worker=worker, grammars=compiler(), decode=decode, page_size=page_size, **settings)


def check_states(rig: Rig) -> None:
    """Every grammar has come exactly as far as its request's output."""
    for req in rig.state.live.values():
        if req.grammar is not None:
            assert req.grammar.accepted == len(req.output_ids), req.rid


def ids_of(rig: Rig) -> dict[str, tuple[list[int], str | None]]:
    return {rid: (answer.output_ids, answer.reason) for rid, answer in rig.answers.items()}


def check_text(answer: Answer, kind: str) -> None:
    text = decode(answer.output_ids)
    if kind == "regex":
        assert re.fullmatch(REGEX, text), text
    elif kind == "json_schema":
        validate(json.loads(text), SCHEMA)


def crowd(rig: Rig, rng: random.Random, size: int) -> dict[str, str]:
    """Requests of all three sorts, a few stops apart; the sort of each rid."""
    kinds: dict[str, str] = {}
    for number in range(size):
        kind = rng.choice(("regex", "json_schema", "none"))
        grammar = {"regex": REGEX} if kind == "regex" else {"json_schema": json.dumps(SCHEMA)}
        rid = rig.submit(
            [rng.randrange(5, SIZE) for _ in range(rng.randrange(2, 30))],
            rng.randrange(30, 46),
            rid=f"{kind}{number}",
            **({} if kind == "none" else grammar),
        )
        kinds[rid] = kind
        for _ in range(rng.randrange(0, 8)):
            rig.stop()
            check_states(rig)
    while rig.state.live or rig.inbox.messages:
        rig.stop()
        check_states(rig)
    rig.run()
    rig.check_empty()
    return kinds


@pytest.mark.parametrize("threaded", [False, True])
def test_the_output_matches_in_both_loops_alike(threaded: bool) -> None:
    rigs = [make_rig(threaded=threaded, disable_overlap_schedule=normal) for normal in (True, False)]
    for rig in rigs:
        kinds = crowd(rig, random.Random(3), 12)
        for rid, kind in kinds.items():
            if rig.answers[rid].reason == "stop":
                check_text(rig.answers[rid], kind)
    assert ids_of(rigs[0]) == ids_of(rigs[1])
    assert rigs[0].worker.delayed == [] and rigs[1].worker.delayed
    for rig in rigs:
        rig.worker.close()


def test_both_loops_agree_under_pressure() -> None:
    """Retractions, chunks and mixed batches at once: a grammar goes on where its request does."""
    retracted = finished = 0
    for seed in range(10):
        rng = random.Random(seed)
        chosen = {
            "tokens": 160,
            "page_size": rng.choice((1, 4)),
            "chunked_prefill_size": rng.choice((8, 16, 33)),
            "enable_mixed_chunk": rng.random() < 0.5,
            "schedule_conservativeness": 0.001,
        }
        rigs = [make_rig(disable_overlap_schedule=normal, **chosen) for normal in (True, False)]
        for rig in rigs:
            kinds = crowd(rig, random.Random(seed), 16)
            for rid, kind in kinds.items():
                answer = rig.answers[rid]
                finished += answer.reason == "stop" and kind != "none"
                if answer.reason == "stop":
                    check_text(answer, kind)
                if answer.retractions and kind != "none":
                    retracted += 1
        assert ids_of(rigs[0]) == ids_of(rigs[1]), f"seed {seed}, {chosen}"
    assert retracted > 5 and finished > 100


def test_only_batches_with_a_grammar_are_delayed() -> None:
    rig = make_rig(disable_overlap_schedule=False)
    rig.submit(PROMPT, 30, rid="plain", ignore_eos=True)
    rig.submit(PROMPT, 20, rid="under", regex="[0-9]{6}")
    rig.run()
    assert rig.worker.delayed and all("under" in rids for rids in rig.worker.delayed)
    assert len(rig.bodies(schema.BatchLaunched)) > len(rig.worker.delayed) + 15


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_the_grammar_is_the_end(ignore_eos: bool) -> None:
    rig = make_rig()
    fixed = rig.submit(PROMPT, 30, regex="[d-g]{4}", ignore_eos=ignore_eos)
    opened = rig.submit(PROMPT, 60, regex="[0-9]{2,9}", ignore_eos=ignore_eos)
    exact = rig.submit(PROMPT, 4, regex="[d-g]{4}", ignore_eos=ignore_eos)
    rig.run()
    ends = [rig.answers[rid].finish for rid in (fixed, opened, exact)]
    assert [end.type for end in ends if end] == ["stop"] * 3
    assert ends[0] and ends[0].matched is None and len(rig.answers[fixed].output_ids) == 4
    last = rig.answers[opened].output_ids[-1]
    assert ends[1] and ends[1].matched == (EOS if last == EOS else None)
    assert ends[2] and ends[2].matched is None  # whole at its limit: not cut by it


def test_too_short_a_limit_cuts_it() -> None:
    rig = make_rig()
    rid = rig.submit(PROMPT, 3, regex="[d-g]{4}")
    rig.run()
    assert rig.answers[rid].reason == "length" and len(rig.answers[rid].output_ids) == 3


def test_min_new_tokens_keeps_the_end_away_where_the_grammar_can_go_on() -> None:
    rig = make_rig()
    longer = rig.submit(PROMPT, 40, regex="a+", min_new_tokens=12)
    whole = rig.submit(PROMPT, 40, regex="ab", min_new_tokens=12)
    stops = rig.submit(PROMPT, 40, regex="[ab]+", min_new_tokens=6, stop_token_ids=tuple(encode("b")))
    rig.run()
    assert len(rig.answers[longer].output_ids) >= 12
    assert decode(rig.answers[whole].output_ids) in ("ab",) and rig.answers[whole].reason == "stop"
    assert encode("b")[0] not in rig.answers[stops].output_ids[:6]


def test_stop_strings_and_ids_still_end_it() -> None:
    rig = make_rig()
    free = [rig.submit(PROMPT, 60, regex=regex) for regex in ("[0-9]{40}", "[0-9a-c]{40}")]
    rig.run()
    digits, letters = (rig.answers[rid].output_ids for rid in free)
    stop, stop_id = decode(digits[3:5]), letters[4]
    text = rig.submit(PROMPT, 60, regex="[0-9]{40}", stop=(stop,))
    token = rig.submit(PROMPT, 60, regex="[0-9a-c]{40}", stop_token_ids=(stop_id,))
    rig.run()
    for rid, matched, most in ((text, stop, 5), (token, stop_id, 5)):
        answer = rig.answers[rid]
        assert answer.finish is not None
        assert (answer.finish.type, answer.finish.matched) == ("stop", matched)
        assert len(answer.output_ids) <= most


def test_requests_with_the_same_grammar_have_states_of_their_own() -> None:
    rig = make_rig(disable_overlap_schedule=False)
    for number in range(6):
        rig.submit(range(5, 9 + number), 30, regex=REGEX)
    rig.run()
    texts = [decode(answer.output_ids) for answer in rig.answers.values()]
    assert all(re.fullmatch(REGEX, text) for text in texts) and len(set(texts)) > 1
    assert [body.hit for body in rig.bodies(schema.GrammarReady)] == [False] + [True] * 5


class Fragile:
    """A backend whose grammars break off after three tokens."""

    def __init__(self, too_complex: bool) -> None:
        self.real = backend()
        self.too_complex = too_complex

    def compile(self, key: Key) -> Fragile:
        self.compiled = self.real.compile(key)
        return self

    def start(self) -> Grammar:
        state, too_complex = self.compiled.start(), self.too_complex

        class Breaks:
            ended = False

            @property
            def accepted(self) -> int:
                return state.accepted

            def fill(self, row: object) -> None:
                state.fill(row)  # type: ignore[arg-type]

            def accept(self, token: int) -> Failure | None:
                return Failure("no further", too_complex) if state.accepted == 3 else state.accept(token)

        return Breaks()


@pytest.mark.parametrize(("too_complex", "status"), [(True, 400), (False, 500)])
@pytest.mark.parametrize("normal", [True, False])
def test_a_grammar_that_breaks_off_ends_its_request_without_a_wrong_token(
    too_complex: bool, status: int, normal: bool
) -> None:
    grammars = GrammarCompiler(Fragile(too_complex), VirtualClock(1), inline=True)
    rig = Rig(grammars=grammars, decode=decode, vocab_size=SIZE, disable_overlap_schedule=normal)
    bad, good = rig.submit(PROMPT, 30, regex="[0-9]{9}"), rig.submit(PROMPT, 12)
    rig.run()
    rig.check_empty()
    answer = rig.answers[bad]
    assert answer.status == status and re.fullmatch("[0-9]+", decode(answer.output_ids))
    assert "after 3 tokens: no further" in str(answer.finish) and len(answer.output_ids) == 3
    assert rig.answers[good].reason == "length"
