"""The way of one request through the types that carry it, with what each holds and when it came up.

Mirrors the hand-overs of SGLang's pipeline: HTTP body, TokenizerManager, Scheduler, worker, detokenizer,
HTTP chunk. Each type is seen where its first event is.

Imports: events, recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgviz.events.schema import (
    BatchFinished,
    BatchPlanned,
    ChunkSent,
    DisaggPreallocated,
    DisaggQueued,
    DisaggTransferred,
    EmbeddingsPooled,
    Event,
    OutputStreamed,
    QueueEntered,
    RequestConverted,
    RequestReceived,
    RequestTokenized,
    SessionTurn,
    TextEmitted,
)
from sgviz.recording.fold import State
from sgviz.recording.requests import RequestState
from sgviz.recording.routes import ROUTER, Route
from sgviz.recording.tables import NS_PER_MS

Holds = dict[str, str]
WHOLE_ANSWER = "response body"  # in place of an SSE chunk where nothing is streamed


@dataclass(frozen=True, slots=True)
class TypeStep:
    """The request as one type: name, component and pid where it is, ms since arrival, facts it holds."""

    type: str
    component: str
    pid: int
    t_ms: float
    holds: Holds


def journey(state: State, request: RequestState) -> list[TypeStep]:
    """The steps reached so far. A body that is a GenerateReqInput already makes one step, not two."""
    origin = request.stats.created or min((event.t for event in request.marks.values()), default=0)
    steps: list[TypeStep] = []
    kinds = {**_steps(), **(_EMBEDDING if request.embedding else {})}
    if request.side == "prefill":  # there the transfer comes after the forward
        late = ("disagg.transferred", "output.streamed", "text.emitted", "chunk.sent")
        kinds |= {kind: kinds.pop(kind) for kind in late}
    for kind, (name, facts) in kinds.items():
        event = request.marks.get(kind)
        if event is None:
            continue
        step = _step(state, request, event, name, facts, origin)
        if steps and (steps[-1].type, steps[-1].component) == (step.type, step.component):
            step = TypeStep(**{**_fields(steps[-1]), "holds": steps[-1].holds | step.holds})
            steps.pop()
        steps.append(step)
    return steps


def routed_steps(route: Route, origin: int) -> list[TypeStep]:
    """A step for each pair that a router gave the request; `origin`: the zero of their times."""
    return [
        TypeStep(
            type="RouterPaired", component=ROUTER, pid=0, t_ms=(attempt.t - origin) / NS_PER_MS, holds=attempt.holds
        )
        for attempt in route.attempts
    ]  # fmt: skip


def _step(
    state: State, request: RequestState, event: Event, name: str, facts: Callable[..., Holds], origin: int
) -> TypeStep:
    process = state.processes.get(event.component)
    return TypeStep(
        type=_type_of(event.body, name),
        component=event.component,
        pid=process.pid if process else 0,
        t_ms=(event.t - origin) / NS_PER_MS,
        holds=facts(event.body, request.rid.split("#")[0], state),
    )


def _type_of(body: object, name: str) -> str:
    if isinstance(body, ChunkSent) and body.part == "body":
        return WHOLE_ANSWER
    return name or getattr(body, "type", "")


def _fields(step: TypeStep) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__dataclass_fields__}


def _steps() -> dict[str, tuple[str, Callable[..., Holds]]]:
    """Event kind -> (type, facts), in the order of the pipeline; no name: the event says it."""
    return {
        "request.received": ("", _received),
        "request.converted": ("GenerateReqInput", _converted),
        "request.tokenized": ("TokenizedGenerateReqInput", _tokenized),
        "session.turn": ("Req", _turn),
        "disagg.queued": ("Req", _awaits_pair),
        "disagg.preallocated": ("KVReceiver", _preallocated),
        "disagg.transferred": ("KV transfer", _transferred),
        "queue.entered": ("Req", _queued),
        "batch.planned": ("ScheduleBatch", _planned),
        "batch.finished": ("GenerationBatchResult", _finished),
        "embeddings.pooled": ("Pooler", _pooled),
        "output.streamed": ("BatchTokenIDOutput", _streamed),
        "text.emitted": ("BatchStrOutput", _emitted),
        "chunk.sent": ("SSE chunk", _chunk),
    }


def _converted_for_vector(body: RequestConverted, rid: str, state: State) -> Holds:
    unit = "ids" if "id" in body.prompt_kind else "chars"
    return {"prompt": f"{body.prompt_kind}, {body.size} {unit}"}


def _queued_for_vector(body: QueueEntered, rid: str, state: State) -> Holds:
    return {
        "origin_input_ids": f"{body.prompt_tokens} tokens",
        "is_embedding": "True",
        "queue position": str(body.position),
        **({} if body.priority is None else {"priority": str(body.priority)}),
    }


def _finished_for_vector(body: BatchFinished, rid: str, state: State) -> Holds:
    device = _device_time(body, "pooling")
    return {"bid": str(body.bid), "device": device}


def _pooled(body: EmbeddingsPooled, rid: str, state: State) -> Holds:
    return {"embedding": f"{body.dims[body.rids.index(rid)]} numbers"}


def _streamed_for_vector(body: OutputStreamed, rid: str, state: State) -> Holds:
    return {"rids": str(len(body.rids))}


def _passed_on(body: TextEmitted, rid: str, state: State) -> Holds:
    return {"passed on": "unchanged"}


def _received(body: RequestReceived, rid: str, state: State) -> Holds:
    text = {"messages": str(body.messages)} if body.messages else {}
    rest = {"chars": str(body.chars), "stream": str(body.stream)}
    return {"path": body.path, "model": body.model, **text, **rest}


def _converted(body: RequestConverted, rid: str, state: State) -> Holds:
    unit = "ids" if "id" in body.prompt_kind else "chars"
    return {
        "prompt": f"{body.prompt_kind}, {body.size} {unit}",
        "max_new_tokens": str(body.max_new_tokens),
        "temperature": f"{body.temperature:g}",
        **({"stop": ", ".join(map(repr, body.stop))} if body.stop else {}),
    }


def _tokenized(body: RequestTokenized, rid: str, state: State) -> Holds:
    return {"input_ids": f"{body.prompt_tokens} tokens"}


def _turn(body: SessionTurn, rid: str, state: State) -> Holds:
    """Where the ids of a turn come from; they are put together in the scheduler."""
    if not body.parent:
        begins = f"begins anew, {body.forgotten} turns forgotten" if body.replace else "begins"
        return {"session": f"{body.session_id}: {begins}"}
    cut = f", cut at {body.offset}" if body.offset else ""
    without = " without its output" if body.drop_previous_output else ""
    instead = f", instead of {body.forgotten} turns" if body.replace else ""
    context = f"{body.context_tokens} ids of {body.parent}{without}{cut}{instead}"
    return {"session": f"{body.session_id}: {context}, then {body.new_tokens} own"}


def _awaits_pair(body: DisaggQueued, rid: str, state: State) -> Holds:
    return {"side": body.side, "bootstrap_room": str(body.room), "bootstrap server": body.peer}


def _preallocated(body: DisaggPreallocated, rid: str, state: State) -> Holds:
    return {"pages for": f"{body.tokens} tokens", "prefix": f"{body.prefix_len} tokens cached"}


def _transferred(body: DisaggTransferred, rid: str, state: State) -> Holds:
    took = (body.end_ns - body.start_ns) / NS_PER_MS if body.ok and body.start_ns else 0.0
    facts = {
        "bytes": f"{body.bytes:,}",
        "pieces": str(body.pieces),
        "took": f"{took:.2f} ms",
        "over": body.backend,
    }
    return facts if body.ok else {"failed": body.why, **facts}


def _queued(body: QueueEntered, rid: str, state: State) -> Holds:
    return {
        "origin_input_ids": f"{body.prompt_tokens} tokens",
        "max_new_tokens": str(body.max_new_tokens),
        "queue position": str(body.position),
    }


def _planned(body: BatchPlanned, rid: str, state: State) -> Holds:
    member = body.rids.index(rid)
    return {
        "bid": str(body.bid),
        "forward_mode": body.mode,
        "reqs": str(len(body.rids)),
        "extend": f"{body.extend_lens[member]} of {sum(body.extend_lens)} tokens",
        "prefix": f"{body.prefix_lens[member]} tokens cached",
    }


def _finished(body: BatchFinished, rid: str, state: State) -> Holds:
    token = state.batches[body.bid].tokens.get(rid)
    device = _device_time(body, "sampling")
    return {
        "bid": str(body.bid),
        "next_token_id": "none (middle chunk)" if token is None else str(token),
        "device": device,
    }


def _device_time(body: BatchFinished, last: str) -> str:
    """`last`: what the device did behind the forward."""
    text = f"{(body.end_ns - body.start_ns) / NS_PER_MS:.2f} ms"
    if body.forward_end_ns:
        forward, rest = body.forward_end_ns - body.start_ns, body.end_ns - body.sample_start_ns
        text += f" (forward {forward / NS_PER_MS:.2f}, {last} {rest / NS_PER_MS:.2f})"
    return text


def _streamed(body: OutputStreamed, rid: str, state: State) -> Holds:
    member = body.rids.index(rid)
    return {"rids": str(len(body.rids)), "output_ids": f"{body.tokens[member]} new"}


def _emitted(body: TextEmitted, rid: str, state: State) -> Holds:
    member = body.rids.index(rid)
    return {"output_strs": f"{body.chars[member]} new chars", "held back": f"{body.held[member]} ids"}


def _chunk(body: ChunkSent, rid: str, state: State) -> Holds:
    return {"part": body.part, "index": str(body.index), "content": f"{body.chars} chars"}


# the types of a request for a vector, in place of those of the same event
_EMBEDDING: Mapping[str, tuple[str, Callable[..., Holds]]] = MappingProxyType(
    {
        "request.converted": ("EmbeddingReqInput", _converted_for_vector),
        "request.tokenized": ("TokenizedEmbeddingReqInput", _tokenized),
        "queue.entered": ("Req", _queued_for_vector),
        "batch.finished": ("EmbeddingBatchResult", _finished_for_vector),
        "output.streamed": ("BatchEmbeddingOutput", _streamed_for_vector),
        "text.emitted": ("BatchEmbeddingOutput", _passed_on),
    }
)
