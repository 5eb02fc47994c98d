"""What can go wrong in the KV memory. Imports: errors."""

from __future__ import annotations

from sgviz.errors import SgvizError


class OutOfMemory(SgvizError):
    """Tokens or rows were asked for that do not exist even after eviction; nothing was changed.

    Admission and the decode check are there to prevent it, so it tells of a wrong plan.
    """


class InvalidFree(SgvizError):
    """A slot or row was given back that nobody holds, or that the pool does not have; nothing was changed."""


class CacheMisuse(SgvizError):
    """A verb of the cache was called with lengths or in an order that makes no sense; nothing was changed."""


class CacheCorrupt(SgvizError):
    """An invariant of the KV memory does not hold; the message has every number of the balance."""
