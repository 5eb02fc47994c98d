"""How far a download or a conversion is, on stderr. Imports: rich."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from rich import progress as bars
from rich.console import Console


class Progress(Protocol):
    """Shown while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, label: str, done: int, total: int) -> None:
        """The work `label` has come to `done` of `total`, in units of its own."""
        ...


class TerminalProgress:
    """One bar a label on stderr; a stderr that is no terminal gets the last state only."""

    def __init__(self) -> None:
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            console=Console(file=sys.stderr),
        )
        self._tasks: dict[str, bars.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done, total=total)
