"""Widgets of this process in a page of a headless Chromium: what they send is drawn, what is clicked comes back.

Stands in for a notebook's front end, so that a widget's drawing can be looked at without one. The module that draws
and the Python object are the real ones; only the comm between them is replaced by calls of the browser's driver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sgviz.viz.live_page import module_text
from sgviz.viz.widgets import SgvizWidget

PAGE = """<!doctype html><meta charset="utf-8"><style>body { margin: 0; background: %(ground)s; }</style>
<script type="module">
%(module)s
window.models = [];
window.add = (number, fields) => {
  const heard = {};
  const model = {
    get: (name) => fields[name],
    set: (name, value) => { fields[name] = value; for (const call of heard["change:" + name] || []) call(); },
    on: (name, call) => { (heard[name] = heard[name] || []).push(call); },
    off: (name, call) => { heard[name] = (heard[name] || []).filter((each) => each !== call); },
    send: (content) => window.toPython(number, content),
    tell: (content) => { for (const call of heard["msg:custom"] || []) call(content); },
  };
  const el = document.createElement("div");
  el.className = "cell";
  document.body.appendChild(el);
  window.models[number] = { model, close: render({ model, el }) };
};
window.ready = true;
</script>"""


class WidgetPage:
    """Shows `widgets` one below the other.

    Args:
        context: of the browser; its colour scheme and size decide how it looks.
    """

    def __init__(self, context: Any, widgets: Sequence[SgvizWidget], ground: str = "#ffffff") -> None:
        self.faults: list[str] = []
        self._widgets = list(widgets)
        self._shown = [""] * len(self._widgets)
        self._said: list[tuple[int, Any]] = []
        self._heard: list[tuple[int, Any]] = []
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.expose_function("toPython", lambda number, content: self._heard.append((number, content)))
        self.page.set_content(PAGE % {"module": module_text(), "ground": ground})
        self.page.wait_for_function("window.ready")
        for number, widget in enumerate(self._widgets):
            self._catch(number, widget)
            fields = {name: getattr(widget, name) for name in ("kind", "view", "themes")}
            self._shown[number] = fields["view"]
            self.page.evaluate("([number, fields]) => window.add(number, fields)", [number, fields])

    def _catch(self, number: int, widget: SgvizWidget) -> None:
        widget.send = lambda content, buffers=None: self._said.append(
            (number, json.loads(json.dumps(content)))
        )

    def run(self, seconds: float) -> None:
        """Let messages pass for so long."""
        for _ in range(max(1, round(seconds / 0.05))):
            self.page.wait_for_timeout(50)
            self.pump()

    def until(self, condition: str, seconds: float = 20.0) -> None:
        """Run until the JavaScript expression holds."""
        for _ in range(round(seconds / 0.05)):
            if self.page.evaluate(condition):
                return
            self.run(0.05)
        raise AssertionError(f"it did not come true: {condition}")

    def pump(self) -> None:
        heard, self._heard = self._heard, []
        for number, content in heard:
            self._widgets[number]._handle_custom_msg(content, [])
        for number, widget in enumerate(self._widgets):
            if widget.view != self._shown[number]:
                self._shown[number] = widget.view
                self.page.evaluate(
                    "([n, view]) => window.models[n].model.set('view', view)", [number, widget.view]
                )
        said, self._said = self._said, []
        for number, content in said:
            self.page.evaluate("([n, content]) => window.models[n].model.tell(content)", [number, content])

    def close(self) -> None:
        self.page.close()
        assert self.faults == []
