"""GrammarCompiler: one compilation a grammar, whoever asks, and what is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sgviz.batch.grammar import Grammar
from sgviz.errors import BadRequest, SgvizError
from sgviz.events import VirtualClock
from sgviz.grammar import GrammarCompiler, Key, Ticket
from sgviz.grammar import compiler as module


class Slow:
    """A backend that compiles when it is let, and counts."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []

    def compile(self, key: Key) -> Compiled:
        self.begun.append(key[1])
        assert self.go.wait(30)
        if key[1] == "bad":
            raise BadRequest("no such grammar", param=key[0])
        if key[1] == "broken":
            raise RuntimeError("a fault of the library")
        return Compiled(key[1])


class Compiled:
    def __init__(self, text: str) -> None:
        self.text = text

    def start(self) -> Grammar:
        raise AssertionError("nobody generates here")


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not reached")


def until_done(ticket: Ticket) -> None:
    until(lambda: ticket.done)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def compiler(slow: Slow):  # type: ignore[no-untyped-def]
    made = GrammarCompiler(slow, VirtualClock(1))
    yield made
    slow.go.set()
    made.close()


def test_whoever_asks_meanwhile_shares_the_compilation(slow: Slow, compiler: GrammarCompiler) -> None:
    tickets = [compiler.ask(("regex", "a")) for _ in range(3)]
    assert not any(ticket.done or ticket.hit for ticket in tickets)
    slow.go.set()
    until(lambda: all(ticket.done for ticket in tickets))
    assert slow.begun == ["a"] and len({id(ticket.result()) for ticket in tickets}) == 1
    again = compiler.ask(("regex", "a"))
    assert again.done and again.hit and again.compile_ns == 0 and len(compiler) == 1


def test_the_same_text_of_another_kind_is_another_grammar(slow: Slow, compiler: GrammarCompiler) -> None:
    slow.go.set()
    one, other = compiler.ask(("regex", "a")), compiler.ask(("ebnf", "a"))
    until(lambda: one.done and other.done)
    assert one.result() is not other.result()


def test_what_is_no_grammar_is_kept_as_such(slow: Slow, compiler: GrammarCompiler) -> None:
    slow.go.set()
    for _ in range(2):
        ticket = compiler.ask(("regex", "bad"))
        until_done(ticket)
        with pytest.raises(BadRequest, match="no such grammar"):
            ticket.result()
    assert slow.begun == ["bad"] and ticket.hit


def test_a_fault_of_the_backend_is_logged_and_tried_again(
    slow: Slow, compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    for tries in (1, 2):
        slow.go.clear()
        first, second = compiler.ask(("regex", "broken")), compiler.ask(("regex", "broken"))
        slow.go.set()
        until(lambda: first.done)  # noqa: B023
        for ticket in (first, second):
            compiler.give_back(ticket)
            with pytest.raises(
                SgvizError, match="failed to compile the regex: RuntimeError: a fault"
            ) as found:
                ticket.result()
            assert found.value.status == 500 and ticket.compile_ns == 0
        assert slow.begun == ["broken"] * tries and len(compiler) == 0
        assert len(caplog.records) == tries and "a fault of the library" in caplog.text


def test_what_nobody_waits_for_any_more_is_not_begun(slow: Slow, compiler: GrammarCompiler) -> None:
    busy = [compiler.ask(("regex", str(i))) for i in range(module.WORKERS)]
    until(lambda: len(slow.begun) == module.WORKERS)
    first, second = compiler.ask(("regex", "later")), compiler.ask(("regex", "later"))
    compiler.give_back(first)
    assert len(compiler) == module.WORKERS + 1  # the second still waits
    compiler.give_back(second)
    assert len(compiler) == module.WORKERS
    for ticket in busy:
        compiler.give_back(ticket)  # under way: it is kept
    slow.go.set()
    until(lambda: all(ticket.done for ticket in busy))
    assert "later" not in slow.begun and len(compiler) == module.WORKERS


def test_the_grammar_used_longest_ago_is_forgotten(
    slow: Slow, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 3)
    slow.go.set()
    for text in ("a", "b", "c", "a", "d"):
        until_done(compiler.ask(("regex", text)))
    assert [compiler.ask(("regex", text)).hit for text in ("a", "c", "d")] == [True] * 3
    assert not compiler.ask(("regex", "b")).hit


def test_clear_forgets_all_but_what_is_under_way(slow: Slow, compiler: GrammarCompiler) -> None:
    slow.go.set()
    done = compiler.ask(("regex", "a"))
    until(lambda: done.done)
    slow.go.clear()
    compiler.ask(("regex", "b"))
    compiler.clear()
    assert len(compiler) == 1 and done.result() is not None


def test_inline_it_is_done_at_once(slow: Slow) -> None:
    slow.go.set()
    inline = GrammarCompiler(slow, VirtualClock(1), inline=True)
    assert inline.ask(("regex", "a")).done
    with pytest.raises(BadRequest):
        inline.ask(("regex", "bad")).result()
