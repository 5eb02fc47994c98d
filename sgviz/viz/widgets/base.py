"""What every widget has: the module that draws, the colours, an end that gives everything back; and a beat.

Imports: viz, anywidget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import anywidget
import msgspec
from traitlets import Unicode

from sgviz.viz.live_page import module_text
from sgviz.viz.views import pause, themes


class SgvizWidget(anywidget.AnyWidget):
    """Base of all: the module, the colours, and a way to close.

    `kind`: which panel. `view`: what is drawn, as JSON. `themes`: colours for light and dark, as JSON.

    Args:
        hear: told what a person did, as the page sends it.
    """

    _esm = module_text()  # of a path anywidget would keep every widget ever made, to tell it of changes
    kind = Unicode().tag(sync=True)
    view = Unicode().tag(sync=True)
    themes = Unicode().tag(sync=True)

    def __init__(self, kind: str, hear: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(kind=kind, themes=msgspec.json.encode(themes()).decode())
        self.on_msg(lambda widget, content, buffers: hear(content))

    def close(self) -> None:
        """Close the connection to the page, and that of the layout, which ipywidgets leaves open."""
        if self.comm is None:  # closed before, or never opened
            return
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Beat:
    """Calls `act` in a thread of its own, at most ten times a second, until `close`."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._act = act
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        took = 0.0
        while not self._ended.wait(pause(took)):
            began = time.thread_time()
            self._act()
            took = time.thread_time() - began

    def close(self) -> None:
        """Returns when it has ended; from `act` itself it ends after it."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
