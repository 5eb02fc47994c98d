"""Opening sessions and taking turns on a rig."""

from __future__ import annotations

from rig import Rig

from sgviz.events.schema import QueueEntered
from sgviz.messages.session import (
    CloseSessionReqInput,
    CloseSessionReqOutput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    SessionParams,
)
from sgviz.scheduler.stops import Stop

S = "s"


def opened(rig: Rig, name: str = S, capacity: int = 10_000, **options: object) -> OpenSessionReqOutput:
    rig.inbox.send(OpenSessionReqInput(id="q", session_id=name, capacity_of_str_len=capacity, **options))
    rig.until(Stop.RECEIVED)
    reply = rig.replies.pop()
    assert isinstance(reply, OpenSessionReqOutput) and reply.id == "q"
    return reply


def closed(rig: Rig, name: str = S) -> CloseSessionReqOutput:
    rig.inbox.send(CloseSessionReqInput(id="q", session_id=name))
    rig.until(Stop.RECEIVED)
    reply = rig.replies.pop()
    assert isinstance(reply, CloseSessionReqOutput) and reply.id == "q"
    return reply


def turn(rig: Rig, rid: str, ids: list[int], max_new: int = 4, /, **params: object) -> str:
    """Send a turn; it is taken in with the next stops."""
    session = SessionParams(id=str(params.pop("id", S)), rid=params.pop("on", None), **params)
    return rig.submit(ids, max_new, rid=rid, ignore_eos=True, session=session)


def told(rig: Rig, rid: str, ids: list[int], max_new: int = 4, /, **params: object) -> list[int]:
    """Run a turn to its end; returns its output."""
    turn(rig, rid, ids, max_new, **params)
    rig.run()
    assert rig.answers[rid].reason == "length", rig.answers[rid].finish
    return rig.answers[rid].output_ids


def prompt_of(rig: Rig, rid: str) -> list[int]:
    """The prompt with which the scheduler took the request."""
    body = [body for body in rig.bodies(QueueEntered) if body.rid == rid and not body.again][-1]
    return memoryview(body.input_ids).cast("i").tolist()


def refused(rig: Rig, rid: str) -> str:
    answer = rig.answers[rid]
    assert (answer.status, answer.finals, answer.output_ids) == (400, 1, []), answer.finish
    return answer.finish.message
