"""The grammar queue: who waits for a grammar, who goes on, and who ends there; nobody else notices."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from rig import Rig
from small_vocabulary import SIZE, backend, compiler, decode

from sgviz.errors import BadRequest
from sgviz.events import VirtualClock, schema
from sgviz.events.schema import Reason
from sgviz.grammar import CompiledGrammar, GrammarCompiler, Key
from sgviz.messages import GetInternalStateReq
from sgviz.scheduler.stops import Stop

PROMPT = range(5, 12)


class Gated:
    """The real backend; a text that begins with "slow" waits until it is let."""

    def __init__(self) -> None:
        self.real = backend()
        self.go = threading.Event()
        self.done: list[str] = []

    def compile(self, key: Key) -> CompiledGrammar:
        kind, text, *_ = key
        if text.startswith("slow"):
            assert self.go.wait(30)
        try:
            return self.real.compile((kind, text.removeprefix("slow")))
        finally:
            self.done.append(text)


class Bench:
    """A rig whose grammars compile in threads."""

    def __init__(self, **settings: object) -> None:
        self.gated = Gated()
        self.compiler = GrammarCompiler(self.gated, VirtualClock(1))
        self.rig = Rig(grammars=self.compiler, decode=decode, vocab_size=SIZE, **settings)
        self.state = self.rig.state

    def wait_for(self, *texts: str) -> None:
        """Until they are compiled; only then the next turn can see it."""
        for _ in range(3000):
            if set(texts) <= set(self.gated.done):
                time.sleep(0.02)  # the future is set right after
                return
            time.sleep(0.01)
        raise AssertionError(f"{texts} were not compiled")

    def turn(self) -> None:
        """One whole turn of the loop."""
        for _ in range(50):
            if self.rig.stop() in (Stop.PROCESSED, Stop.IDLE):
                return
        raise AssertionError("no end of the turn")

    def run(self) -> None:
        """Until nobody is left, however long the threads take."""
        for _ in range(20_000):
            if self.rig.stop() is Stop.IDLE and not self.state.live:
                break
            if self.state.grammar_queue:
                time.sleep(0.001)
        self.rig.check_empty()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.gated.go.set()
    made.compiler.close()


def text_of(bench: Bench, rid: str) -> str:
    return decode(bench.rig.answers[rid].output_ids)


def test_others_run_while_one_waits_for_its_grammar(bench: Bench) -> None:
    rig, state = bench.rig, bench.state
    slow = rig.submit(PROMPT, 20, regex="slow[0-9]{4}")
    other = rig.submit(PROMPT, 5)
    for _ in range(8):
        bench.turn()
    assert [req.rid for req in state.grammar_queue] == [slow] and slow in state.live
    assert rig.answers[other].reason == "length" and rig.answers[slow].finish is None
    assert (state.num_queued, state.num_running, state.is_fully_idle) == (1, 0, False)
    bench.gated.go.set()
    bench.run()
    assert len(text_of(bench, slow)) == 4 and rig.answers[slow].reason == "stop"
    queued, ready = rig.bodies(schema.GrammarQueued), rig.bodies(schema.GrammarReady)
    assert [(body.rid, body.grammar, body.waiting) for body in queued] == [(slow, "regex", 1)]
    assert [(body.rid, body.hit, body.error) for body in ready] == [(slow, False, "")]


def test_a_known_grammar_costs_no_turn(bench: Bench) -> None:
    bench.rig.submit(PROMPT, 9, regex="slow[0-9]{3}")
    bench.turn()
    bench.gated.go.set()
    bench.run()
    again = bench.rig.submit(PROMPT, 9, regex="slow[0-9]{3}")
    bench.turn()
    assert not bench.state.grammar_queue and bench.state.live[again].output_ids
    bench.run()
    assert [body.hit for body in bench.rig.bodies(schema.GrammarReady)] == [False, True]
    assert len(bench.rig.bodies(schema.GrammarQueued)) == 1


def test_those_who_are_ready_go_on_before_those_who_came_earlier(bench: Bench) -> None:
    first = bench.rig.submit(PROMPT, 9, regex="slow[a-c]{2}")
    second = bench.rig.submit(PROMPT, 9, regex="[0-9]{2}")
    bench.turn()
    bench.wait_for("[0-9]{2}")
    bench.turn()
    assert [req.rid for req in bench.state.grammar_queue] == [first]
    bench.gated.go.set()
    bench.run()
    assert [body.rid for body in bench.rig.bodies(schema.QueueEntered)] == [second, first]


@pytest.mark.parametrize("known", [False, True])
def test_what_cannot_be_compiled_fails_alone(bench: Bench, known: bool) -> None:
    """A request for an uncompilable grammar ends with 400; one beside it is answered as if it were not there."""
    if known:
        bench.rig.submit(PROMPT, 9, regex="(((", rid="before")
        bench.run()
    bad = bench.rig.submit(PROMPT, 9, regex="(((")
    good = bench.rig.submit(PROMPT, 9, regex="[0-9]{3}")
    bench.run()
    answer = bench.rig.answers[bad]
    assert answer.status == 400 and answer.cut and not answer.output_ids
    assert answer.finish is not None and "unclosed group" in str(answer.finish.message)
    assert len(text_of(bench, good)) == 3
    aborted = [body for body in bench.rig.bodies(schema.RequestAborted) if body.rid == bad]
    assert [(body.where, body.reason) for body in aborted] == [("grammar", Reason.GRAMMAR)]


def test_an_abort_there_is_answered_at_once_and_the_grammar_is_not_waited_for(bench: Bench) -> None:
    rig = bench.rig
    gone, stays = rig.submit(PROMPT, 9, regex="slow[0-9]{2}"), rig.submit(PROMPT, 9, regex="slow[a-c]{2}")
    bench.turn()
    rig.abort(gone)
    bench.turn()
    assert rig.answers[gone].reason == "abort" and rig.answers[gone].status is None
    assert [req.rid for req in bench.state.grammar_queue] == [stays] and gone not in bench.state.live
    bench.gated.go.set()
    bench.run()
    assert len(text_of(bench, stays)) == 2
    assert [body.where for body in rig.bodies(schema.RequestAborted)] == ["grammar"]


def test_abort_all_ends_those_too(bench: Bench) -> None:
    rids = [bench.rig.submit(PROMPT, 9, regex=f"slow[0-9]{{{i}}}") for i in (1, 2)] + [
        bench.rig.submit(PROMPT, 99)
    ]
    bench.turn()
    bench.rig.abort(abort_all=True)
    bench.run()
    assert [bench.rig.answers[rid].reason for rid in rids] == ["abort"] * 3 and not bench.state.grammar_queue


def test_a_grammar_that_takes_too_long_ends_its_request_and_helps_the_next() -> None:
    bench = Bench(grammar_timeout=2.0)
    late = bench.rig.submit(PROMPT, 9, regex="slow[0-9]{2}")
    bench.turn()
    bench.rig.clock.advance(1_900_000_000)
    bench.turn()
    assert bench.state.grammar_queue
    bench.rig.clock.advance(200_000_000)
    bench.turn()
    answer = bench.rig.answers[late]
    assert answer.status == 400 and "not compiled within 2 s" in str(answer.finish and answer.finish.message)
    assert not bench.state.live and not bench.state.grammar_queue
    bench.gated.go.set()
    bench.wait_for("slow[0-9]{2}")
    again = bench.rig.submit(PROMPT, 9, regex="slow[0-9]{2}")
    bench.run()
    assert len(text_of(bench, again)) == 2 and bench.gated.done == ["slow[0-9]{2}"]
    bench.compiler.close()


def test_without_a_backend_it_is_refused_with_the_setting_s_name() -> None:
    rig = Rig(decode=decode, vocab_size=SIZE)
    rid = rig.submit(PROMPT, 9, regex="[0-9]{3}")
    rig.run()
    answer = rig.answers[rid]
    assert answer.status == 400 and "grammar_backend none" in str(answer.finish and answer.finish.message)


def test_those_who_wait_for_grammars_count_as_queued() -> None:
    bench = Bench(max_queued_requests=2)
    rids = [bench.rig.submit(PROMPT, 9, regex=f"slow[0-9]{{{i}}}") for i in (1, 2, 3)]
    bench.turn()
    assert [bench.rig.answers[rid].status for rid in rids] == [None, None, 503]
    bench.rig.inbox.send(GetInternalStateReq(id="s"))
    bench.turn()
    told = bench.rig.replies[-1].state
    assert (told["num_grammar_queue_reqs"], told["num_running_reqs"], told["num_waiting_reqs"]) == (2, 0, 0)
    assert not bench.rig.flush().success
    bench.gated.go.set()
    bench.run()
    assert len(bench.compiler) == 2 and bench.rig.flush().success and len(bench.compiler) == 0
    bench.compiler.close()


def test_a_grammar_for_no_output_is_still_compiled() -> None:
    rig = Rig(grammars=compiler(), decode=decode, vocab_size=SIZE)
    good, bad = rig.submit(PROMPT, 0, regex="[0-9]"), rig.submit(PROMPT, 0, regex="(((")
    rig.run()
    assert rig.answers[good].reason == "length" and rig.answers[bad].status == 400


def test_a_backend_that_breaks_is_that_request_s_end_only() -> None:
    class Broken:
        def compile(self, key: Key) -> CompiledGrammar:
            raise MemoryError("no more") if key[1] == "a" else BadRequest("no such thing")

    rig = Rig(
        grammars=GrammarCompiler(Broken(), VirtualClock(1), inline=True), decode=decode, vocab_size=SIZE
    )
    rids = [rig.submit(PROMPT, 4, regex="a"), rig.submit(PROMPT, 4, regex="b"), rig.submit(PROMPT, 4)]
    rig.run()
    rig.check_empty()
    assert [rig.answers[rid].status for rid in rids] == [500, 400, None]
    assert "MemoryError: no more" in str(rig.answers[rids[0]].finish)


FULL = {"max_running_requests": 1, "max_queued_requests": 1, "enable_priority_scheduling": True}


def fill(bench: Bench) -> None:
    """One runs, "waits" waits, and that is all there may be."""
    bench.rig.submit(PROMPT, 90, rid="runs", priority=99, ignore_eos=True)
    bench.rig.until_true(lambda: "runs" in bench.state.live and not bench.state.waiting_queue)
    bench.rig.submit(PROMPT, 5, rid="waits", priority=0)
    bench.rig.until_true(lambda: bool(bench.state.waiting_queue))


@pytest.mark.parametrize("regex", ["(((", "slow((("])
def test_nobody_leaves_the_queue_for_one_whose_grammar_cannot_be_had(regex: str) -> None:
    bench = Bench(**FULL)
    fill(bench)
    bad = bench.rig.submit(PROMPT, 9, rid="bad", priority=9, regex=regex)
    bench.gated.go.set()
    bench.run()
    assert bench.rig.answers[bad].status == 400
    assert bench.rig.answers["waits"].reason == "length"
    bench.compiler.close()


def test_a_better_one_takes_the_place_when_its_grammar_is_there() -> None:
    bench = Bench(**FULL)
    fill(bench)
    good = bench.rig.submit(PROMPT, 9, rid="good", priority=9, regex="slow[0-9]{3}")
    bench.rig.until_true(lambda: bool(bench.state.grammar_queue))
    assert bench.rig.answers["waits"].finish is None
    bench.gated.go.set()
    bench.run()
    assert bench.rig.answers["waits"].status == 503 and len(text_of(bench, good)) == 3
    bench.compiler.close()


def test_one_that_lost_its_place_while_its_grammar_was_compiled_is_refused() -> None:
    bench = Bench(**FULL)
    fill(bench)
    for rid, priority in (("good", 9), ("better", 20)):
        bench.rig.submit(PROMPT, 9, rid=rid, priority=priority, regex=f"slow[0-9]{{{priority}}}")
        bench.rig.until_true(lambda rid=rid: any(req.rid == rid for req in bench.state.grammar_queue))
    bench.gated.go.set()
    bench.wait_for("slow[0-9]{9}", "slow[0-9]{20}")
    bench.run()
    answers = bench.rig.answers
    assert [answers[rid].status for rid in ("waits", "good")] == [503, 503]
    assert answers["better"].reason == "length" and answers["better"].finals == 1
    told = [body.rid for body in bench.rig.bodies(schema.RequestAborted)]
    assert sorted(told) == ["good", "waits"]
    bench.compiler.close()


def test_one_that_is_not_better_is_refused_before_its_grammar_is_compiled() -> None:
    bench = Bench(**FULL)
    fill(bench)
    late = bench.rig.submit(PROMPT, 9, rid="late", priority=0, regex="slow[0-9]")
    bench.rig.until_true(lambda: bench.rig.answers[late].finals == 1)
    assert bench.rig.answers[late].status == 503 and len(bench.compiler) == 0
    bench.gated.go.set()
    bench.run()
    bench.compiler.close()
