"""Widgets that follow a recording: at most ten updates a second, however fast events come.

The views are made by `viz.views`, the same code that feeds the page `/viz`, and drawn by the same module.
Imports: recording, viz, anywidget.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import msgspec
from matplotlib.figure import Figure

from sgviz.errors import BadRequest
from sgviz.recording import Recording
from sgviz.recording.overlap_account import overlap_account
from sgviz.viz.explain_figure import explain_figure
from sgviz.viz.frame import nothing
from sgviz.viz.memory_figure import kv_figure, tree_figure
from sgviz.viz.overlap_lanes import lanes_figure
from sgviz.viz.run_figure import run_figure, source_line
from sgviz.viz.style import theme
from sgviz.viz.views import RankedViews, Views, Wanted, check_rank
from sgviz.viz.views.live import Decode
from sgviz.viz.widgets.base import Beat, SgvizWidget
from sgviz.viz.widgets.fallback import Bundle, png, with_fallback


class Recorded(Protocol):
    """An engine, as far as it is looked at."""

    def recording(self) -> Recording: ...


def recording_of(of: object) -> Recording:
    """The recording to look at: an engine has one. Raises BadRequest for anything else."""
    made = getattr(of, "recording", None)
    rec = made() if callable(made) else of
    if not isinstance(rec, Recording):
        raise BadRequest(f"there is nothing to look at in {of!r}; give a recording or an engine")
    return rec


class LiveWidget(SgvizWidget):
    """Follows `rec` in a thread of its own until `close`; a recording that is over needs no thread.

    Args:
        kind: the panel, and the view it needs. decode: token ids to text, for the nodes of the tree.
        look: fields of `views.Wanted`.

    Raises:
        BadRequest: such a thing cannot be looked at. Nothing was opened.
    """

    def __init__(
        self, rec: Recording | Recorded, kind: str, decode: Decode | None = None, **look: object
    ) -> None:
        rec = recording_of(rec)
        wanted = _changed(Wanted(what=(kind,)), look)
        check_rank(wanted.rank, rec.named_ranks)
        super().__init__(kind, self._hear)
        self._rec = rec
        self._views = RankedViews(rec.sibling(), decode)
        self._wanted = wanted
        self._lock = threading.Lock()
        self._closed = False
        self.updates = 0
        self._update(force=True)
        self._beat = Beat(f"sgviz-{kind}", self._follow) if rec.is_live else None

    @property
    def shown(self) -> Views:
        """What is drawn at this moment, as Python values."""
        return msgspec.json.decode(self.view, type=Views)

    def show(self, **changes: object) -> None:
        """Look at something else.

        Args:
            changes: fields of `views.Wanted`: `at` a place on `clock` (`event`, `ms`, `iteration`; None: now), the
                journey of `rid`, the text of `node`, so many `seconds` of the lanes, another `rank`.

        Raises:
            BadRequest: no such field, or no such moment is remembered.
        """
        before, self._wanted = self._wanted, _changed(self._wanted, changes)
        try:
            self._update(force=True)
        except BadRequest:
            self._wanted = before
            raise

    def close(self) -> None:
        """End the thread, close the connection to the page."""
        if self.comm is None:  # closed before, or never opened
            return
        self._closed = True
        if self._beat is not None:
            self._beat.close()
        super().close()

    def _hear(self, content: dict[str, Any]) -> None:
        wish = content.get("wish")
        if not isinstance(wish, dict):
            return
        rid = str(wish.get("rid") or "")
        what = tuple(dict.fromkeys((*self._wanted.what, *(("journey",) if rid else ()))))
        changes = {name: wish[name] for name in ("at", "clock", "seconds", "rank") if name in wish}
        try:
            self.show(what=what, rid=rid, node=int(wish.get("node") or 0), **changes)
        except BadRequest:
            self.show(at=None, **self._rank_of(wish))  # that moment is forgotten: show the present

    def _rank_of(self, wish: dict[str, Any]) -> dict[str, object]:
        """The rank that a wish names, if there is such a one."""
        return {"rank": wish["rank"]} if wish.get("rank") in self._views.ranks else {}

    def _follow(self) -> None:
        try:
            self._update()
        except BadRequest:  # the moment that is looked at fell out of memory
            self._wanted = msgspec.structs.replace(self._wanted, at=None)

    def _update(self, *, force: bool = False) -> None:
        with self._lock:
            if self._closed or not (self._views.refresh() or force):
                return
            self.view = msgspec.json.encode(self._views.make(self._wanted)).decode()
            self.updates += 1

    def figure(self) -> Figure:
        """The same as a picture, for pages where nothing runs: the whole run."""
        return run_figure(self._looked_at())

    def _looked_at(self) -> Recording:
        """The run up to now; of several schedulers the one that is shown."""
        frozen = self._rec.freeze()
        return frozen.rank(self._wanted.rank) if len(frozen.ranks) > 1 else frozen

    def _repr_mimebundle_(self, **kwargs: Any) -> Bundle:
        return with_fallback(super()._repr_mimebundle_(**kwargs), {"image/png": png(self.figure())})


class Dashboard(LiveWidget):
    """Queues, throughput, latencies, KV, batches and requests of a run, now or at any moment that is remembered.

    Click a request for its explanation. `close` returns everything. `rank`, here and below: which scheduler is shown
    first, where there are several.
    """

    def __init__(self, rec: Recording | Recorded, *, rank: int = 0) -> None:
        super().__init__(rec, "dashboard", rank=rank)


class KVMap(LiveWidget):
    """Every page of the KV pool a cell, coloured by state, owner or age."""

    def __init__(self, rec: Recording | Recorded, *, rank: int = 0) -> None:
        super().__init__(rec, "kv", rank=rank)

    def figure(self) -> Figure:
        return kv_figure(self._looked_at())


class RadixTree(LiveWidget):
    """The radix tree and its steps: match, split, insert, lock, evict.

    Args:
        decode: what makes text of token ids, e.g. `engine.pipeline.tokenizer.decode`.
    """

    def __init__(self, rec: Recording | Recorded, decode: Decode | None = None, *, rank: int = 0) -> None:
        super().__init__(rec, "tree", decode, rank=rank)
        self._decode = decode

    def figure(self) -> Figure:
        return tree_figure(self._looked_at(), decode=self._decode)


class OverlapLanes(LiveWidget):
    """Host and device: what the scheduler's thread did, what of it the device hid, the forwards and their gaps.

    Args:
        seconds: how much is shown, up to the moment that is looked at.
    """

    def __init__(self, rec: Recording | Recorded, seconds: float = 1.0, *, rank: int = 0) -> None:
        super().__init__(rec, "overlap", seconds=seconds, rank=rank)

    def figure(self) -> Figure:
        frozen = self._looked_at()
        account = overlap_account(frozen.stamped())
        if not account.launches:
            return nothing(frozen, "no batch was launched yet", theme("light"))
        return lanes_figure({"run": account}, source=source_line(frozen))


class Journey(LiveWidget):
    """One request through the types that carry it, and where its time went.

    `rid`: whose ("": one of `rank` that ended).
    """

    def __init__(self, rec: Recording | Recorded, rid: str = "", *, rank: int = 0) -> None:
        if rid:  # a wrong name is told before anything is opened
            home = recording_of(rec).rank_with(rid)
            if home is None:
                raise BadRequest(f"{rid} was refused before it had a rank; `explain` says why")
            rank = home
        super().__init__(rec, "journey", rid=rid, rank=rank)

    def figure(self) -> Figure:
        shown, frozen = self.shown.journey, self._looked_at()
        return explain_figure(frozen, shown.rid) if shown and shown.rid else run_figure(frozen)


def _changed(wanted: Wanted, changes: dict[str, object]) -> Wanted:
    """Raises BadRequest that names the field at fault."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(wanted), **changes}, Wanted)
    except msgspec.ValidationError as error:
        raise BadRequest(f"this cannot be looked at: {error}") from None
