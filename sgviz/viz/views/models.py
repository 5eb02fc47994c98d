"""The values that are drawn. Times are ms since the first event that was seen, KV in tokens. Imports: msgspec."""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all: plain data that JSON holds."""


class Numbers(View, frozen=True):
    """What stands on the dashboard in figures; the same fold gives `GET /sgviz/state` its numbers.

    `seq`: events so far. `per_second`: tokens sampled in the second before the last event (0 when idle).
    `ttft_ms`, `itl_ms`: medians over the requests that ended last, None before the first. `exact`, `tree_exact`: no
    event was lost. `trace_ns`: cost of observing, per event. `dropped`: events lost for good.
    """

    seq: int
    t_ms: float
    iteration: int
    running: int
    waiting: int
    retracted: int
    free: int
    evictable: int
    protected: int
    private_total: int
    total: int
    exact: bool
    tree_exact: bool
    idle: bool
    per_second: float
    ttft_ms: float | None
    itl_ms: float | None
    ended: int
    trace_ns: float | None
    trace_events: int
    dropped: int


class Sample(View, frozen=True, array_like=True):
    """State at a planned batch: for the lines over time."""

    t_ms: float
    running: int
    waiting: int
    free: int
    evictable: int
    protected: int
    private: int
    per_second: float


class BatchBar(View, frozen=True, array_like=True):
    """A batch: when the device ran it (end 0: not yet), its members and new tokens."""

    bid: int
    mode: str
    start_ms: float
    end_ms: float
    members: int
    tokens: int


class Lane(View, frozen=True):
    """A request: its phases as `(name, start, end)`, end 0 while it lasts."""

    rid: str
    phases: tuple[tuple[str, float, float], ...]
    tokens: int
    retractions: int
    done: bool


class DashboardView(View, frozen=True):
    numbers: Numbers
    samples: tuple[Sample, ...]
    batches: tuple[BatchBar, ...]
    lanes: tuple[Lane, ...]
    hidden: int  # requests remembered beyond the lanes shown


class KvMapView(View, frozen=True):
    """Every page a cell, as runs. A run is `[length, state, owner, age]`, flat.

    `pages_per_cell` is 1 unless the pool is too large to draw; then a cell shows its first page in use. `states`:
    what the state numbers mean. `owners`: `(rid or node, tokens)` by owner number (0: nobody). Age: 0 (this
    iteration) to 7 (long ago). `flashes`: `(why, cells)` of evictions and retractions of the last moments.
    """

    seq: int
    t_ms: float
    page_size: int
    pages: int
    pages_per_cell: int
    states: tuple[str, ...]
    owners: tuple[tuple[str, int], ...]
    runs: tuple[int, ...]
    flashes: tuple[tuple[str, tuple[int, ...]], ...]
    evicted: int
    retracted: int
    exact: bool


class TreeNode(View, frozen=True, array_like=True):
    """A node: `tokens` of its own; `used_ms`: when a request last matched, locked or made it (-1: not seen)."""

    node: int
    parent: int
    depth: int
    tokens: int
    locks: int
    owners: tuple[str, ...]
    used_ms: float


class TreeStep(View, frozen=True, array_like=True):
    """A step of the tree: `seq` events lead up to and include it. `what`: match, split, insert, lock, unlock, evict."""

    seq: int
    t_ms: float
    what: str
    node: int
    other: int
    tokens: int
    rid: str


class NodeText(View, frozen=True):
    """The chosen node: its token ids (the first few) and, where somebody can decode them, their text."""

    node: int
    ids: tuple[int, ...]
    of: int
    text: str


class TreeView(View, frozen=True):
    seq: int
    t_ms: float
    nodes: tuple[TreeNode, ...]
    steps: tuple[TreeStep, ...]
    chosen: NodeText | None
    hidden: int
    exact: bool


class JourneyStep(View, frozen=True):
    """One type that carried the request; see `recording.TypeStep`."""

    type: str
    component: str
    pid: int
    t_ms: float
    holds: dict[str, str]


class CausePart(View, frozen=True, array_like=True):
    """A stretch of the explanation: its start since arrival and length in ms."""

    start_ms: float
    length_ms: float
    cause: str
    colour: str
    detail: str
    blockers: tuple[str, ...]


class JourneyView(View, frozen=True):
    """A request from its HTTP body to its text, and where its time went. `rid` "": there is none."""

    rid: str
    steps: tuple[JourneyStep, ...]
    parts: tuple[CausePart, ...]
    total_ms: float
    done: bool
    text: str
    rids: tuple[str, ...]


class LaneSpan(View, frozen=True, array_like=True):
    """A stretch of a lane. `name`: a stage, `hidden` or `exposed`, a batch's mode or `idle`; `bid` 0: of no batch."""

    start_ms: float
    length_ms: float
    name: str
    bid: int


class OverlapNumbers(View, frozen=True):
    """Seconds inside the stretch, as `recording.overlap_account` counts them. `launches`: forwards begun.

    `hidden_share`: of hidden and exposed host time. `busy_share`, `idle_share`: of the stretch.
    """

    hidden_s: float = 0.0
    exposed_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    launches: int = 0
    hidden_share: float = 0.0
    busy_share: float = 0.0
    idle_share: float = 0.0


class OverlapView(View, frozen=True):
    """Host and device over a stretch. `host`: stages. `kinds`: host time hidden or exposed. `device`: forwards, idle.

    `seconds`: how much was asked for. `turns`: `(ms, iteration)` at which turns of the loop began. `column_ms`: width
    of a column where spans are too many to be drawn one by one (0: they are). `cut`: the stretch is shorter than asked,
    it has too many events. `missing`: events lost.
    """

    begin_ms: float
    end_ms: float
    seconds: float
    host: tuple[LaneSpan, ...]
    kinds: tuple[LaneSpan, ...]
    device: tuple[LaneSpan, ...]
    turns: tuple[tuple[float, int], ...]
    numbers: OverlapNumbers
    column_ms: float
    cut: bool
    missing: int


class Views(View, frozen=True):
    """One update: what was asked for, all of the moment after `seq` events, on both its clocks.

    `newest`: events so far. `oldest`: how far back one may go; `*_ms` and `*_iteration` are the same places on the
    two other clocks. `fault`: why nothing new comes, if something is wrong. `rank`, `ranks`: which scheduler this is,
    and which there are, where there are several; all counts are its own.
    """

    seq: int
    newest: int
    oldest: int
    oldest_ms: float
    newest_ms: float
    oldest_iteration: int
    newest_iteration: int
    t_ms: float
    iteration: int
    source: str
    live: bool
    fault: str = ""
    dashboard: DashboardView | None = None
    kv: KvMapView | None = None
    tree: TreeView | None = None
    journey: JourneyView | None = None
    overlap: OverlapView | None = None
    rank: int | msgspec.UnsetType = msgspec.UNSET
    ranks: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
