"""Every test that records balances the books at its end: what an engine or a virtual run told must add up.

`watch_engines` is installed once for the session by `conftest.py`; the scheduler's rig calls `must_balance` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from sgviz.recording import Recording


def must_balance(rec: Recording) -> None:
    """Fail with the event that breaks the books. After a loss of events there is nothing to check."""
    report = rec.audit()
    assert report.balanced, str(report)


def watch_engines(patch: pytest.MonkeyPatch) -> None:
    """Audit each engine when it is closed and each virtual run when it is done, if the session uses them.

    Events that were switched off and on again leave holes without a gap in their numbers; such a run is let be.
    """
    engines, virtual = sys.modules.get("sgviz.engine.engine"), sys.modules.get("sgviz.virtual.run")
    if engines is not None:
        _audit_after(patch, engines.Engine, "close", _of_engine)
        _note_switching(patch, engines.Engine)
    if virtual is not None:
        _audit_after(patch, virtual.VirtualRun, "__init__", lambda run: run.recording)


def _audit_after(
    patch: pytest.MonkeyPatch, cls: type, name: str, rec: Callable[[Any], Recording | None]
) -> None:
    inner = getattr(cls, name)

    def outer(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        found = rec(self)
        if found is not None:
            must_balance(found)

    patch.setattr(cls, name, outer)


def _of_engine(engine: Any) -> Recording | None:
    """None if it has no whole story to tell: it never came up, was closed before, or was silenced for a while."""
    done = engine.__dict__.setdefault("_audited", False)
    engine.__dict__["_audited"] = True
    whole = not done and not engine.__dict__.get("_silenced") and engine.pipeline.infos
    return engine.recording() if whole else None


def _note_switching(patch: pytest.MonkeyPatch, cls: type) -> None:
    inner = cls.set_events  # type: ignore[attr-defined]

    def outer(self: Any, on: bool) -> None:
        self.__dict__["_silenced"] = True
        inner(self, on)

    patch.setattr(cls, "set_events", outer)
