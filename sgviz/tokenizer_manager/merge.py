"""One reply of the replies of several ranks: done if all did it, with the words of all and the sums of their counters.

Mirrors the merge functions of SGLang's FanOutCommunicator. Imports: messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgviz.messages import (
    DebugReqOutput,
    FlowReply,
    FlushCacheReqOutput,
    GetInternalStateReqOutput,
    SessionReply,
)
from sgviz.messages.flow import (
    ControlReqOutput,
    GetLoadsReqOutput,
    Load,
    PauseGenerationReqOutput,
    ProfileReqOutput,
    UpdateWeightFromDiskReqOutput,
)
from sgviz.tokenizer_manager.ranks import Ranks

Reply = FlushCacheReqOutput | GetInternalStateReqOutput | DebugReqOutput | FlowReply | SessionReply
JOINT = " | "
# of the engine's account: the narrowest of all ranks, the mean, and what the common detokenizer counts
NARROWEST = frozenset({"max_req_input_len"})  # membership only, as the others
MEANS = frozenset({"new_token_ratio"})
COMMON = frozenset({"num_detokenizer_reqs"})


def merged(replies: Sequence[Reply]) -> Reply:
    """One of those given, not empty, in the order of their ranks; a lone one is given back as it is."""
    first = replies[0]
    if len(replies) == 1:
        return first
    if isinstance(first, GetInternalStateReqOutput):
        states = [reply.state for reply in replies if isinstance(reply, GetInternalStateReqOutput)]
        return msgspec.structs.replace(first, state=merged_state(states))
    if isinstance(first, GetLoadsReqOutput):
        return msgspec.structs.replace(first, load=total_load([_load(reply) for reply in replies]))
    if isinstance(first, DebugReqOutput):
        return first
    return _joined(first, replies)


def _joined(first: Any, replies: Sequence[Any]) -> Reply:
    fields: dict[str, Any] = {
        "success": all(reply.success for reply in replies),
        "message": JOINT.join(dict.fromkeys(reply.message for reply in replies)),  # what all say alike, once
    }
    if isinstance(first, ControlReqOutput):
        failed = [reply for reply in replies if not reply.success]
        if failed:
            fields |= {"status": failed[0].status, "param": failed[0].param}
    if isinstance(first, PauseGenerationReqOutput):
        fields["requests"] = sum(reply.requests for reply in replies)
    elif isinstance(first, UpdateWeightFromDiskReqOutput):
        fields["progress"] = {rid: tokens for reply in replies for rid, tokens in reply.progress.items()}
    elif isinstance(first, ProfileReqOutput):
        fields["path"] = JOINT.join(reply.path for reply in replies)
    reply: Reply = msgspec.structs.replace(first, **fields)
    return reply


def merged_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The engine's account of itself: the sums of the ranks' accounts, but for what cannot be summed."""
    return {name: _one(name, [state[name] for state in states]) for name in states[0]}


def _one(name: str, values: list[Any]) -> Any:
    if name in NARROWEST:
        return min(values)
    if name in MEANS:
        return sum(values) / len(values)
    return max(values) if name in COMMON else sum(values)


def accounts(parts: Mapping[int, Reply], ranks: Ranks) -> list[dict[str, Any]]:
    """Of every rank that there is, lost ones too: its number, whether it lives, and its account or why it has none."""
    out: list[dict[str, Any]] = []
    for rank in range(ranks.size):
        part = parts.get(rank)
        account = part.state if isinstance(part, GetInternalStateReqOutput) else {}
        why = {"why": ranks.lost[rank]} if rank in ranks.lost else {}
        if rank in ranks.aside:
            why = {"set_aside": ranks.aside[rank]}
        out.append({"dp_rank": rank, "active": rank not in ranks.lost, **why, **account})
    return out


def _load(reply: Any) -> Load:
    load: Load = reply.load
    return load


def total_load(loads: Sequence[Load]) -> Load:
    """Of all together; the hit rate is the mean of theirs."""
    if len(loads) == 1:
        return loads[0]
    sums = {name: sum(getattr(load, name) for load in loads) for name in Load.__struct_fields__}
    return Load(**{**sums, "cache_hit_rate": sums["cache_hit_rate"] / len(loads)})
