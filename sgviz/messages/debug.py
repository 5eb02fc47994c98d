"""The step debugger's messages: commands to a scheduler, its status, and what it shows of itself at a stop.

SGLang has no counterpart. A command travels in a `DebugReq`; one `DebugReqOutput` with the same `id` answers it, and
one without an id tells that the scheduler was parked or runs on. Everything is msgpack here and JSON over HTTP:
a breakpoint is a short text (see `sgviz.scheduler.gate.grammar`), never code. Imports: events.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sgviz.events.schema import Event

LEASE_S = 10.0  # without a sign of life for so long, a debugger is taken for gone
MAX_TEXT = 2000

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Section = Literal["waiting", "running", "chunked", "adder", "pools", "limits", "tree", "batches", "types"]


# ---------------------------------------------------------------- commands


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    """Base of what a debugger may ask."""


class Attach(Command, frozen=True, tag="attach"):
    """Take hold of the scheduler; it runs on until a step, a pause or a breakpoint stops it.

    `lease_s`: seconds without any command after which the debugger counts as gone and the scheduler is let go.
    """

    lease_s: Annotated[float, Meta(gt=0.0, le=600.0)] = LEASE_S


class Resume(Command, frozen=True, tag="resume"):
    """Run on. `to`: `breakpoint` (the next one), `stop` (the next stop of the loop), `iteration` (the next turn).

    `until`: besides, the first event that this text describes; or `local`, the name of a Python predicate.
    """

    to: Literal["breakpoint", "stop", "iteration"] = "breakpoint"
    until: Text = ""
    local: str = ""


class Pause(Command, frozen=True, tag="pause"):
    """Park at the next stop of the loop."""


class Forget(Command, frozen=True, tag="forget"):
    """Give up the step under way: only breakpoints stop the run. A scheduler that is parked stays so."""


class AddBreakpoint(Command, frozen=True, tag="add_breakpoint"):
    """Park at every event that `text` describes (or the Python predicate named `local`)."""

    text: Text = ""
    local: str = ""


class RemoveBreakpoint(Command, frozen=True, tag="remove_breakpoint"):
    number: int


class Look(Command, frozen=True, tag="look"):
    """Show `what` as it is now. `rid`: whose types."""

    what: tuple[Section, ...]
    rid: str = ""


class SetLimits(Command, frozen=True, tag="set_limits"):
    """Change limits of the parked scheduler (None: as it is); they hold from the next stop of the loop on.

    Args:
        chunked_prefill_size: -1: prompts are not cut. schedule_policy: a built-in one.
        max_total_tokens: KV tokens of the pool, only downwards.
    """

    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    schedule_policy: str | None = None
    max_total_tokens: int | None = None


class Renew(Command, frozen=True, tag="renew"):
    """A sign of life."""


class Detach(Command, frozen=True, tag="detach"):
    """Let go: breakpoints vanish, the scheduler runs on."""


DebugCommand = (
    Attach | Resume | Pause | Forget | AddBreakpoint | RemoveBreakpoint | Look | SetLimits | Renew | Detach
)


# ---------------------------------------------------------------- status


class BreakpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A breakpoint: `hits` stops so far. `fault`: why a Python predicate was switched off ("": it was not)."""

    number: int
    text: str
    hits: int = 0
    fault: str = ""

    def __repr__(self) -> str:
        fault = f", off: {self.fault}" if self.fault else ""
        return f"<breakpoint {self.number}: {self.text} ({self.hits} hits{fault})>"


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where the scheduler is parked.

    Attributes:
        why: what parked it: step, pause, a breakpoint. stop: the named stop ("": inside, at `event`).
        event: the event at which it was parked. seq: number of the scheduler's newest event.
        decided: what was just decided and why, in words, newest last.
    """

    stop_no: int
    why: str
    stop: str
    iteration: int
    seq: int
    event: Event | None = None
    decided: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of the event, e.g. `admit.refused`; "" at a named stop."""
        return self.event.kind if self.event is not None else ""

    def __repr__(self) -> str:
        place = self.stop or self.kind
        lines = [f"<stop {self.stop_no} at {place}, iteration {self.iteration} ({self.why})"]
        return "\n".join(lines + [f"  {text}" for text in self.decided]) + ">"


class DebugStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`stop_no` counts the stops so far. `where`: None while it runs. `note`: why the last debugger was let go."""

    attached: bool = False
    parked: bool = False
    stop_no: int = 0
    where: Where | None = None
    breakpoints: tuple[BreakpointView, ...] = ()
    note: str = ""


# ---------------------------------------------------------------- what is shown


class ReqView(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the scheduler. `place`: grammar, waiting, chunked or running.

    `admitted`: into the batch being planned.

    Tokens: `prompt`, `output` so far of `max_new`; `prefix` in KV when its extend was planned, which goes to
    `extend_end`; `kv_allocated` with a slot, of them `kv_protected` shared in the tree. `row`: 0 has none.
    """

    rid: str
    place: str
    prompt: int
    output: int
    max_new: int
    prefix: int
    extend_end: int
    kv_allocated: int
    kv_protected: int
    row: int
    inflight: int
    retractions: int
    admitted: bool = False
    ending: bool = False

    def __repr__(self) -> str:
        flags = [name for name in ("admitted", "ending") if getattr(self, name)]
        again = f", retracted {self.retractions}x" if self.retractions else ""
        tail = f" [{', '.join(flags)}]" if flags else ""
        return (
            f"<{self.rid} {self.place}: prompt {self.prompt}, output {self.output}/{self.max_new}, "
            f"KV {self.kv_allocated} ({self.kv_protected} in the tree){again}{tail}>"
        )


