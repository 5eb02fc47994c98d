"""What a debugger asks, answered in the engine's loop: the scheduler's part, and the types that live out here.

The one door for Python, HTTP and widgets. SGLang has no counterpart. Imports: tokenizer_manager, messages, scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from sgviz.errors import NotFound
from sgviz.messages.debug import Command, DebugCommand, DebugStatus, DebugView, Look, TypeView
from sgviz.scheduler.gate.views import fields_of
from sgviz.tokenizer_manager import TokenizerManager

LONGEST_WAIT_S = 30.0


class Wait(Command, frozen=True, tag="wait"):
    """The status as soon as the scheduler is parked for a later time than `after`, at the latest in `timeout_s`."""

    after: int = 0
    timeout_s: Annotated[float, Meta(ge=0.0, le=LONGEST_WAIT_S)] = 0.0


Asked = DebugCommand | Wait


class DebugReply(msgspec.Struct, frozen=True, kw_only=True):
    """`number`: of a new breakpoint. `view`: what was looked at."""

    status: DebugStatus
    number: int = 0
    view: DebugView | None = None


class DebugBridge:
    """Belongs to the loop of its manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def ask(self, session: str, command: Asked) -> DebugReply:
        """Do one command. Raises SgvizError with the reason if it cannot be done."""
        self._manager.start()
        desk = self._manager.debug
        if isinstance(command, Wait):
            return DebugReply(status=await desk.wait(command.after, command.timeout_s))
        if isinstance(command, Look) and "types" in command.what:
            return await self._with_types(session, command)
        done = await desk.ask(session, command)
        return DebugReply(status=done.status, number=done.number, view=done.view)

    async def _with_types(self, session: str, command: Look) -> DebugReply:
        """A request may be out here only: on its way in, or ended in the scheduler and not yet answered."""
        here = tuple(self._types(command.rid))
        try:
            done = await self._manager.debug.ask(session, command)
        except NotFound:
            if not here:
                raise
            rest = tuple(section for section in command.what if section != "types")
            done = await self._manager.debug.ask(session, Look(what=rest))
        view = done.view or DebugView()
        view = msgspec.structs.replace(view, types=here + (view.types or ()))
        return DebugReply(status=done.status, view=view)

    def _types(self, rid: str) -> Iterator[TypeView]:
        state = self._manager.rid_to_state.get(rid)
        if state is None:
            return
        component = "tokenizer_manager"
        yield TypeView(type="GenerateReqInput", component=component, fields=fields_of(state.obj))
        own = fields_of(state, skip=("obj", "event", "stats")) | {"text": state.text}
        yield TypeView(type="ReqState", component=component, fields=own)
