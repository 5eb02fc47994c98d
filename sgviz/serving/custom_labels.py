"""The labels for metrics that a request may bring in a header, e.g. `x-custom-labels: {"team": "search"}`.

Mirrors SGLang's `tokenizer_metrics_custom_labels_header` and its allow-list. They travel in
`request.received`, so a recording can be grouped by them as well.
Imports: msgspec only.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

DEFAULT_HEADER = "x-custom-labels"
Labels = tuple[tuple[str, str], ...]


class CustomLabels(msgspec.Struct, frozen=True, kw_only=True):
    """Which labels are taken (`allowed`, none: no header is read), and from which header."""

    header: str = DEFAULT_HEADER
    allowed: tuple[str, ...] = ()

    def of(self, headers: Mapping[str, str]) -> Labels:
        """The allowed labels of a request, in the order of the allow-list; numbers become text.

        What is not allowed, or no text or number, is left out, and a header that is no JSON object is
        ignored, as SGLang does: a fault in measuring must not fail a request.
        """
        text = headers.get(self.header) if self.allowed else None
        if text is None:
            return ()
        try:
            given = msgspec.json.decode(text, type=dict[str, object])
        except msgspec.DecodeError:
            return ()
        found = ((name, given.get(name)) for name in self.allowed)
        return tuple((name, str(value)) for name, value in found if _is_plain(value))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
