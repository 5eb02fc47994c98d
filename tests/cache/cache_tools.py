"""What the cache's tests share: a request that holds KV, a tracer to listen to, random choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from sgviz.cache.kv_cache import KVCache
from sgviz.cache.radix_cache import RadixCache
from sgviz.cache.req_kv import ReqKvInfo
from sgviz.events.clock import VirtualClock
from sgviz.events.schema import AnyBody, Event
from sgviz.events.tracer import Tracer


@dataclass(eq=False)
class Request:
    """The least that the cache knows of a request, and the ids whose KV it has."""

    rid: str
    ids: list[int]
    namespace: str = ""
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)


class ListSink:
    """Keeps every event."""

    def __init__(self) -> None:
        self.bodies: list[AnyBody] = []

    def put(self, event: Event) -> None:
        self.bodies.append(event.body)

    def flush(self) -> None:
        pass

    def drain(self) -> list[AnyBody]:
        bodies, self.bodies = self.bodies, []
        return bodies


def listening() -> tuple[Tracer, ListSink]:
    sink = ListSink()
    return Tracer("scheduler", sink, VirtualClock()), sink


def silent() -> Tracer:
    return Tracer("scheduler", None, VirtualClock())


Choose = Callable[[int], int]  # n -> one of 0..n-1


def drawn(data: st.DataObject) -> Choose:
    """Choices that hypothesis makes (and shrinks)."""
    return lambda n: data.draw(st.integers(0, n - 1))


def some_ids(choose: Choose, page_size: int, pages: int, tail: int) -> list[int]:
    """`pages` whole pages of three kinds, so that heads are shared, and `tail` tokens more.

    Kind 2 differs from kind 1 in its last token only, so prompts part within a page too.
    """
    kinds = ([0] * page_size, [1] * page_size, [1] * (page_size - 1) + [2])
    ids = [token for _ in range(pages) for token in kinds[choose(3)]]
    return ids + [1] * tail


def case_of(machine: type[RuleBasedStateMachine], examples: int, steps: int, **attributes: int) -> type:
    """The test case of a state machine whose class attributes are set like this."""
    variant = cast(type[RuleBasedStateMachine], type(machine.__name__, (machine,), attributes))
    case = variant.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None)
    return case


def cache_of(size: int, page_size: int, *, disabled: bool = False) -> tuple[KVCache, ListSink]:
    trace, sink = listening()
    cache = KVCache(
        size=size,
        page_size=page_size,
        rows=4,
        max_context_len=64,
        trace=trace,
        disable_radix_cache=disabled,
    )
    return cache, sink


def admit(cache: KVCache, rid: str, ids: list[int], namespace: str = "") -> Request:
    req = Request(rid, ids, namespace)
    cache.adopt(req, cache.match(ids, namespace, len(ids) - 1))
    return req


def run(cache: KVCache, rid: str, ids: list[int], extra: int = 0) -> Request:
    """Admitted with KV for all of `ids` and `extra` positions more."""
    req = admit(cache, rid, ids)
    cache.alloc_extend([req], [len(ids) + extra])
    return req


def put(tree: RadixCache, ids: list[int], first: int, namespace: str = "") -> int:
    """Insert `ids` with slots counting from `first` (a multiple of the page)."""
    return tree.insert(ids, np.arange(first, first + len(ids), dtype=np.int64), namespace, "r")
