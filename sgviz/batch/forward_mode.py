"""What a forward does. Imports: nothing."""

from __future__ import annotations

from enum import StrEnum


class ForwardMode(StrEnum):
    """EXTEND adds several positions a request (prefill), DECODE one; MIXED is an extend that carries
    decoding requests as extends of one; PREBUILT has its KV from another server and runs nothing, like IDLE."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    PREBUILT = "prebuilt"
    IDLE = "idle"

    @property
    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE
