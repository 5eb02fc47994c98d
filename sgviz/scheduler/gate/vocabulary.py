"""What the names of the breakpoint language mean: kinds of events, their nicknames, fields; all from the schema.

A name is a kind (`admit.refused`), its nickname (`refused`), a field (`reason`), or a field of some kinds only
(`batch.size`, `tree.tokens`, `admit.refused.need`). A field that the event lacks makes its comparison false.
Lists compare by their length with numbers and take `"r1" in rids`. SGLang has no counterpart.
Imports: errors, events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

from sgviz.errors import suggest
from sgviz.events.schema import BODY_OF, Reason
from sgviz.scheduler.gate.grammar import KEYWORDS

NOT_SCHEDULER = frozenset({
    "process.started", "engine.configured", "trace.dropped", "trace.cost", "request.received", "request.converted",
    "chunk.sent", "response.finished", "request.tokenized", "request.dispatched", "output.received",
    "request.finished", "text.emitted", "request.refused", "weights.renamed",
    "dp.chose", "dp.rank_changed", "router.paired", "router.failed",
    "loop.resumed",  # told by the gate itself when it opens
})  # fmt: skip
KINDS = tuple(kind for kind in BODY_OF if kind not in NOT_SCHEDULER)
DECISIONS = ("admit.ok", "admit.refused", "tree.evicted", "request.retracted")
NICKNAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "decision": DECISIONS,
    "queued": ("queue.entered",), "sorted": ("queue.sorted",), "matched": ("prefix.matched",),
    "admitted": ("admit.ok",), "refused": ("admit.refused",), "stopped": ("scan.stopped",), "cut": ("chunk.cut",),
    "retracted": ("request.retracted",), "aborted": ("request.aborted",), "planned": ("batch.planned",),
    "launched": ("batch.launched",), "processed": ("batch.processed",), "sampled": ("tokens.sampled",),
    "streamed": ("output.streamed",), "idle": ("loop.idle",), "flushed": ("cache.flushed",),
    "inserted": ("tree.inserted",), "split": ("tree.split",), "evicted": ("tree.evicted",),
    "locked": ("tree.locked",), "taken": ("pool.taken",), "returned": ("pool.returned",),
})  # fmt: skip


class Sort(StrEnum):
    """What kind of value a field has, for comparisons."""

    TEXT = "a text"
    REASON = "a reason"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXTS = "a list of texts"
    LIST = "a list"
    IDS = "a number of ids"


@dataclass(frozen=True, slots=True)
class KindMeaning:
    """The name stands for events of these kinds."""

    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class FieldMeaning:
    """The name stands for a field; None: of whatever event has it. `stamp`: of the event, not of its body."""

    field: str
    kinds: frozenset[str]
    sorts: frozenset[Sort]
    stamp: bool = False


Meaning = KindMeaning | FieldMeaning
_STAMPS: Mapping[str, Sort] = MappingProxyType(
    {"seq": Sort.NUMBER, "iteration": Sort.NUMBER, "kind": Sort.TEXT}
)


def meaning(name: str) -> Meaning | str:
    """What `name` stands for, or a sentence that says why it stands for nothing."""
    if name in KINDS:
        return KindMeaning(frozenset((name,)))
    if name in NICKNAMES:
        return KindMeaning(frozenset(NICKNAMES[name]))
    if name in NOT_SCHEDULER:
        return f"{name} does not happen in the scheduler, so it cannot be parked there"
    if name in _STAMPS:
        return FieldMeaning(name, frozenset(KINDS), frozenset((_STAMPS[name],)), stamp=True)
    prefix, _, field = name.rpartition(".")
    kinds = _kinds_under(prefix) if prefix else frozenset(KINDS)
    sorts = {kind: found for kind in sorted(kinds) if (found := fields(kind).get(field)) is not None}
    if sorts:
        return FieldMeaning(field, frozenset(sorts), frozenset(sorts.values()))
    return _unknown(name, prefix, field, kinds)


def _kinds_under(prefix: str) -> frozenset[str]:
    """The kinds of a group (`batch`), a nickname or a kind."""
    if prefix in KINDS:
        return frozenset((prefix,))
    return frozenset(NICKNAMES.get(prefix) or [kind for kind in KINDS if kind.startswith(prefix + ".")])


def fields(kind: str) -> dict[str, Sort]:
    """The fields of a kind that the language can read; `size` is the number of members of a batch or list of rids."""
    body = BODY_OF[kind]
    hints = get_type_hints(body)
    found = {name: _sort(hints[name]) for name in body.__struct_fields__}
    return found | ({"size": Sort.NUMBER} if "rids" in found else {})


def _sort(hint: object) -> Sort:
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if isinstance(hint, type):
        for kind, sort in ((Reason, Sort.REASON), (bool, Sort.FLAG), (str, Sort.TEXT), (bytes, Sort.IDS)):
            if issubclass(hint, kind):
                return sort
        if issubclass(hint, int | float):
            return Sort.NUMBER
    return Sort.TEXTS if get_args(hint)[:1] == (str,) and get_origin(hint) is tuple else Sort.LIST


def _unknown(name: str, prefix: str, field: str, kinds: frozenset[str]) -> str:
    if prefix and kinds:
        near = suggest(field, _field_names(kinds))
        return f"{field!r} is no field of {prefix} events{near}; they have {', '.join(_field_names(kinds))}"
    near = suggest(name, known_names())
    return f"unknown name {name!r}{near}"


def _field_names(kinds: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for kind in sorted(kinds) for name in fields(kind)))


def known_names() -> list[str]:
    """Everything that may stand alone, for suggestions."""
    return [*NICKNAMES, *KINDS, *_STAMPS, *_field_names(KINDS), *KEYWORDS]
