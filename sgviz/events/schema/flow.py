"""Events of an engine that is paused, given other weights, profiled and slowed down. Imports: schema.base."""

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


class WeightsRenamed(Body, frozen=True, tag="weights.renamed"):
    """The same weights are called `weight_version` from now on, `before` until now.

    `progress`: `(rid, output tokens that have come)` of the requests that began before. `of_worker`: only the progress
    of a tokenizer worker's requests; the renaming itself is told once, by the main process.
    """

    weight_version: str
    before: str
    progress: tuple[tuple[str, int], ...] = ()
    of_worker: bool = False


# ---------------------------------------------------------------- profiles, and a slower device


class ProfileStarted(Body, frozen=True, tag="profile.started"):
    """torch's profiler watches the process, for `num_steps` forwards (None: until told); the trace comes in `path`."""

    path: str
    num_steps: int | None = None


class ProfileEnded(Body, frozen=True, tag="profile.ended"):
    """It watches no more, and `path` is written, unless `error` says why not."""

    path: str
    error: str = ""


class ForwardsSlowed(Body, frozen=True, tag="forwards.slowed"):
    """From now on each launch is put off by `sleep_s` seconds; 0: no more."""

    sleep_s: float
