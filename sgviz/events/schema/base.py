"""What all event bodies share, and the reasons of a refusal. Imports: msgspec."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why a waiting request was not taken into the batch being planned."""

    KV = "kv"
    ROWS = "rows"
    RUNNING_SLOTS = "running_slots"
    CHUNK_BUDGET = "chunk_budget"
    PREFILL_BUDGET = "prefill_budget"
    MAX_REQUESTS = "max_requests"
    OTHER_KIND = "other_kind"
    HEAD_OF_LINE = "head_of_line"
    NEVER_FITS = "never_fits"
    PRIORITY = "priority"
    PAUSED = "paused"
    GRAMMAR = "grammar"
    PREFETCH = "prefetch"


class Body(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False, tag_field="kind"):
    """Base of all event bodies."""
