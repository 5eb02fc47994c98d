"""The debugger's buttons and panes. Imports: errors, viz.widgets, anywidget.

It knows the debugger by what it can do: this wing imports no engine. Commands run in a thread of the widget, because
a step may take long and the notebook's kernel must stay free.
"""

from __future__ import annotations

import html
import queue
import threading
from typing import Any, Protocol

import msgspec

from sgviz.errors import SgvizError
from sgviz.recording import Moment
from sgviz.viz.widgets.base import SgvizWidget
from sgviz.viz.widgets.fallback import Bundle, with_fallback

END = None


class StepDebugger(Protocol):
    """What `engine.debugger()` and `sgviz.connect(url).debugger()` give."""

    def relay(self, body: dict[str, Any]) -> dict[str, Any]: ...

    def back(self, what: Any = "event", count: int = 1) -> Moment: ...

    def forward(self, what: Any = "event", count: int = 1) -> Moment: ...


class Stepper(SgvizWidget):
    """Step, run, pause and look at a scheduler with the mouse, change its limits and policy, look back.

    `close` leaves the debugger to whoever made it.
    """

    def __init__(self, debugger: StepDebugger) -> None:
        super().__init__("stepper", self._hear)
        self._debugger = debugger
        self._asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._waits: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # waiting for a stop must not hold up the button that would cause one
        self._threads = [
            threading.Thread(target=self._serve, args=(each,), name="sgviz-stepper", daemon=True)
            for each in (self._asked, self._waits)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and the connection to the page. The scheduler stays as it is."""
        if self.comm is None:  # closed before, or never opened
            return
        for each in (self._asked, self._waits):
            each.put(END)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        super().close()

    def _hear(self, content: dict[str, Any]) -> None:
        body = content.get("body")
        if isinstance(body, dict):
            (self._waits if body.get("op") == "wait" else self._asked).put(content)

    def _serve(self, asked: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        while (content := asked.get()) is not END:
            try:
                self.send({"call": content.get("call"), "answer": self._answer(dict(content["body"]))})
            except (SgvizError, RuntimeError, ValueError, TypeError) as error:
                self.send({"call": content.get("call"), "error": str(error)})

    def _answer(self, body: dict[str, Any]) -> Any:
        """Raises SgvizError with the reason if it cannot be done."""
        if body.get("op") != "past":
            return self._debugger.relay(body)
        by, what = int(body.get("by", -1)), body.get("what", "event")
        moment = self._debugger.back(what, -by) if by < 0 else self._debugger.forward(what, by)
        shown: dict[str, Any] = msgspec.to_builtins(moment)
        for node in shown["tree"]:
            del node["token_ids"]  # a page shows how many they are
        return shown

    def _repr_mimebundle_(self, **kwargs: Any) -> Bundle:
        words = f"<pre>{html.escape(repr(self._debugger))}</pre>"
        return with_fallback(super()._repr_mimebundle_(**kwargs), {"text/html": words})
