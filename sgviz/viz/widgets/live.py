"""Widgets that follow a recording: at most ten updates a second, however fast events come.

The views are made by `viz.views`, the same code that feeds the page `/viz`, and drawn by the same module.
Imports: recording, viz, anywidget.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import anywidget
import msgspec
from matplotlib.figure import Figure
from traitlets import Unicode

from sgviz.errors import BadRequest
from sgviz.recording import Recording
from sgviz.viz.explain_figure import explain_figure
from sgviz.viz.live_page import MODULE
from sgviz.viz.memory_figure import kv_figure, tree_figure
from sgviz.viz.run_figure import run_figure
from sgviz.viz.views import LiveViews, Views, Wanted, themes
from sgviz.viz.views.live import Decode
from sgviz.viz.widgets.fallback import Bundle, png, with_fallback

EVERY_S = 0.1


class SgvizWidget(anywidget.AnyWidget):
    """Base of all: the module, the colours, and a way to close.

    `kind`: which panel. `view`: what is drawn, as JSON. `themes`: colours for light and dark, as JSON.
    """

    _esm = MODULE
    kind = Unicode().tag(sync=True)
    view = Unicode().tag(sync=True)
    themes = Unicode().tag(sync=True)

    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind, themes=msgspec.json.encode(themes()).decode())
        self.on_msg(self._on_message)

    def _on_message(self, widget: object, content: dict[str, Any], buffers: object) -> None:
        """What a person did."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection to the page, and that of the layout, which ipywidgets leaves open."""
        if self.comm is None:  # closed before, or never opened
            return
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()

    def __enter__(self) -> SgvizWidget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LiveWidget(SgvizWidget):
    """Follows `rec` in a thread of its own until `close`; a recording that is over needs no thread.

    Args:
        what: the views it needs. decode: token ids to text, for the nodes of the tree.
    """

    def __init__(
        self, rec: Recording, kind: str, what: tuple[str, ...], decode: Decode | None = None
    ) -> None:
        super().__init__(kind)
        self._rec = rec
        self._views = LiveViews(rec.sibling(), decode)
        self._wanted = Wanted(what=what)
        self._lock = threading.Lock()
        self._nudged, self._ended = threading.Event(), threading.Event()
        self.updates = 0
        self._update(force=True)
        self._thread: threading.Thread | None = None
        if rec.is_live:
            self._thread = threading.Thread(target=self._follow, name=f"sgviz-{kind}", daemon=True)
            self._thread.start()

    @property
    def shown(self) -> Views:
        """What is drawn at this moment, as Python values."""
        return msgspec.json.decode(self.view, type=Views)

    def show(self, **changes: object) -> None:
        """Look at something else: `at` an event number (None: now), the journey of `rid`, the text of `node`.

        Raises:
            BadRequest: no such field, or no such event is remembered.
        """
        try:
            wanted = msgspec.convert({**msgspec.structs.asdict(self._wanted), **changes}, Wanted)
        except msgspec.ValidationError as error:
            raise BadRequest(f"this cannot be looked at: {error}") from None
        self._look(wanted)

    def close(self) -> None:
        """End the thread, close the connection to the page, forget the events."""
        if self.comm is None:  # closed before, or never opened
            return
        self._ended.set()
        self._nudged.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        super().close()

    def _look(self, wanted: Wanted) -> None:
        before, self._wanted = self._wanted, wanted
        try:
            self._update(force=True)
        except BadRequest:
            self._wanted = before
            raise

    def _on_message(self, widget: object, content: dict[str, Any], buffers: object) -> None:
        wish = content.get("wish")
        if not isinstance(wish, dict):
            return
        rid = str(wish.get("rid") or "")
        what = tuple(dict.fromkeys((*self._wanted.what, *(("journey",) if rid else ()))))
        at = wish.get("at")
        try:
            self.show(what=what, at=at, rid=rid, node=int(wish.get("node") or 0))
        except BadRequest:
            self.show(at=None)  # that moment is forgotten: show the present

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                self._update()
            except BadRequest:  # the moment that is looked at fell out of memory
                self._wanted = msgspec.structs.replace(self._wanted, at=None)

    def _update(self, *, force: bool = False) -> None:
        with self._lock:
            if self._ended.is_set() or not (self._views.refresh() or force):
                return
            self.view = msgspec.json.encode(self._views.make(self._wanted)).decode()
            self.updates += 1

    def figure(self) -> Figure:
        """The same as a picture, for pages where nothing runs."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Bundle:
        return with_fallback(super()._repr_mimebundle_(**kwargs), {"image/png": png(self.figure())})


class Dashboard(LiveWidget):
    """Queues, throughput, latencies, KV, batches and requests of a run, now or at any moment that is remembered.

    Click a request for its explanation. `close` returns everything.
    """

    def __init__(self, rec: Recording) -> None:
        super().__init__(rec, "dashboard", ("dashboard",))

    def figure(self) -> Figure:
        return run_figure(self._rec.freeze())


class KVMap(LiveWidget):
    """Every page of the KV pool a cell, coloured by state, owner or age."""

    def __init__(self, rec: Recording) -> None:
        super().__init__(rec, "kv", ("kv",))

    def figure(self) -> Figure:
        return kv_figure(self._rec.freeze())


class RadixTree(LiveWidget):
    """The radix tree and its steps: match, split, insert, lock, evict.

    Args:
        decode: what makes text of token ids, e.g. `engine.pipeline.tokenizer.decode`.
    """

    def __init__(self, rec: Recording, decode: Decode | None = None) -> None:
        super().__init__(rec, "tree", ("tree",), decode)

    def figure(self) -> Figure:
        return tree_figure(self._rec.freeze())


class Journey(LiveWidget):
    """One request through the types that carry it, and where its time went. `rid`: whose ("": one that ended)."""

    def __init__(self, rec: Recording, rid: str = "") -> None:
        if rid:
            rec.request(rid)  # a wrong name is told before anything is opened
        super().__init__(rec, "journey", ("journey",))
        if rid:
            self.show(rid=rid)

    def figure(self) -> Figure:
        shown, frozen = self.shown.journey, self._rec.freeze()
        return explain_figure(frozen, shown.rid) if shown and shown.rid else run_figure(frozen)
