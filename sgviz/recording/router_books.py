"""The accounts of a router: its attempts are counted without a gap, and only one that failed has another behind it.

Mirrors nothing of SGLang. Imports: events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgviz.events.schema import RouterFailed, RouterPaired

SIDES = frozenset({"prefill", "decode", "both", "request", "unknown"})


@dataclass(slots=True)
class _Account:
    """The last attempt of a request."""

    body: RouterPaired
    failed: RouterFailed | None = None


class RouterBooks:
    """`fault(rule, detail)` is told of the event at hand."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._accounts: dict[str, _Account] = {}

    def paired(self, body: RouterPaired) -> None:
        last = self._accounts.get(body.rid)
        self._accounts[body.rid] = _Account(body)
        if body.attempt == 1:  # also of a name that is used again
            return
        rule = "an attempt behind the first follows one that failed before its first token"
        if last is None or last.body.attempt != body.attempt - 1:
            found = "none" if last is None else f"attempt {last.body.attempt}"
            self._fault(rule, f"before attempt {body.attempt} of {body.rid} comes {found}")
        elif last.failed is None or last.failed.began:
            what = "has not failed" if last.failed is None else "had begun to answer"
            self._fault(rule, f"attempt {last.body.attempt} of {body.rid} {what}")

    def failed(self, body: RouterFailed) -> None:
        last = self._accounts.get(body.rid)
        if body.side not in SIDES:
            self._fault("somebody is to blame, or nobody knows who", f"side {body.side!r} of {body.rid}")
        if last is None or _names(last.body) != _names(body) or last.failed is not None:
            self._fault(
                "an attempt that fails was paired, and fails once", f"attempt {body.attempt} of {body.rid}"
            )
            return
        last.failed = body


def _names(body: RouterPaired | RouterFailed) -> tuple[int, int, str, str]:
    return body.attempt, body.room, body.prefill, body.decode
