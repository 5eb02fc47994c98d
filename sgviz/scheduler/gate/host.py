"""What a gate gets from whoever starts the scheduler: a clock for leases, and the Python predicates of its process.

Imports: errors, events.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from sgviz.errors import BadRequest
from sgviz.events import Clock, Event

ONLY_THREADS = (
    "a breakpoint given as a Python function works in mode='threads' only: the scheduler is another process; "
    "write it as a text instead, such as 'refused and reason == \"kv\"'"
)


class LocalPredicates:
    """Python predicates by name, shared by the engine's face and the scheduler's thread in one process."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[Event], object]] = {}
        self._numbers = itertools.count(1)

    def add(self, function: Callable[[Event], object]) -> str:
        """Keep the function; the name to ask for it by."""
        name = f"{getattr(function, '__name__', type(function).__name__)}#{next(self._numbers)}"
        self._functions[name] = function
        return name

    def get(self, name: str) -> Callable[[Event], object]:
        """Raises BadRequest if there is none of that name in this process."""
        if name not in self._functions:
            raise BadRequest(f"there is no Python predicate {name!r} in the scheduler's process")
        return self._functions[name]

    def clear(self) -> None:
        self._functions.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugHost:
    """`local`: None where the debugger is in another process. `clock`: real time, whatever the scheduler's is."""

    clock: Clock
    local: LocalPredicates | None = field(default=None)

    def predicate(self, name: str) -> Callable[[Event], object]:
        """The Python predicate of that name. Raises BadRequest where there can be none."""
        if self.local is None:
            raise BadRequest(ONLY_THREADS)
        return self.local.get(name)
