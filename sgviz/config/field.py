"""What a setting says of itself: a text, where its default comes from, its limits.

Imports: nothing of sgviz.
"""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def field_meta(text: str, source: str, **limits: Any) -> Meta:
    return Meta(description=text, extra={"source": source}, **limits)
