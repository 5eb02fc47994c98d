"""What a debugger asks, answered in the engine's loop: the scheduler's part, and the types that live out here.

The one door for Python, HTTP and widgets. SGLang has no counterpart. Imports: tokenizer_manager, messages, scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sgviz.errors import BadRequest, NotFound
from sgviz.messages.debug import Command, DebugCommand, DebugStatus, DebugView, Look, Resume, TypeView
from sgviz.scheduler.gate.grammar import quoted
from sgviz.scheduler.gate.views import fields_of
from sgviz.tokenizer_manager import TokenizerManager

LONGEST_WAIT_S = 30.0


class Wait(Command, frozen=True, tag="wait"):
    """The status as soon as the scheduler is parked for a later time than `after`, at the latest in `timeout_s`."""

    after: int = 0
    timeout_s: Annotated[float, Meta(ge=0.0, le=LONGEST_WAIT_S)] = 0.0


class StepTo(Command, frozen=True, tag="step_to"):
    """Run on until `rid` is at `to`: its prompt's last or only piece so far is planned, its first token, its end."""

    rid: str
    to: Literal["prefill", "first token", "finish"]


Asked = DebugCommand | Wait | StepTo


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
        if isinstance(command, StepTo):
            await self._check_ahead(session, command)
            command = Resume(until=goal_text(command.rid, command.to))
        done = await desk.ask(session, command)
        return DebugReply(status=done.status, number=done.number, view=done.view)

    async def _check_ahead(self, session: str, step: StepTo) -> None:
        """Raises BadRequest if the request is past it; one that is nowhere yet may come."""
        try:
            reply = await self._with_types(session, Look(what=("types",), rid=step.rid))
        except NotFound:
            return
        types = (reply.view.types if reply.view is not None else None) or ()
        for req in (view.fields for view in types if view.type == "Req"):
            if step.to == "first token" and req["output_ids"]:
                raise BadRequest(f"{step.rid} has its first token already")
            if step.to == "prefill" and req["place"] == "running":
                raise BadRequest(f"{step.rid} is past its prefill")

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


def goal_text(rid: str, to: str) -> str:
    """The text that describes the event at which `rid` is at `to`."""
    name = quoted(rid)
    return {
        "prefill": f'planned and mode != "decode" and {name} in rids',
        "first token": f"sampled and {name} in rids",
        "finish": f'(processed and {name} in finished) or (aborted and rid == {name} and where != "running")',
    }[to]