class AdderView(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of the PrefillAdder. `planning`: they stand so now; else so stood they at the end of that plan.

    Tokens: `rem_total` not spoken for, `cur_rem` free for this very step, `rem_input` and `rem_chunk` (None: prompts
    are not cut) of the batch; `reserved` promised to running and admitted requests.
    """

    planning: bool
    iteration: int
    rem_total: int
    cur_rem: int
    rem_input: int
    rem_chunk: int | None
    reserved: int
    can_run: tuple[str, ...]
    chunked: str = ""

    def __repr__(self) -> str:
        when = "now" if self.planning else f"at the end of the plan of iteration {self.iteration}"
        chunk = "none" if self.rem_chunk is None else str(self.rem_chunk)
        return (
            f"<PrefillAdder {when}: rem_total {self.rem_total}, cur_rem {self.cur_rem}, rem_input {self.rem_input}, "
            f"rem_chunk {chunk}; admitted {', '.join(self.can_run) or 'nobody'}>"
        )


class PoolsView(msgspec.Struct, frozen=True, kw_only=True):
    """KV tokens and rows. `moving`: tokens between two owners at this very moment. `held`: private tokens by rid."""

    total: int
    free: int
    evictable: int
    protected: int
    private: int
    moving: int
    rows: int
    free_rows: int
    held: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        held = ", ".join(f"{rid} {tokens}" for rid, tokens in self.held[:8])
        more = f" (+{len(self.held) - 8} more)" if len(self.held) > 8 else ""
        return (
            f"<KV {self.total}: free {self.free}, evictable {self.evictable}, protected {self.protected}, private "
            f"{self.private}; rows {self.free_rows} of {self.rows} free; held by {held or 'nobody'}{more}>"
        )


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """The limits in force. `pending`: those asked for that hold from the next stop on. `policies`: that can be had.

    `max_total_tokens`: KV tokens of the pool; `to_retire` of them go as soon as they are free.
    """

    max_running_requests: int
    chunked_prefill_size: int
    schedule_policy: str
    max_total_tokens: int
    to_retire: int
    pending: dict[str, int | str]
    policies: tuple[str, ...] = ()


class TreeNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree with `tokens` of its own, ids in `token_ids` (int32), and who has locked it."""

    node: int
    parent: int
    depth: int
    tokens: int
    token_ids: bytes
    locks: int
    last_access: int
    hits: int
    owners: tuple[str, ...]

    def __repr__(self) -> str:
        held = f", locked by {', '.join(self.owners)}" if self.owners else ", evictable"
        return f"<node {self.node} under {self.parent}: {self.tokens} tokens{held}>"


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. `place`: planned last, or running (the requests that decode together)."""

    place: str
    bid: int
    mode: str
    rids: tuple[str, ...]
    prefix_lens: tuple[int, ...] = ()
    extend_lens: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<{self.place}: batch {self.bid} ({self.mode}) of {len(self.rids)}: {', '.join(self.rids[:8])}>"
        )


class TypeView(msgspec.Struct, frozen=True, kw_only=True):
    """A request as one of the types that carry it, with its fields as they are now (long lists as their length)."""

    type: str
    component: str
    fields: dict[str, Any]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return f"<{self.type} in {self.component}: {inside}>"


class DebugView(msgspec.Struct, frozen=True, kw_only=True):
    """The sections that were asked for; None for the others."""

    waiting: tuple[ReqView, ...] | None = None
    running: tuple[ReqView, ...] | None = None
    chunked: tuple[ReqView, ...] | None = None
    adder: AdderView | None = None
    pools: PoolsView | None = None
    limits: LimitsView | None = None
    tree: tuple[TreeNodeView, ...] | None = None
    batches: tuple[BatchView, ...] | None = None
    types: tuple[TypeView, ...] | None = None


# ---------------------------------------------------------------- envelopes


class DebugReq(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """To the scheduler: `command` of the debugger that calls itself `session` ("": whoever owns the engine)."""

    id: str
    session: str
    command: DebugCommand


class DebugReqOutput(msgspec.Struct, kw_only=True, tag=True, array_like=True):
    """From the scheduler: the answer to the `id`, or (id "") news of its status.

    `error`: why the command was not done, with the HTTP `error_status` it stands for. `number`: of a new breakpoint.
    """

    id: str
    status: DebugStatus
    error: str = ""
    error_status: int = 400
    number: int = 0
    view: DebugView | None = None
    dp_rank: int = 0
