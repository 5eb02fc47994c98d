"""Events of an engine that is paused, continued and given other weights. Imports: schema.base."""

from __future__ import annotations

from sgviz.events.schema.base import Body

# ---------------------------------------------------------------- pausing, and other weights


class GenerationPaused(Body, frozen=True, tag="generation.paused"):
    """From the tokenizer manager: new requests wait there from now on. From the scheduler: no batch is planned.

    `mode`: abort (what runs is ended), retract (it gives up its KV and waits), in_place (it stands still), or
    weights (requests wait for other weights). `requests`: how many are under way.
    """

    mode: str
    requests: int


class GenerationContinued(Body, frozen=True, tag="generation.continued"):
    """The pause of `mode` is over, in the component that says so; it began at `since_ns`."""

    mode: str
    since_ns: int


class WeightsUpdated(Body, frozen=True, tag="weights.updated"):
    """From now on forwards run with the weights at `model_path`, called `weight_version`.

    `load_ns`: how long loading took. `progress`: `(rid, output tokens)` of the requests that began before.
    """

    model_path: str
    weight_version: str
    load_ns: int
    progress: tuple[tuple[str, int], ...] = ()
