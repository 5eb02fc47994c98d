"""How far an experiment is: one line on standard error (or below a notebook cell), gone when it is done.

Imports: rich.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Start = Callable[[str, int], Callable[[], None]]
"""`start(text, total)` begins a stretch and gives what is to be called after each step of it."""


@contextlib.contextmanager
def shown(wanted: bool | None) -> Iterator[Start]:
    """Yield the function that begins a stretch. `wanted` None: where somebody can see it."""
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter if wanted is None else wanted):
        yield lambda text, total: lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1)

        def start(text: str, total: int) -> Callable[[], None]:
            progress.reset(task, description=text, total=total)
            return lambda: progress.advance(task)

        yield start
