"""Thoughts before a grammar in a whole scheduler: both loops alike, through retractions, chunks and mixed batches."""

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
from rig import Rig
from small_vocabulary import EOS, SIZE, SPECIAL, backend, decode

from sgviz.events import VirtualClock
from sgviz.grammar import GrammarCompiler
from sgviz.grammar.reasoner import ReasonerBackend
from sgviz.reasoning import ReasoningFormat, ReasoningParser
from sgviz.worker.mock_worker import MockWorker, mock_info

FORM = ReasoningFormat(start="<call>", end="<over>")  # what this vocabulary has for special tokens
REGEX = "[0-9]{3}-[a-c]{6,16}"
SCHEMA = {"type": "array", "items": {"enum": ["x", "yz", 1]}, "minItems": 3, "maxItems": 9}
GRAMMARS = {"regex": {"regex": REGEX}, "json_schema": {"json_schema": json.dumps(SCHEMA)}, "none": {}}
START, END = SPECIAL[FORM.start], SPECIAL[FORM.end]


def rule(rid: str, index: int, bits: int) -> int:
    """Some open thoughts, all who may end them do so after a few tokens; the rest is chance."""
    seed = sum(map(ord, rid))
    if index == 0 and seed % 2:
        return START
    return END if index == 2 + seed % 23 else random.Random(f"{rid} {index}").randrange(4, SIZE)


def make_rig(
    form: ReasoningFormat | None = FORM, *, tokens: int = 512, page_size: int = 1, **settings: object
) -> Rig:
    info = mock_info(vocab_size=SIZE, context_len=160, max_total_num_tokens=tokens, eos_token_ids=(EOS,))
    worker = MockWorker(info, rule=rule, check=True, page_size=page_size)
    grammars = GrammarCompiler(ReasonerBackend(backend(), form), VirtualClock(1), inline=True)
    return Rig(worker=worker, grammars=grammars, decode=decode, page_size=page_size, **settings)


def crowd(rig: Rig, rng: random.Random, size: int) -> dict[str, tuple[str, bool | None]]:
    """Requests of all sorts, a few stops apart; the grammar of each rid, and whether it thinks."""
    kinds: dict[str, tuple[str, bool | None]] = {}
    for number in range(size):
        kind, thinks = (
            rng.choice(("regex", "json_schema", "regex", "json_schema", "none")),
            rng.choice((True, None, False)),
        )
        ids = [rng.randrange(5, SIZE) for _ in range(rng.randrange(2, 30))]
        rid = rig.submit(
            ids,
            rng.randrange(46, 60),
            rid=f"{kind}-{thinks}-{number}",
            require_reasoning=thinks,
            **GRAMMARS[kind],
        )
        kinds[rid] = (kind, thinks)
        for _ in range(rng.randrange(0, 3)):
            rig.stop()
            check_states(rig)
    while rig.state.live or rig.inbox.messages:
        rig.stop()
        check_states(rig)
    rig.run()
    rig.check_empty()
    return kinds


def check_states(rig: Rig) -> None:
    """Every grammar, thoughts included, has come exactly as far as its request's output."""
    for req in rig.state.live.values():
        if req.grammar is not None:
            assert req.grammar.accepted == len(req.output_ids), req.rid


def check_answer(ids: list[int], kind: str, thinks: bool | None) -> bool:
    """What follows the thoughts matches; whether there were some."""
    text = decode(ids, skip_special_tokens=False).removesuffix("<end>")
    _, content = ReasoningParser(FORM, inside=bool(thinks)).parse(text)
    if kind == "regex":
        assert re.fullmatch(REGEX, content), text
    elif kind == "json_schema":
        validate(json.loads(content), SCHEMA)
    return END in ids


def ids_of(rig: Rig) -> dict[str, tuple[list[int], str | None]]:
    return {rid: (answer.output_ids, answer.reason) for rid, answer in rig.answers.items()}


def test_both_loops_agree_and_the_answer_behind_the_thoughts_matches() -> None:
    retracted = finished = thought = 0
    for seed in range(14):
        rng = random.Random(seed)
        chosen = {
            "tokens": 176,
            "page_size": rng.choice((1, 4)),
            "chunked_prefill_size": rng.choice((16, 33)),
            "enable_mixed_chunk": rng.random() < 0.5,
            "schedule_conservativeness": 0.001,
        }
        rigs = [make_rig(disable_overlap_schedule=normal, **chosen) for normal in (True, False)]
        for rig in rigs:
            for rid, (kind, thinks) in crowd(rig, random.Random(seed), 18).items():
                answer = rig.answers[rid]
                retracted += bool(answer.retractions) and kind != "none"
                if kind == "none" or answer.reason != "stop":
                    continue
                finished += 1
                thought += check_answer(answer.output_ids, kind, thinks)
                assert thinks is not True or END in answer.output_ids
        assert ids_of(rigs[0]) == ids_of(rigs[1]), f"seed {seed}, {chosen}"
    assert retracted > 3 and finished > 100 and 40 < thought < finished, (retracted, finished, thought)


@pytest.mark.parametrize("normal", [True, False])
def test_thoughts_where_the_server_knows_none_end_that_request_alone(normal: bool) -> None:
    rig = make_rig(form=None, disable_overlap_schedule=normal)
    refused = rig.submit(range(5, 12), rid="a", require_reasoning=True, regex=REGEX)
    other = rig.submit(range(5, 12), 30, rid="b", regex=REGEX)
    free = rig.submit(range(5, 12), 3, rid="c", require_reasoning=True)
    rig.run()
    rig.check_empty()
    assert rig.answers[refused].finish is not None and rig.answers[refused].finish.status_code == 400
    assert "--reasoning-parser" in str(rig.answers[refused].finish.message)
    assert rig.answers[other].reason == "stop" and rig.answers[free].reason == "length"
