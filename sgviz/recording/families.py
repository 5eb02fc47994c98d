"""Which requests are samples or prompts of another, by their names. Imports: standard library."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

_PART = re.compile(r"_(?:\d+|warm)(?:_[0-9a-f]{32})?$")  # prompt number, or sample number and a fresh id


def ancestors(rid: str) -> Iterator[str]:
    """The requests that `rid` may be a sample or prompt of, by its name; the nearest first."""
    while (part := _PART.search(rid)) is not None:
        rid = rid[: part.start()]
        yield rid


def parent_name(rid: str, known: Container[str]) -> str | None:
    """The request among `known` that `rid` is a sample or prompt of, if its name says so."""
    return next((name for name in ancestors(rid) if name in known), None)
