"""The doctor's rounds, and the two ways to show them: a table for people, JSON for programs.

Imports: doctor, msgspec, rich.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgviz.doctor import gpu, machine, models, network, software
from sgviz.doctor.check import Check, DoctorReport, State

_STYLES = {State.OK: "green", State.NONE: "dim", State.WARN: "yellow", State.BAD: "bold red"}
_VERDICTS = {
    State.OK: "Everything an engine needs is here.",
    State.WARN: "An engine starts here; see the warnings.",
    State.BAD: "An engine will not start before the lines marked bad are mended.",
}


def report(settings_port: int = 30000) -> DoctorReport:
    """Look at everything. Takes a few seconds, most of them for importing torch; never raises.

    Args:
        settings_port: the HTTP port a server would take.
    """
    rounds: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        (software.TOPIC, software.checks),
        (gpu.TOPIC, gpu.checks),
        (machine.TOPIC, machine.checks),
        (models.TOPIC, models.checks),
        (network.TOPIC, lambda: network.checks(settings_port)),
    )
    return DoctorReport(checks=tuple(check for topic, probe in rounds for check in _safely(topic, probe)))


def _safely(topic: str, probe: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The findings of a round; a fault of the doctor's own becomes one more finding."""
    try:
        yield from probe()
    except Exception as error:
        found = f"could not be looked at: {type(error).__name__}: {error}"
        yield Check(topic=topic, name=topic, found=found, state=State.WARN, advice="Please report this line.")


def to_json(report: DoctorReport) -> str:
    """The report as indented JSON: `{"state": ..., "checks": [{topic, name, found, state, advice}, ...]}`."""
    body = {"state": report.state, "checks": report.checks}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def render(report: DoctorReport, console: Console | None = None) -> None:
    """Print the report as a table with a verdict below it; to standard output unless a console is given."""
    out = console or Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for check in report.checks:
        if check.topic != topic:
            topic = check.topic
            table.add_row("", f"[bold]{escape(topic)}[/]", "")
        table.add_row(f"[{_STYLES[check.state]}]{check.state:>4}[/]", escape(check.name), _finding(check))
    out.print(table)
    out.print(f"[{_STYLES[report.state]}]{_VERDICTS[report.state]}[/]")


def _finding(check: Check) -> str:
    return escape(check.found) + (f"\n[dim]-> {escape(check.advice)}[/]" if check.advice else "")
