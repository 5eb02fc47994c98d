"""Colour and hatch by cause: one colour a family, one hatch within it, so that grey printers tell them apart.

Imports: recording, viz.style.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgviz.recording import Cause
from sgviz.viz.style import Theme

# cause -> (meaning of the theme, hatch)
LOOKS: Mapping[Cause, tuple[str, str]] = MappingProxyType(
    {
        Cause.CONVERT: ("tokenize", ""),
        Cause.TOKENIZE: ("tokenize", "//"),
        Cause.DISPATCH: ("tokenize", "\\\\"),
        Cause.CONTROLLER: ("tokenize", "--"),
        Cause.INBOX: ("tokenize", ".."),
        Cause.INTAKE: ("tokenize", "xx"),
        Cause.BOOTSTRAP: ("bootstrap", ""),
        Cause.PREALLOC: ("prealloc", ""),
        Cause.AWAITS_KV: ("prealloc", "//"),
        Cause.TRANSFER: ("transfer", ""),
        Cause.PLANNING: ("queue", ""),
        Cause.KV: ("queue", "//"),
        Cause.ROWS: ("queue", "||"),
        Cause.RUNNING_SLOTS: ("queue", "\\\\"),
        Cause.CHUNK_BUDGET: ("queue", "--"),
        Cause.PREFILL_BUDGET: ("queue", "++"),
        Cause.MAX_REQUESTS: ("queue", "xx"),
        Cause.OTHER_KIND: ("queue", "-."),
        Cause.HEAD_OF_LINE: ("queue", ".."),
        Cause.POLICY_ORDER: ("queue", "oo"),
        Cause.PRIORITY: ("queue", "**"),
        Cause.PAUSED: ("queue", "O"),
        Cause.GRAMMAR: ("queue", "///"),
        Cause.PREFETCH: ("queue", "|||"),
        Cause.NEVER_FITS: ("alert", "//"),
        Cause.RETRACTION: ("protected", "//"),
        Cause.RECOMPUTE: ("protected", ".."),
        Cause.PARKED: ("text", "//"),
        Cause.PREFILL: ("prefill", ""),
        Cause.DECODE: ("decode", ""),
        Cause.DECODE_BESIDE_PREFILL: ("mixed", "//"),
        Cause.STALLED_BY_PREFILL: ("private", "//"),
        Cause.DEVICE_BUSY: ("private", ".."),
        Cause.SCHEDULING: ("muted", ""),
        Cause.HANDOVER: ("muted", "//"),
        Cause.PROCESSING: ("muted", ".."),
        Cause.LOOP: ("muted", "\\\\"),
        Cause.SEND: ("output", ""),
        Cause.DETOKENIZE: ("output", "//"),
        Cause.DELIVER: ("output", ".."),
        Cause.RESPOND: ("output", "\\\\"),
        Cause.CLIENT: ("output", "xx"),
        Cause.CHILDREN: ("output", "++"),
        Cause.ROUTE: ("tokenize", "++"),
        Cause.ATTEMPT: ("alert", "xx"),
        Cause.UNEXPLAINED: ("alert", ""),
    }
)


def look(cause: Cause, colours: Theme) -> dict[str, Any]:
    """Keyword arguments of a bar."""
    meaning, hatch = LOOKS[cause]
    return {
        "facecolor": colours.of(meaning),
        "hatch": hatch,
        "edgecolor": colours.ground if hatch else colours.of(meaning),
        "linewidth": 0,
    }
