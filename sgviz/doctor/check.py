"""One finding of the doctor, and the whole report. Imports: msgspec only."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class State(StrEnum):
    """OK: nothing to do. NONE: not there, and not needed here. WARN: it works, with a drawback.
    BAD: an engine will not start, or not here."""

    OK = "ok"
    NONE = "none"
    WARN = "warn"
    BAD = "bad"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about one thing.

    Attributes:
        topic: heading it stands under: software, machine, GPU, model, network.
        found: the measurement as text.
        advice: one sentence what to do; empty when there is nothing to do.
    """

    topic: str
    name: str
    found: str
    state: State = State.OK
    advice: str = ""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def state(self) -> State:
        """The worst state of all checks."""
        states = {check.state for check in self.checks}
        return next((state for state in (State.BAD, State.WARN) if state in states), State.OK)

    @property
    def exit_code(self) -> int:
        return int(self.state is State.BAD)


def mebibytes(size: int) -> str:
    """A size for people: `512 MiB`, from 10 GiB on `11.7 GiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.0f} MiB"
