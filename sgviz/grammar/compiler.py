"""GrammarCompiler: compiles off the loop, keeps what it compiled, and says when a grammar is there.

Mirrors the pool and the cache of SGLang's grammar manager; here the cache forgets what was used longest ago, and a
text that is no grammar is kept as well. A fault of the backend is logged and not kept: the next try may do better.
Only the scheduler's thread calls it. Imports: events (clock), errors.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from sgviz.errors import BadRequest, SgvizError
from sgviz.events import Clock
from sgviz.grammar.backend import CompiledGrammar, GrammarBackend, Key

log = logging.getLogger(__name__)
WORKERS = 4
CACHED_GRAMMARS = 256


@dataclass(slots=True)
class _Entry:
    """One grammar: compiled, failed, or under way for `waiting` requests."""

    future: Future[tuple[CompiledGrammar, int]]
    waiting: int = 0

    @property
    def broken(self) -> bool:
        """Not compiled through no fault of the text."""
        future = self.future
        if not future.done() or future.cancelled() or future.exception() is None:
            return False
        return not isinstance(future.exception(), BadRequest)


@dataclass(slots=True)
class Ticket:
    """One request's claim to a grammar. `hit`: it was there already."""

    key: Key
    hit: bool
    entry: _Entry

    @property
    def done(self) -> bool:
        return self.entry.future.done()

    @property
    def compile_ns(self) -> int:
        """How long compiling took; 0 while it is not done, for what failed, and for a hit."""
        future = self.entry.future
        if self.hit or not future.done() or future.cancelled() or future.exception() is not None:
            return 0
        return future.result()[1]

    def result(self) -> CompiledGrammar:
        """The grammar, once `done`. Raises BadRequest if it cannot be compiled, SgvizError if the backend broke."""
        error = self.entry.future.exception()
        if error is None:
            return self.entry.future.result()[0]
        if isinstance(error, BadRequest):
            raise BadRequest(error.message, param=error.param)  # a fresh one: this may be told many times
        raise SgvizError(f"this server failed to compile the {self.key[0]}: {type(error).__name__}: {error}")


class GrammarCompiler:
    """Grammars by key.

    Args:
        inline: compile in the caller's thread, for runs in virtual time.
    """

    def __init__(self, backend: GrammarBackend, clock: Clock, *, inline: bool = False) -> None:
        self._backend = backend
        self._clock = clock
        self._inline = inline
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Grammars that are kept or under way."""
        return len(self._entries)

    def ask(self, key: Key) -> Ticket:
        """A claim to the grammar of `key`, which begins to compile unless it does or is there."""
        entry = self._entries.get(key)
        hit = entry is not None and entry.future.done()
        if entry is None:
            entry = self._entries[key] = _Entry(self._submit(key))
            self._forget_oldest()
        self._entries.move_to_end(key)
        entry.waiting += 1
        return Ticket(key, hit, entry)

    def give_back(self, ticket: Ticket) -> None:
        """The claim was met or given up; what nobody waits for and has not begun is not compiled."""
        entry = ticket.entry
        entry.waiting -= 1
        useless = entry.broken or (not entry.waiting and entry.future.cancel())
        if useless and self._entries.get(ticket.key) is entry:
            del self._entries[ticket.key]

    def clear(self) -> None:
        """Forget every grammar that is not under way."""
        for key in [key for key, entry in self._entries.items() if entry.future.done()]:
            del self._entries[key]

    def close(self) -> None:
        """What has not begun is never compiled; what has is not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, key: Key) -> Future[tuple[CompiledGrammar, int]]:
        if self._inline:
            future: Future[tuple[CompiledGrammar, int]] = Future()
            try:
                future.set_result(self._compile(key))
            except Exception as error:
                future.set_exception(error)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="sgviz-grammar")
        return self._pool.submit(self._compile, key)

    def _compile(self, key: Key) -> tuple[CompiledGrammar, int]:
        started = self._clock.now()
        try:
            compiled = self._backend.compile(key)
        except BadRequest:
            raise
        except BaseException:
            log.exception("a %s of %d characters was not compiled", key[0], len(key[1]))
            raise
        return compiled, self._clock.now() - started

    def _forget_oldest(self) -> None:
        old = [key for key, entry in self._entries.items() if entry.future.done()]
        for key in old[: max(0, len(self._entries) - CACHED_GRAMMARS)]:
            del self._entries[key]
