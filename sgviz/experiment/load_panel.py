"""LoadPanel: a load that is started, stopped and shaped with sliders while one watches; and the same from Python.

A bridge, because it drives an engine; it is drawn by the module of the other widgets and found as
`sgviz.viz.LoadPanel`. Imports: experiment, workload, viz.widgets, anywidget.
"""

from __future__ import annotations

import html
from typing import Any, Generic, Self, TypeVar, overload

import msgspec

from sgviz.engine import Engine
from sgviz.errors import SgvizError
from sgviz.experiment.live_load import MAX_IN_FLIGHT, STEP_S, LiveLoad, LoadCounts
from sgviz.viz.widgets.base import Beat, SgvizWidget
from sgviz.viz.widgets.fallback import Bundle, with_fallback
from sgviz.workload.endless import LoadShape

T = TypeVar("T")
FASTEST = 50.0  # requests a second, the end of the slider; from Python more can be asked for
LONGEST_PROMPT, LONGEST_OUTPUT = 4096, 1024


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """What the page draws. `limits`: where each slider ends. `history`: sent and finished a second, in flight."""

    target: str
    running: bool
    shape: LoadShape
    limits: dict[str, float]
    counts: dict[str, int | float | str]
    history: tuple[tuple[float, float, int], ...]
    step_s: float
    error: str


class Knob(Generic[T]):
    """An attribute of the load's shape: reading tells it, setting changes the running load."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, panel: None, owner: type) -> Self: ...

    @overload
    def __get__(self, panel: LoadPanel, owner: type) -> T: ...

    def __get__(self, panel: LoadPanel | None, owner: type) -> T | Self:
        if panel is None:
            return self
        value: T = getattr(panel.shape, self._name)
        return value

    def __set__(self, panel: LoadPanel, value: T) -> None:
        panel.change(**{self._name: value})


class LoadPanel(SgvizWidget):
    """A load with sliders; `close` stops it.

    `panel.start()`, `panel.stop()` and attributes such as `panel.rate = 5` do without a browser what its buttons and
    sliders do; for the attributes see `sgviz.workload.endless.LoadShape`.

    Args:
        engine: an Engine of this process, or the URL of a served one. max_in_flight: requests at a time, at most.
        api_key: of the server. shape: the load to begin with, as attributes of `LoadShape`.

    Raises:
        Unavailable: nobody answers at the URL. BadRequest: a value is not allowed.
    """

    rate = Knob[float | None]()
    concurrency = Knob[int]()
    prompt_tokens = Knob[int]()
    output_tokens = Knob[int]()
    shared_share = Knob[float]()
    seed = Knob[int]()

    def __init__(
        self,
        engine: Engine | str,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        api_key: str | None = None,
        **shape: object,
    ) -> None:
        self._load = LiveLoad(
            engine, LoadShape().changed(**shape), max_in_flight=max_in_flight, api_key=api_key
        )
        super().__init__("load", self._hear)
        self._where = engine if isinstance(engine, str) else self._load.facts.model
        self._error = ""
        self._show()
        self._beat = Beat("sgviz-load-panel", self._show)

    @property
    def shape(self) -> LoadShape:
        return self._load.shape

    @property
    def counts(self) -> LoadCounts:
        return self._load.counts

    @property
    def running(self) -> bool:
        return self._load.running

    def start(self) -> None:
        """Begin to send, or go on."""
        self._load.start()

    def stop(self) -> None:
        """Send no more; what is under way ends by itself."""
        self._load.stop()

    def change(self, **changes: object) -> None:
        """Several attributes at once; what is not allowed is refused (BadRequest) and changes nothing."""
        self._load.change(**changes)

    def close(self) -> None:
        """End the load and its threads, close the connection to the page."""
        if self.comm is None:  # closed before, or never opened
            return
        self._beat.close()
        self._load.close()
        super().close()

    def _hear(self, content: dict[str, Any]) -> None:
        self._error = ""
        try:
            match content.get("load"):
                case "start":
                    self.start()
                case "stop":
                    self.stop()
                case dict() as changes:
                    self.change(**changes)
        except SgvizError as error:
            self._error = error.message

    def _show(self) -> None:
        view = msgspec.json.encode({"load": self._panel()}).decode()
        if view != self.view:
            self.view = view

    def _panel(self) -> Panel:
        load, counts = self._load, self._load.counts
        return Panel(
            target=f"{load.facts.model} at {self._where}" if self._where != load.facts.model else self._where,
            running=load.running,
            shape=load.shape,
            limits=self._limits(),
            counts={
                **{name: getattr(counts, name) for name in LoadCounts.__slots__},
                "in_flight": counts.in_flight,
            },
            history=tuple(
                (step.sent / STEP_S, step.finished / STEP_S, step.in_flight) for step in load.history
            ),
            step_s=STEP_S,
            error=self._error,
        )

    def _limits(self) -> dict[str, float]:
        """Ends of the sliders: any two of them together fit the context."""
        context, shape = self._load.facts.context_len, self.shape
        return {
            "rate": max(FASTEST, shape.rate or 0.0),
            "concurrency": self._load.max_in_flight,
            "prompt_tokens": min(LONGEST_PROMPT, context - shape.output_tokens),
            "output_tokens": min(LONGEST_OUTPUT, context - shape.prompt_tokens),
            "shared_share": 1.0,
        }

    def _repr_mimebundle_(self, **kwargs: Any) -> Bundle:
        return with_fallback(super()._repr_mimebundle_(**kwargs), {"text/html": self._table()})

    def _table(self) -> str:
        counts = self.counts
        rows = {**msgspec.structs.asdict(self.shape), "sent": counts.sent, "finished": counts.finished,
                "failed": counts.failed, "in flight": counts.in_flight}  # fmt: skip
        cells = "".join(
            f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()
        )
        return f"<table><caption>A load on {html.escape(self._where)}</caption>{cells}</table>"
